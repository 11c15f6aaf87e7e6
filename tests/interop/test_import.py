"""Other people's checkpoints: what is imported computes what transformers' own classes compute, and nothing is dropped unsaid."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import electra as package
from electra.base.batch import Batch
from electra.base.errors import CorruptError, DataError
from electra.data.tokenizer import TOKENIZER, load_tokenizer, tokenizer_bytes, vocabulary_size
from electra.interop.foreign import open_safetensors
from electra.interop.read import read_network
from electra.pretraining.load import load_network
from helpers import electra, our_logits, write_corpus

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

TEXT = "The barak walks the lonute, and the selin reads back."
SIZES = {
    "num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 40,
}  # fmt: skip
PADDED = 8


def theirs(folder: Path, class_name: str, vocab_size: int, **more):
    """A network of random weights, large enough to show, saved as transformers does."""
    architecture = getattr(transformers, class_name)
    config = architecture.config_class(vocab_size=vocab_size, **{**SIZES, **more})
    torch.manual_seed(len(class_name))
    network = architecture(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    return network


@pytest.fixture(scope="module")
def vocabulary(prepared):
    return load_tokenizer(prepared)


def one_row(tokenizer, text=TEXT):
    ids = torch.tensor([tokenizer.encode(text).ids])
    return Batch.of_rows(ids, torch.zeros_like(ids), torch.ones_like(ids).bool())


def their_folder(tmp_path, vocabulary, class_name, **more):
    folder = tmp_path / class_name
    network = theirs(folder, class_name, vocabulary_size(vocabulary) + PADDED, **more)
    (folder / TOKENIZER).write_bytes(tokenizer_bytes(vocabulary))
    return folder, network


def their_outputs(network, batch, **more):
    inputs = {"input_ids": batch.ids, "attention_mask": batch.is_real.long(), **more}
    with torch.no_grad():
        return network(**inputs)[0]


HOLDS = {
    "ElectraForPreTraining": ("discriminator", {"embedding_size": 16}),
    "ElectraForMaskedLM": ("generator", {"embedding_size": 16}),
    "ElectraModel": ("encoder", {"embedding_size": 32}),
    "ElectraForSequenceClassification": ("encoder", {"embedding_size": 16, "num_labels": 3}),
    "ElectraForQuestionAnswering": ("encoder", {"embedding_size": 16}),
    "BertForMaskedLM": ("generator", {}),
    "BertForPreTraining": ("generator", {}),
    "BertModel": ("encoder", {"type_vocab_size": 5}),
    "BertForSequenceClassification": ("encoder", {"layer_norm_eps": 1e-6}),
    "RobertaForMaskedLM": ("generator", {"layer_norm_eps": 1e-3, "type_vocab_size": 1}),
    "XLMRobertaModel": ("encoder", {"type_vocab_size": 1}),
    "CamembertForTokenClassification": ("encoder", {"type_vocab_size": 1}),
    "ModernBertForMaskedLM": ("generator", {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0}),
    "ModernBertForSequenceClassification": ("encoder", {"local_attention": 8, "num_labels": 2, "pad_token_id": 0}),
}


@pytest.mark.parametrize("class_name", HOLDS)
def test_it_computes_what_their_class_computes(class_name, vocabulary, tmp_path):
    kind, more = HOLDS[class_name]
    folder, network = their_folder(tmp_path, vocabulary, class_name, **more)
    done = electra("import", folder, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (
        "electra and transformers" in done.stdout and f"the last {PADDED} rows are padding and were cut" in done.stdout
    )
    ours, size = read_network(tmp_path / "out"), vocabulary_size(vocabulary)
    assert ours.kind == kind and len(ours.encoder.embeddings.table) == size

    batch = one_row(vocabulary, f"{TEXT} {TEXT}")
    states = their_outputs(network.base_model, batch)
    assert (our_logits(ours.encoder, None, batch) - states).abs().max() <= 1e-5
    if kind != "encoder":
        logits = their_outputs(network, batch)
        if kind == "generator":
            logits = logits[..., :size]
        assert (our_logits(ours.encoder, ours.head, batch) - logits).abs().max() <= 1e-5

    # every tensor is either in the network or in the list of those that are not
    report = json.loads((tmp_path / "out" / "import.json").read_text())
    stored = load_file(folder / "model.safetensors")
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert len(stored) == len(kept) + len(report["left_out"])
    for name in report["left_out"]:
        assert name in stored
        assert re.search("pooler|seq_relationship|classifier|qa_outputs|head", name), name
    assert ("left out" in done.stdout) == bool(report["left_out"])


def test_segments_of_bert_and_pairs_of_electra_are_read(vocabulary, tmp_path):
    for class_name, more in (("BertModel", {}), ("ElectraModel", {"embedding_size": 16})):
        folder, network = their_folder(tmp_path, vocabulary, class_name, **more)
        package.import_model(folder, tmp_path / f"out-{class_name}")
        batch = one_row(vocabulary)
        batch.segments[0, 5:] = 1
        states = their_outputs(network, batch, token_type_ids=batch.segments)
        encoder = read_network(tmp_path / f"out-{class_name}", "encoder").encoder
        assert (our_logits(encoder, None, batch) - states).abs().max() <= 1e-5


def test_a_pair_becomes_a_folder_of_two_with_a_recipe(vocabulary, tmp_path):
    main, _ = their_folder(tmp_path, vocabulary, "ElectraForPreTraining", embedding_size=16)
    small = {"embedding_size": 16, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    generator, network = their_folder(tmp_path, vocabulary, "ElectraForMaskedLM", **small)
    tensors = load_file(generator / "model.safetensors")  # as the Hub's generators have it
    tensors["generator_lm_head.weight"] = tensors["electra.embeddings.word_embeddings.weight"].clone()
    save_file(tensors, generator / "model.safetensors")
    imported = package.import_model(main, tmp_path / "out", generator)
    assert imported.left_out == {"generator_lm_head.weight": "the word table or the bias again"}
    assert list(imported.folders) == ["discriminator", "generator"]
    assert load_network(tmp_path / "out").kind == "discriminator"
    again = load_network(tmp_path / "out", "generator")
    batch = one_row(vocabulary)
    expected = their_outputs(network, batch)[..., : vocabulary_size(vocabulary)]
    assert (our_logits(again.encoder, again.head, batch) - expected).abs().max() <= 1e-5
    text = (tmp_path / "out" / "recipe.toml").read_text()
    assert "width = 0.5" in text and 'sharing = "none"' in text and "hidden = 32" in text
    with pytest.raises(DataError, match="is not a generator"):
        package.import_model(main, tmp_path / "other", main)


def roberta_tokenizer(vocabulary_text: str) -> Tokenizer:
    """As RoBERTa's: byte-level, with its own special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "<pad>", "</s>", "<unk>", *alphabet, "Ġt", "Ġth", "Ġthe", "<mask>"]
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e")]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    return tokenizer


def test_robertas_tokenizer_gives_the_same_ids_under_our_names(tmp_path):
    tokenizer = roberta_tokenizer(TEXT)
    folder = tmp_path / "roberta"
    theirs(folder, "RobertaForMaskedLM", tokenizer.get_vocab_size(), type_vocab_size=1, layer_norm_eps=1e-5)
    tokenizer.save(str(folder / "tokenizer.json"))
    done = electra("import", folder, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "<mask> [MASK]" in done.stdout and "the first 2 of 40 positions belong to padding" in done.stdout
    ours = load_tokenizer(tmp_path / "out")
    assert ours.encode(TEXT).ids == tokenizer.encode(TEXT).ids
    special = {"[CLS]": 0, "[PAD]": 1, "[SEP]": 2, "[UNK]": 3}
    assert special.items() <= ours.get_vocab().items() and ours.token_to_id("<s>") is None
    assert ours.encode("a", "b").ids == [0, *ours.encode("a", add_special_tokens=False).ids, 2, *ours.encode("b", add_special_tokens=False).ids, 2]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "settings", "says", "tokens"),
    [
        ("the", None, "has no capitals", ["the", "the"]),
        ("The", None, "has capitals", ["The", "[UNK]"]),
        ("The", {"do_lower_case": True}, "", ["[UNK]", "[UNK]"]),
        ("the", {"do_lower_case": False}, "", ["[UNK]", "[UNK]"]),
    ],
)
def test_the_case_of_a_vocab_txt_is_what_its_folder_or_its_pieces_say(first, settings, says, tokens, tmp_path):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", first, "##s"]
    folder = tmp_path / "model"
    theirs(folder, "BertModel", len(names))
    (folder / "vocab.txt").write_text("\n".join(names) + "\n")
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    notes = package.import_model(folder, tmp_path / "out").notes
    assert (says in " ".join(notes)) if says else not notes
    assert load_tokenizer(tmp_path / "out").encode("The THE", add_special_tokens=False).tokens == tokens


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "BertJapaneseTokenizer"}, "is of a BertJapaneseTokenizer"),
        ("added_tokens.json", {"covid": 6}, "lacks tokens that were added to it: covid"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"6": {"content": "covid"}}}, "added to it: covid"),
    ],
)
def test_a_vocab_txt_that_is_a_part_of_its_tokenizer_is_refused(name, content, says, tmp_path):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the"]
    theirs(tmp_path / "bert", "BertModel", len(names) + 1)
    theirs(tmp_path / "electra", "ElectraForPreTraining", len(names) + 1, embedding_size=16)
    for folder in (tmp_path / "bert", tmp_path / "electra"):
        (folder / "vocab.txt").write_text("\n".join(names) + "\n")
        (folder / name).write_text(json.dumps(content))
    for read in (
        lambda: package.import_model(tmp_path / "bert", tmp_path / "out"),
        lambda: read_network(tmp_path / "electra"),
    ):
        with pytest.raises(DataError, match=says):
            read()
    whole = tmp_path / "tokenizer"
    package.train_tokenizer(write_corpus(tmp_path / "text.txt"), whole, 300)
    with pytest.raises(CorruptError, match="Give the right tokenizer"):  # the source's own is not read then
        package.import_model(tmp_path / "bert", tmp_path / "out", tokenizer=whole)


def test_sharded_and_old_names_and_bin_are_read(vocabulary, tmp_path):
    folder, network = their_folder(tmp_path, vocabulary, "BertForMaskedLM")
    expected = their_outputs(network, one_row(vocabulary))[..., : vocabulary_size(vocabulary)]

    def check(folder, **more):
        out = tmp_path / f"out-{folder.name}"
        package.import_model(folder, out, **more)
        ours = read_network(out)
        difference = our_logits(ours.encoder, ours.head, one_row(vocabulary)) - expected
        assert difference.abs().max() <= 1e-5

    sharded = shutil.copytree(folder, tmp_path / "sharded", ignore=shutil.ignore_patterns("*.safetensors"))
    network.save_pretrained(sharded, max_shard_size="20KB")
    assert (sharded / "model.safetensors.index.json").exists()
    check(sharded)

    old = shutil.copytree(folder, tmp_path / "old")
    tensors = load_file(old / "model.safetensors")
    names = {name: re.sub(r"LayerNorm\.(weight|bias)", lambda it: f"LayerNorm.{'gamma' if it[1] == 'weight' else 'beta'}", name) for name in tensors}  # fmt: skip
    assert any(name.endswith("gamma") for name in names.values())
    save_file({names[name]: tensor for name, tensor in tensors.items()}, old / "model.safetensors")
    check(old)

    pickled = shutil.copytree(folder, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(network.state_dict(), pickled / "pytorch_model.bin")
    with pytest.raises(CorruptError, match="a pickle, which can run code"):
        package.import_model(pickled, tmp_path / "not")
    check(pickled, allow_bin=True)


@pytest.mark.parametrize("length", [int.from_bytes(b"PK", "little"), 0x0280, 0x0480])
def test_a_header_whose_length_spells_a_pickle_is_no_pickle(length, tmp_path):
    path, tensors = tmp_path / "model.safetensors", {"x": torch.arange(3.0)}
    save_file(tensors, path, {"padding": ""})
    shortest = int.from_bytes(path.read_bytes()[:8], "little")
    save_file(tensors, path, {"padding": "x" * (length - shortest)})
    assert int.from_bytes(path.read_bytes()[:8], "little") == length
    assert open_safetensors(path).floats("x").equal(tensors["x"])


def test_the_hubs_cache_is_read_through_its_links(vocabulary, tmp_path):
    folder, _ = their_folder(tmp_path, vocabulary, "BertModel")
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / f"{number}")
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / f"{number}")
    assert package.import_model(snapshot, tmp_path / "out").folders["encoder"]


@pytest.mark.parametrize(
    ("name", "matrix"),
    [("BertForMaskedLM", "cls.predictions.decoder.weight"), ("ModernBertForMaskedLM", "decoder.weight")],
)
def test_an_untied_output_is_not_taken_for_the_word_table(name, matrix, vocabulary, tmp_path):
    folder, _ = their_folder(tmp_path, vocabulary, name, tie_word_embeddings=False, pad_token_id=0)
    assert matrix in load_file(folder / "model.safetensors")
    imported = package.import_model(folder, tmp_path / "out")
    assert list(imported.folders) == ["encoder"] and any("output matrix of its own" in note for note in imported.notes)
    assert matrix in imported.left_out


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model_type": "deberta-v2"}, DataError, "DeBERTa, whose attention knows relative positions"),
        ({"model_type": "whatever"}, DataError, "type 'whatever'"),
        ({"hidden_act": "relu"}, DataError, r"config\.json: .*hidden_act=relu is not supported"),
        ({"position_embedding_type": "relative_key"}, DataError, "position_embedding_type=relative_key"),
        ({"num_hidden_layers": 2}, CorruptError, "does not fit"),
        ({"num_hidden_layers": 4}, CorruptError, "has no layers.3"),
        ({"hidden_size": 64}, CorruptError, "which config.json asks for"),
        ({"pretraining_objective": "electra"}, DataError, "already a model folder of electra"),
    ],
)
def test_what_our_blocks_cannot_hold_is_named(change, error, says, vocabulary, tmp_path):
    folder, _ = their_folder(tmp_path, vocabulary, "BertModel")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=says):
        package.import_model(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*.tmp"))


def test_a_part_of_the_encoder_without_a_place_is_refused(vocabulary, tmp_path):
    folder, _ = their_folder(tmp_path, vocabulary, "BertModel")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"encoder.layer.0.attention.self.distance_embedding.weight": torch.ones(9, 8)}, folder / "model.safetensors")  # fmt: skip
    with pytest.raises(DataError, match=r"no layer here uses: encoder\.layer\.N"):
        package.import_model(folder, tmp_path / "out")


def test_a_tokenizer_with_far_fewer_ids_is_not_its_own(vocabulary, tmp_path):
    theirs(tmp_path / "bert", "BertForMaskedLM", vocabulary_size(vocabulary) + 1025)
    (tmp_path / "bert" / TOKENIZER).write_bytes(tokenizer_bytes(vocabulary))
    done = electra("import", tmp_path / "bert", tmp_path / "out")
    assert done.returncode == CorruptError.exit_code, done.stderr
    assert "too few for the rest to be padding" in done.stderr and "--tokenizer" in done.stderr


def test_names_of_tensors_break_no_line(vocabulary, tmp_path):
    folder, _ = their_folder(tmp_path, vocabulary, "BertModel")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "x\n| y": torch.ones(2)}, folder / "model.safetensors")
    done = electra("import", folder, tmp_path / "out")
    assert "(x\\n| y)" in done.stdout, done.stdout


def test_a_missing_tokenizer_is_asked_for(vocabulary, tmp_path):
    folder, _ = their_folder(tmp_path, vocabulary, "BertModel")
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    done = electra("import", folder, tmp_path / "out")
    assert done.returncode == 3 and "--tokenizer" in done.stderr
    assert package.import_model(folder, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json").folders
