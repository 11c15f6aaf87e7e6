"""Exported discriminators in other people's hands: every class of transformers that has such a network, its pipelines,
sentence-transformers, ONNX. A class with a head of its own must make a new one, whatever the number of labels."""

import inspect
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import electra
from conftest import TINY
from electra.base.batch import Batch
from electra.data.tokenizer import load_tokenizer, special_ids, vocabulary_size
from electra.interop.card import pretrained_card
from electra.interop.read import Pretrained, read_network
from electra.interop.write import probe_batch, write_network
from electra.model import build_detection_head, build_token_head, encoder_alone, initialise
from electra.model.modern import ModernEncoderSettings
from helpers import our_logits

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

TEXT = "The barak walks the lonute, and the selin reads back."
SETTINGS = {
    "electra": TINY,
    "modernbert": ModernEncoderSettings(
        layers=3, hidden=32, heads=2, intermediate=48, embedding=12, positions=64, window=6, global_from="last",
        global_every=2, token_head="tied",
    ),
}  # fmt: skip
CLASSES = (
    ["", "MaskedLM", "MultipleChoice", "QuestionAnswering"]
    + [f"SequenceClassification-{labels}" for labels in ("default", 1, 2, 3, 9)]
    + [f"TokenClassification-{labels}" for labels in ("default", 1, 2, 3, 9)]
)


@pytest.fixture(scope="module", params=list(SETTINGS))
def network(request, prepared):
    return build(SETTINGS[request.param], prepared, "discriminator")


def build(settings, prepared, kind):
    tokenizer = load_tokenizer(prepared)
    size = vocabulary_size(tokenizer)
    head = build_detection_head(settings) if kind == "discriminator" else build_token_head(settings, size)
    encoder, generator = encoder_alone(settings, size), torch.Generator().manual_seed(2)
    initialise(torch.nn.ModuleList((encoder, head)), settings, seed=1)
    with torch.no_grad():
        for parameter in (*encoder.parameters(), *head.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return Pretrained(encoder.eval(), head.eval(), kind, tokenizer, "electra", 24)


def write(network, out):
    card = pretrained_card(network.kind, network.encoder.settings.kind, "", {})
    assert "electra and transformers" in write_network(out, network, card)
    return out


@pytest.fixture(scope="module")
def folder(network, tmp_path_factory):
    return write(network, tmp_path_factory.mktemp("export") / "model")


def one_row(tokenizer, text=TEXT):
    ids = torch.tensor([Tokenizer.from_str(tokenizer.to_str()).encode(text).ids])
    return Batch.of_rows(ids, torch.zeros_like(ids), torch.ones_like(ids).bool())


@pytest.mark.parametrize("reader", CLASSES)
def test_every_class_reads_the_encoder_and_makes_a_head_of_its_own(folder, network, reader):
    name, _, labels = reader.partition("-")
    more = {"num_labels": int(labels)} if labels.isdigit() else {}
    loader = getattr(transformers, f"AutoModelFor{name}" if name else "AutoModel")
    model, report = loader.from_pretrained(folder, output_loading_info=True, **more)
    probe = probe_batch(network.tokenizer, 40)
    inputs = {"input_ids": probe.ids, "attention_mask": probe.is_real.long(), "token_type_ids": probe.segments}
    inputs = {key: value for key, value in inputs.items() if key in inspect.signature(model.forward).parameters}
    with torch.no_grad():
        states = model.eval().base_model(**inputs)[0]
        choices = {key: value[:, None] for key, value in inputs.items()} if name == "MultipleChoice" else inputs
        outputs = model(**choices)
    expected = our_logits(network.encoder, None, probe)
    assert (states - expected)[probe.is_real].abs().max() <= 1e-5

    base = {id(parameter) for parameter in model.base_model.parameters()}
    own = {key for key, parameter in model.named_parameters() if id(parameter) not in base}
    assert own <= set(report["missing_keys"]) and not report["mismatched_keys"]
    if (
        network.encoder.settings.kind == "modernbert"
    ):  # ELECTRA's folder has its head in the same file, as Google's have
        assert not report["unexpected_keys"], "AutoModel prints a table of them at the first snippet"
    count = int(labels) if labels.isdigit() else 2
    rows, length = probe.ids.shape
    shapes = {
        "": (rows, length, 32),
        "MaskedLM": (rows, length, vocabulary_size(network.tokenizer)),
        "MultipleChoice": (rows, 1),
        "QuestionAnswering": (rows, length),
        "SequenceClassification": (rows, count),
        "TokenClassification": (rows, length, count),
    }
    assert outputs[0].shape == shapes[name]


def test_the_pipeline_gives_the_detectors_probabilities(prepared, tmp_path):
    network = build(SETTINGS["modernbert"], prepared, "discriminator")
    out = write(network, tmp_path / "out")
    answers = transformers.pipeline("token-classification", str(out / "detector"), ignore_labels=[])(TEXT)
    batch = one_row(network.tokenizer)
    probabilities = our_logits(network.encoder, network.head, batch)[0, 1:-1].double().sigmoid().tolist()
    assert min(probabilities) < 0.4 and max(probabilities) > 0.6
    for answer, probability in zip(answers, probabilities, strict=True):
        assert answer["entity"] == ("replaced" if probability > 0.5 else "original")
        assert answer["score"] == pytest.approx(max(probability, 1 - probability), abs=1e-5)


def test_pipelines_on_the_encoder_and_on_a_generator(folder, network, prepared, tmp_path):
    answers = transformers.pipeline("feature-extraction", str(folder))(TEXT)
    expected = our_logits(network.encoder, None, one_row(network.tokenizer))
    assert (torch.tensor(answers) - expected).abs().max() <= 1e-5
    assert transformers.pipeline("text-classification", str(folder))(TEXT)[0]["label"] in ("LABEL_0", "LABEL_1")

    generator = build(network.encoder.settings, prepared, "generator")
    assert generator.encoder.settings.embedding < generator.encoder.settings.hidden
    text = TEXT.replace("lonute", "[MASK]")
    answer = transformers.pipeline("fill-mask", str(write(generator, tmp_path / "generator")))(text)[0]
    batch = one_row(network.tokenizer, text)
    place = batch.ids[0].tolist().index(special_ids(network.tokenizer).mask)
    logits = our_logits(generator.encoder, generator.head, batch)[0, place]
    assert answer["token"] == logits.argmax().item()
    assert answer["score"] == pytest.approx(logits.softmax(0).max().item(), abs=1e-5)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("kind", ["discriminator", "generator", "encoder"])
def test_the_lines_of_the_card_run(settings, kind, prepared, tmp_path, monkeypatch):
    network = build(settings, prepared, kind)
    out = write(replace(network, head=None) if kind == "encoder" else network, tmp_path / "out")
    monkeypatch.chdir(out)
    blocks = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == (2 if kind == "discriminator" and settings.kind == "modernbert" else 1)
    for block in blocks:
        exec(block, {})


def test_both_layouts_are_read_here(prepared, tmp_path):
    """Older exports are the detector itself, with one label."""
    network = build(SETTINGS["modernbert"], prepared, "discriminator")
    new, old = write(network, tmp_path / "new"), tmp_path / "old"
    shutil.copytree(new / "detector", old)
    config = json.loads((old / "config.json").read_text())
    assert config["id2label"] == {"0": "original", "1": "replaced"}
    config |= {"id2label": {"0": "replaced"}, "label2id": {"replaced": 0}}
    (old / "config.json").write_text(json.dumps(config))
    (old / "MANIFEST.json").unlink(missing_ok=True)
    tensors = load_file(old / "model.safetensors")
    tensors |= {name: tensors[name][1:].clone() for name in ("classifier.weight", "classifier.bias")}
    save_file(tensors, old / "model.safetensors")
    probe = probe_batch(network.tokenizer, 64)
    expected = our_logits(network.encoder, network.head, probe)
    for path in (new, new / "detector", old):
        again = read_network(path)
        assert again.kind == "discriminator" and (again.objective, again.length) == ("electra", 24)
        assert (our_logits(again.encoder, again.head, probe) - expected)[probe.is_real].abs().max() <= 1e-5
        assert read_network(path, "encoder").head is None
        assert electra.load(path).detect(TEXT)[0].probability == pytest.approx(
            our_logits(network.encoder, network.head, one_row(network.tokenizer))[0, 1].sigmoid().item(), abs=1e-5
        )


def test_sentence_transformers_read_it(folder, network):
    sentences = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    vectors = sentences.SentenceTransformer(str(folder), device="cpu").encode([TEXT], convert_to_tensor=True)
    expected = our_logits(network.encoder, None, one_row(network.tokenizer)).mean(1)
    assert (vectors - expected).abs().max() <= 1e-5


def test_onnx_runs_what_was_exported(folder, network, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    detector = folder / "detector" if (folder / "detector").is_dir() else folder
    reader = transformers.AutoModelForTokenClassification
    model = (reader if detector != folder else transformers.AutoModelForPreTraining).from_pretrained(detector).eval()
    probe = probe_batch(network.tokenizer, 40)
    inputs = probe.ids, probe.is_real.long()
    axes = {0: torch.export.Dim("rows"), 1: torch.export.Dim("length")}
    shapes = {"input_ids": axes, "attention_mask": axes}
    path = tmp_path / "model.onnx"
    given = dict(zip(shapes, inputs, strict=True))
    torch.onnx.export(model, (), str(path), kwargs=given, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = runtime.InferenceSession(str(path))
    for rows, length in ((len(probe.ids), probe.ids.shape[1]), (1, 7)):
        batch = {key: value[:rows, :length] for key, value in given.items()}
        (logits, *_) = session.run(None, {key: value.numpy() for key, value in batch.items()})
        with torch.no_grad():
            expected = model(**batch).logits
        assert (torch.from_numpy(logits) - expected)[batch["attention_mask"].bool()].abs().max() <= 1e-4
