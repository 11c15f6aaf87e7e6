"""What we write loads offline with transformers' Auto classes and gives the same numbers; what they wrote loads here."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from electra.base.batch import Batch
from electra.base.errors import CorruptError, DataError
from electra.data.tokenizer import adopt_vocabulary, load_tokenizer, special_ids, vocabulary_size
from electra.interop import write
from electra.interop.read import Pretrained, read_network
from electra.pretraining.load import export_networks, load_run
from electra.pretraining.settings import build_objective
from helpers import electra, our_logits

transformers = pytest.importorskip("transformers", reason="needs the hf extra")
TEXT = "The barak walks the lonute, and the [MASK] walks back."


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("export") / "model"
    done = electra("export", finished_run, out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same ids and same logits") == 2
    return out


def test_the_discriminator_loads_with_the_auto_classes_and_has_our_logits(exported, finished_run):
    folder = exported / "discriminator"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForPreTraining.from_pretrained(folder).eval()
    inputs = tokenizer([TEXT, "back."], padding=True, return_tensors="pt")
    _, objective = load_run(finished_run)
    with torch.no_grad():
        theirs = model(**inputs).logits
        hidden = objective.discriminator(inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"].bool())
        ours = objective.detection_head(hidden)
    real = inputs["attention_mask"].bool()
    assert (ours - theirs)[real].abs().max() <= 1e-5
    body = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        assert (body(**inputs).last_hidden_state - hidden)[real].abs().max() <= 1e-5


def test_the_generator_fills_masks_in_a_pipeline(exported, finished_run):
    fill = transformers.pipeline("fill-mask", str(exported / "generator"))
    answers = fill(TEXT)
    _, objective = load_run(finished_run)
    tokenizer = Tokenizer.from_file(str(finished_run / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(TEXT).ids])  # [MASK] is the special token here, as in transformers
    with torch.no_grad():
        encoder, head, _ = objective.networks()["generator"]
        logits = head(encoder(ids, torch.zeros_like(ids), None), encoder)
    place = ids[0].tolist().index(special_ids(tokenizer).mask)
    assert answers[0]["token"] == logits[0, place].argmax().item()
    assert answers[0]["score"] == pytest.approx(logits[0, place].softmax(0).max().item(), abs=1e-5)


def test_the_run_folder_ends_with_an_export_of_the_discriminator(finished_run):
    loaded = read_network(finished_run / "export", "discriminator")
    _, objective = load_run(finished_run)
    assert torch.equal(loaded.encoder.embeddings.words.weight, objective.discriminator.embeddings.words.weight)


def test_their_tokenizer_gives_our_ids_for_every_kind_of_tokenizer(finished_run, tmp_path):
    """transformers 5 silently builds another tokenizer for ELECTRA unless the class is PreTrainedTokenizerFast."""
    config = json.loads((finished_run / "export" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    theirs = transformers.AutoTokenizer.from_pretrained(finished_run / "export")
    ours = Tokenizer.from_file(str(finished_run / "export" / "tokenizer.json"))
    for text in (*write.PROBE, TEXT):
        assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert theirs.model_max_length == 32 and theirs.mask_token == "[MASK]"


def test_an_export_whose_tokenizer_would_be_read_otherwise_is_not_kept(finished_run, tmp_path, monkeypatch):
    honest = write.tokenizer_config
    monkeypatch.setattr(
        write,
        "tokenizer_config",
        lambda *a: honest(*a) | {"tokenizer_class": "ElectraTokenizer", "do_lower_case": False},
    )
    settings, objective = load_run(finished_run)
    with pytest.raises(CorruptError, match="tokenizer and ours read the probe differently"):
        main = {"discriminator": objective.networks()["discriminator"]}
        export_networks(settings, main, finished_run, tmp_path / "bad", {})
    assert not list(tmp_path.iterdir())


def test_an_export_with_other_logits_is_not_kept(finished_run, tmp_path, monkeypatch):
    honest = write.network_tensors

    def harmed(*parts):
        tensors = honest(*parts)
        return tensors | {"electra.embeddings.LayerNorm.bias": tensors["electra.embeddings.LayerNorm.bias"] + 0.1}

    monkeypatch.setattr(write, "network_tensors", harmed)
    settings, objective = load_run(finished_run)
    with pytest.raises(CorruptError, match="different logits"):
        main = {"discriminator": objective.networks()["discriminator"]}
        export_networks(settings, main, finished_run, tmp_path / "bad", {})
    assert not list(tmp_path.iterdir())


def test_a_probe_longer_than_the_network_is_cut_as_transformers_cuts_it(finished_run, tmp_path):
    settings, _ = load_run(finished_run)
    encoder, rows = settings.encoder.model_copy(update={"positions": 9}), settings.rows.model_copy(update={"length": 9})
    short = settings.model_copy(update={"encoder": encoder, "rows": rows})
    tokenizer = load_tokenizer(finished_run / "tokenizer.json")
    objective = build_objective(short, tokenizer)
    main = {"discriminator": objective.networks()["discriminator"]}
    (exported,) = export_networks(short, main, finished_run, tmp_path / "short", {})
    assert "read back by electra and transformers" in exported.note


def test_a_vocabulary_with_a_repeated_line_can_be_exported(finished_run, tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "a", "the", "b"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    tokenizer = adopt_vocabulary(tmp_path / "vocab.txt")
    assert (tokenizer.get_vocab_size(), vocabulary_size(tokenizer)) == (8, 9)
    settings, _ = load_run(finished_run)
    objective = build_objective(settings, tokenizer)
    parts = objective.discriminator, objective.detection_head
    line = write.write_network(tmp_path / "out", Pretrained(*parts, "discriminator", tokenizer), "card")
    assert "same ids and same logits" in line


def test_truncation_and_padding_in_a_foreign_tokenizer_do_not_cut_text(finished_run, tmp_path):
    folder = shutil.copytree(finished_run / "export", tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "MANIFEST.json").unlink()
    assert len(read_network(folder, "discriminator").tokenizer.encode(TEXT).ids) > 8


def test_a_folder_that_transformers_wrote_loads_here(finished_run, tmp_path):
    config = transformers.ElectraConfig(
        vocab_size=300,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=40,
    )
    model = transformers.ElectraForPreTraining(config).eval()
    model.save_pretrained(tmp_path)
    shutil.copy(finished_run / "tokenizer.json", tmp_path)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        network = read_network(tmp_path, "discriminator")
        batch = Batch.of_rows(ids, torch.zeros_like(ids), torch.ones_like(ids).bool())
        ours = our_logits(network.encoder, network.head, batch)
        assert (ours - model(ids).logits).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("config.json", b"{", CorruptError, "cannot be read"),
        ("config.json", b'{"model_type": "bert"}', DataError, "of type 'bert', not electra"),
        ("config.json", b"[]", CorruptError, "cannot be read"),
        ("config.json", b"\xff", CorruptError, "cannot be read"),
        ("tokenizer.json", b"{}", CorruptError, "not a tokenizer.json"),
        ("model.safetensors", b"\x80\x04cos\nsystem\n", CorruptError, "a pickle under the name of a safetensors file"),
        ("model.safetensors", None, DataError, "has no model.safetensors"),
    ],
)
def test_a_folder_that_cannot_be_trusted_is_refused(finished_run, tmp_path, name, content, error, message):
    folder = tmp_path / "model"
    shutil.copytree(finished_run / "export", folder)
    (folder / "MANIFEST.json").unlink()
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(error, match=message):
        read_network(folder, "discriminator")


def test_an_existing_folder_is_not_overwritten(finished_run, exported):
    again = electra("export", finished_run, exported)
    assert again.returncode == 0, "the same files to the byte: a killed export is repeatable"
    card = next(exported.rglob("README.md"))
    card.write_text("mine")
    again = electra("export", finished_run, exported)
    assert again.returncode == 5 and "exists already" in again.stderr and card.read_text() == "mine"


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu_new"},
        {"hidden_act": "relu"},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
    ],
)
def test_an_electra_that_we_would_compute_otherwise_is_refused(change, toy_model, tmp_path):
    """Read with our own value its logits would be others, and nothing would say so."""
    folder = shutil.copytree(toy_model, tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (folder / "MANIFEST.json").unlink()
    ((key, value),) = change.items()
    with pytest.raises(DataError, match=f"{key}={value} is not supported"):
        read_network(folder, "encoder")
