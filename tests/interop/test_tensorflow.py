"""Checkpoints that TensorFlow wrote (make_tensorflow_checkpoints.py): every tensor as TensorFlow's own reader has it, the networks as
transformers computes them, and nothing but an error from files that were cut, flipped or made to harm."""

import json
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import electra as package
from electra.base.batch import Batch
from electra.base.errors import CorruptError, DataError
from electra.interop.read import read_network
from electra.interop.tensorflow import crc32c, masked, ordered, parse_entry, read_bundle, table_entries
from helpers import electra, our_logits

STORED = Path(__file__).parent / "tensorflow"
KINDS = ("electra", "bert", "partitioned", "bfloat16")
PREFIX = "model.ckpt-7"


@pytest.fixture
def copy(tmp_path):
    return lambda kind: shutil.copytree(STORED / kind, tmp_path / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_as_tensorflow_reads_it(kind):
    weights, expected = read_bundle(STORED / kind / PREFIX), load_file(STORED / kind / "expected.safetensors")
    assert {name for name in weights.shapes if "adam_" not in name} == expected.keys()
    for name, values in expected.items():
        assert weights.shapes[name] == values.shape
        assert np.array_equal(weights.read(name).numpy(), values), name


@pytest.mark.parametrize("length", [0, 1, 9, 1023, 1024, 1025, 5000, 1 << 18])
def test_checksums_are_those_of_the_definition(length):
    """CRC-32C bit by bit: the polynomial 0x1EDC6F41, reflected."""
    data = random.Random(length).randbytes(length)
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    assert crc32c(data) == register ^ 0xFFFFFFFF
    assert crc32c(b"123456789") == 0xE3069283


def test_numbers_in_ordered_code_sort_as_numbers():
    values = sorted({sign * (1 << bits) + more for sign in (-1, 1) for bits in range(0, 50, 3) for more in (-1, 0, 1)})
    assert sorted(values, key=ordered) == values
    assert (ordered(-1), ordered(0), ordered(63), ordered(64)) == (b"\x7f", b"\x80", b"\xbf", b"\xc0\x40")


def as_transformers(expected, class_name, scope, heads, **sizes):
    """The network of transformers' class with the tensors that TensorFlow read, renamed as transformers 4 did it."""
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    architecture = getattr(transformers, class_name)
    network = architecture(
        architecture.config_class(num_attention_heads=heads, vocab_size=24, num_hidden_layers=2, **sizes)
    )
    table = {
        "kernel": "weight",
        "gamma": "weight",
        "beta": "bias",
        "output_bias": "bias",
        "dense_1": "dense_prediction",
    }
    state = network.state_dict()
    filled = set()
    for name, values in expected.items():
        path = name.replace("layer_", "layer/").split("/")
        if path[0] == "generator" and scope == "generator":
            path[0] = "electra"
        elif path[0] == "electra" and scope == "generator" and path[1] != "embeddings":
            continue
        if name == "generator_predictions/output_bias":
            path = ["generator_lm_head", "bias"]
        target = ".".join(table.get(part, part) for part in path)
        target = target if target in state else f"{target}.weight"
        if target in state:
            state[target].copy_(torch.from_numpy(values.T if path[-1] == "kernel" else values))
            filled.add(target)
    network.load_state_dict(state)
    tied = {name for name in state if name.endswith(("decoder.weight", "decoder.bias", "lm_head.weight"))}
    assert state.keys() - filled - tied <= {
        name for name in state if "seq_relationship" in name or "position_ids" in name
    }
    return network.eval()


def logits(network, batch):
    with torch.no_grad():
        return network(input_ids=batch.ids, token_type_ids=batch.segments)[0]


def batch() -> Batch:
    ids = torch.randint(20, (3, 16), generator=torch.Generator().manual_seed(1))
    segments = torch.zeros_like(ids)
    segments[:, 9:] = 1
    return Batch.of_rows(ids, segments, torch.ones_like(ids).bool())


def test_googles_electra_is_what_transformers_makes_of_it(tmp_path):
    done = electra("import", STORED / "electra", tmp_path / "out", "--heads", 2)
    assert done.returncode == 0, done.stderr
    expected = load_file(STORED / "electra" / "expected.safetensors")
    sizes = {"embedding_size": 8, "max_position_embeddings": 16}
    main = as_transformers(
        expected, "ElectraForPreTraining", "electra", 2, hidden_size=16, intermediate_size=32, **sizes
    )
    ours = read_network(tmp_path / "out" / "discriminator", "discriminator")
    assert (our_logits(ours.encoder, ours.head, batch()) - logits(main, batch())).abs().max() <= 1e-6
    small = as_transformers(
        expected, "ElectraForMaskedLM", "generator", 1, hidden_size=8, intermediate_size=16, **sizes
    )
    ours = read_network(tmp_path / "out" / "generator", "generator")
    assert (our_logits(ours.encoder, ours.head, batch()) - logits(small, batch())[..., :20]).abs().max() <= 1e-6

    # what was left out and decided is said
    left_out = json.loads((tmp_path / "out" / "import.json").read_text())["left_out"]
    assert left_out.pop("global_step") == "counts the steps of training"
    assert len(left_out) == 98 and set(left_out.values()) == {"state of the optimizer"}
    assert all(name.endswith(("adam_m", "adam_v")) for name in left_out)
    assert "state of the optimizer: 98 tensors" in done.stdout and "the last 4 rows are padding" in done.stdout
    recipe = (tmp_path / "out" / "recipe.toml").read_text()
    assert "width = 0.5" in recipe and 'sharing = "tied"' in recipe


@pytest.mark.parametrize("kind", ["bert", "partitioned", "bfloat16"])
def test_googles_bert_is_what_transformers_makes_of_it(kind, tmp_path):
    source = STORED / kind / (PREFIX if kind == "partitioned" else f"{PREFIX}.index" if kind == "bfloat16" else "")
    more = {} if kind == "bert" else {"heads": 4}
    imported = package.import_model(source, tmp_path / "out", **more)
    assert not any("attention heads" in note for note in imported.notes)
    expected = load_file(STORED / kind / "expected.safetensors")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    network = as_transformers(expected, "BertForPreTraining", "bert", 4, **sizes)
    ours = read_network(tmp_path / "out", "generator")
    assert (our_logits(ours.encoder, ours.head, batch()) - logits(network, batch())[..., :20]).abs().max() <= 1e-6
    reasons = {"BERT's pooler, which nothing here reads": 2, "BERT's head for the next sentence": 2}
    assert {why: list(imported.left_out.values()).count(why) for why in imported.left_out.values()} == reasons


def test_what_nothing_says_is_guessed_and_said(copy, tmp_path):
    imported = package.import_model(copy("electra"), tmp_path / "out")
    assert any("attention heads: 1 for 16 units, since nothing says how many" in note for note in imported.notes)
    assert any("no capitals" in note for note in imported.notes)


def test_several_checkpoints_and_where_their_pointer_leads(copy, tmp_path):
    folder = copy("bert")
    for path in list(folder.glob(f"{PREFIX}.*")):
        shutil.copy(path, folder / path.name.replace("-7", "-8"))
    (folder / "checkpoint").write_text('model_checkpoint_path: "/etc/elsewhere/model.ckpt-8"\n')
    assert package.import_model(folder, tmp_path / "out").folders
    (folder / "checkpoint").write_text('model_checkpoint_path: "../../secret"\n')
    with pytest.raises(DataError, match=r"2 checkpoints \(model.ckpt-7, model.ckpt-8\)"):
        package.import_model(folder, tmp_path / "other")


# Damage and malice


def data_file(folder: Path) -> Path:
    return folder / f"{PREFIX}.data-00000-of-00001"


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 0.999])
def test_cut_files_are_refused(share, copy, tmp_path):
    for name in (f"{PREFIX}.index", data_file(Path()).name):
        folder = copy("bert")
        path = folder / name
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        done = electra("import", folder, tmp_path / "out")
        assert done.returncode == 4 and PREFIX in done.stderr and not (tmp_path / "out").exists()
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["electra", "partitioned"])
def test_no_flipped_bit_goes_unseen(kind, copy):
    """Of the index every byte counts but the handle of the metadata and the padding behind it, which nobody reads; of the data every
    byte does. 20 places of each."""
    folder, rng = copy(kind), random.Random(3)
    expected = {name: values.tobytes() for name, values in load_file(folder / "expected.safetensors").items()}
    for path in (folder / f"{PREFIX}.index", data_file(folder)):
        whole = path.read_bytes()
        for _ in range(20):
            data = bytearray(whole)
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            try:
                weights = read_bundle(folder / PREFIX)
                assert {name: weights.read(name).numpy().tobytes() for name in expected} == expected
            except CorruptError:
                continue
            slots = [name for name in weights.shapes if "adam_" in name]
            assert slots or path.suffix == ".index", "a flipped bit of a weight was not seen"
        path.write_bytes(whole)


def rebuilt(index: Path, change) -> None:
    """An index with a true checksum over entries that were changed: what somebody would write who means harm."""
    write_index(index, change(dict(table_entries(index.read_bytes()))))


def number(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def block(entries: dict[bytes, bytes]) -> bytes:
    body = b"".join(number(0) + number(len(k)) + number(len(v)) + k + v for k, v in sorted(entries.items()))
    body += struct.pack("<II", 0, 1)
    return body + b"\0" + struct.pack("<I", masked(crc32c(body + b"\0")))


def write_index(path: Path, entries: dict[bytes, bytes], footer: bytes | None = None) -> None:
    data = block(entries)
    meta = block({})
    top = block({b"\xff": number(0) + number(len(data) - 5)})
    handles = number(len(data)) + number(len(meta) - 5) + number(len(data) + len(meta)) + number(len(top) - 5)
    path.write_bytes(data + meta + top + (footer or handles.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)))


def entry(type=1, shape=(4,), shard=0, offset=0, size=16, checksum=0, more=b"") -> bytes:
    """A BundleEntryProto."""
    sizes = b"".join(b"\x12" + number(len(it)) + it for it in (b"\x08" + number(length) for length in shape))
    parts = b"\x08" + number(type) + b"\x12" + number(len(sizes)) + sizes
    parts += b"\x18" + number(shard) + b"\x20" + number(offset) + b"\x28" + number(size)
    return parts + b"\x35" + struct.pack("<I", checksum) + more


HEADER = b"\x08\x01"
GOOD = b"bert/embeddings/word_embeddings"
HOSTILE = {
    "shape-absurd": ({b"": HEADER, GOOD: entry(shape=(1 << 40, 1 << 20), size=1 << 62)}, "is cut|has the shape"),
    "shape-and-size-differ": ({b"": HEADER, GOOD: entry(shape=(1 << 40,), size=16)}, "has the shape"),
    "shape-negative": ({b"": HEADER, GOOD: entry(shape=(-4, -1), size=16)}, "has the shape"),
    "dimensions": ({b"": HEADER, GOOD: entry(shape=(1,) * 5000, size=4)}, "has the shape"),
    "offset": ({b"": HEADER, GOOD: entry(offset=1 << 50)}, "is cut"),
    "offset-negative": ({b"": HEADER, GOOD: entry(offset=-16)}, "is cut"),
    "size-negative": ({b"": HEADER, GOOD: entry(size=-16)}, "has the shape"),
    "shard-beyond": ({b"": HEADER, GOOD: entry(shard=9)}, "in file 9 of 1"),
    "shards-many": ({b"": b"\x08" + number(1 << 40), GOOD: entry()}, "data files"),
    "no-header": ({GOOD: entry()}, "data files"),
    "byte-order": ({b"": HEADER + b"\x10\x01", GOOD: entry()}, "byte order"),
    "type-unknown": ({b"": HEADER, GOOD: entry(type=77)}, "type 77"),
    "checksum-wrong": ({b"": HEADER, GOOD: entry(checksum=5)}, "the checksum of .* does not match"),
    "not-a-buffer": ({b"": HEADER, GOOD: b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"}, "damaged"),
    "number-for-text": ({b"": HEADER, GOOD: b"\x10\x05"}, "number where text"),
    "name-no-utf-8": ({b"": HEADER, b"\xfe\xff": entry()}, "damaged"),
    "slice-missing": ({b"": HEADER, GOOD: entry(more=b"\x3a\x06\x0a\x04\x08\x00\x10\x04")}, "a slice of"),
    "slice-dimensions": ({b"": HEADER, GOOD: entry(more=b"\x3a\x00")}, "dimensions"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_index_ends_in_one_line(name, copy):
    entries, says = HOSTILE[name]
    folder = copy("bert")
    write_index(folder / f"{PREFIX}.index", entries)
    with pytest.raises(CorruptError, match=says):
        read_bundle(folder / PREFIX).read(GOOD.decode())


def test_a_rebuilt_index_is_read(copy):
    """The ones above are refused for what they say, not for how they are written."""
    folder = copy("bert")
    rebuilt(folder / f"{PREFIX}.index", lambda entries: entries)
    weights, expected = read_bundle(folder / PREFIX), load_file(folder / "expected.safetensors")
    assert all(np.array_equal(weights.read(name).numpy(), values) for name, values in expected.items())


def test_slices_that_overlap_leave_no_hole_unseen(copy, tmp_path):
    """Three times the first third of a table are as many rows as the table has."""
    folder, name = copy("partitioned"), b"bert/embeddings/word_embeddings"
    first = b"\x3a\x08\x0a\x02\x10\x08\x0a\x02\x10\x10"  # rows 0 to 8, columns 0 to 16
    whole = entry(shape=(24, 16), size=0, more=3 * first)
    rebuilt(folder / f"{PREFIX}.index", lambda entries: entries | {name: whole})
    with pytest.raises(CorruptError, match="word_embeddings has NaN"):
        package.import_model(folder, tmp_path / "out")


def test_a_slice_without_a_length_is_the_whole_dimension():
    rows_and_all_columns = b"\x3a\x06\x0a\x02\x10\x08\x0a\x00"
    assert parse_entry(entry(more=rows_and_all_columns)).slices == [[(0, 8), (0, -1)]]


def test_links_and_missing_files_are_refused(copy, tmp_path):
    folder = copy("bert")
    secret = tmp_path / "secret"
    data_file(folder).rename(secret)
    with pytest.raises(CorruptError, match="missing"):
        package.import_model(folder, tmp_path / "out")
    data_file(folder).symlink_to(secret)
    with pytest.raises(CorruptError, match="a link that leads out of its folder"):
        package.import_model(folder, tmp_path / "out")


def test_other_networks_are_named(copy, tmp_path):
    folder = copy("bert")
    data, zero = entry(shape=(), size=4, checksum=masked(crc32c(b"\0" * 4))), b"\0" * 4
    data_file(folder).write_bytes(zero)
    write_index(folder / f"{PREFIX}.index", {b"": HEADER, b"resnet/conv/kernel": data})
    with pytest.raises(DataError, match="neither ELECTRA nor BERT: its tensors are resnet/conv/kernel"):
        package.import_model(folder, tmp_path / "out")
    write_index(folder / f"{PREFIX}.index", {b"": HEADER, b"model/x/.ATTRIBUTES/VARIABLE_VALUE": data})
    with pytest.raises(DataError, match="TensorFlow 2's objects"):
        package.import_model(folder, tmp_path / "out")
