"""ONNX, sentence-transformers and transformers out of any model, and nothing kept that a fresh process reads otherwise."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import jaxtyping
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from electra.base.errors import CorruptError
from electra.finetuning.folder import load_task_folder
from electra.inspector import export as exporting
from electra.inspector import load
from electra.inspector.fresh import FreshProcess
from electra.inspector.verify import verify
from electra.interop import onnx as graphs
from electra.interop.read import Pretrained
from electra.interop.write import PretrainedNetwork, answers_of, largest_differences, probe_batch, write_network
from electra.model import build_detection_head, encoder_alone, initialise
from electra.model.modern import ModernEncoderSettings
from helpers import electra, environment, who_asks

ort = pytest.importorskip("onnxruntime", reason="needs the onnx extra")
pytest.importorskip("onnxscript", reason="needs the onnx extra")
TEXTS = ["The barak walks.", "", "the timin reads the gorak, and the gorak reads back. " * 3, "Äpfel 🙂 日本語"]
MODERN = ModernEncoderSettings(
    layers=3, hidden=32, heads=2, intermediate=48, embedding=12, positions=64, window=6, global_every=2
)


@pytest.fixture(autouse=True, scope="module")
def unchecked_shapes():
    """While a network is traced its sizes are symbols, which the checker of signatures takes for no numbers."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class Believing(FreshProcess):
    """Of a test that reads the folder itself."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def check(self, *_):
        return "nobody"


@pytest.fixture
def believing(monkeypatch):
    monkeypatch.setattr(exporting, "FreshProcess", Believing)


@pytest.fixture(scope="module")
def modern(finished_run, tmp_path_factory):
    """The folder of a ModernBERT discriminator; large weights, so that a wrong mask or angle shows."""
    tokenizer = load(finished_run).tokenizer
    encoder, head = encoder_alone(MODERN, 400), build_detection_head(MODERN)
    initialise(torch.nn.ModuleList((encoder, head)), MODERN, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (*encoder.parameters(), *head.parameters()):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    out = tmp_path_factory.mktemp("modern") / "model"
    write_network(out, Pretrained(encoder.eval(), head.eval(), "discriminator", tokenizer), "")
    return out


def test_a_detector_of_modern_layers_becomes_a_graph_that_a_fresh_process_reads(modern, tmp_path):
    """Batch and length are not those that it was made with, padding and windows included; transformers is the judge."""
    transformers = pytest.importorskip("transformers")
    done = electra("export", modern, tmp_path / "out", "--format", "onnx", "--int8", afresh=True)
    assert done.returncode == 0, done.stderr
    assert "opset 20, same logits as ours in onnxruntime at" in done.stdout and "int8 has" in done.stdout
    notes = json.loads((tmp_path / "out" / "onnx.json").read_text())
    assert notes["inputs"] == ["input_ids", "attention_mask"] and notes["outputs"] == ["logits", "last_hidden_state"]
    assert 0 < notes["int8"]["largest_difference"]["logits"] < 0.2 * notes["int8"]["largest"]["logits"]
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(modern / "detector").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    session = ort.InferenceSession(tmp_path / "out" / "model.onnx")
    for texts in (TEXTS[:1], TEXTS, TEXTS[2:3] * 7):
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            expected = theirs(**inputs).logits
        logits, _ = session.run(None, {name: inputs[name].numpy() for name in notes["inputs"]})
        is_real = inputs["attention_mask"].bool()
        assert (expected - torch.from_numpy(logits))[is_real].abs().max() < 1e-4
    assert verify(tmp_path / "out") == []
    with (tmp_path / "out" / "model.onnx").open("ab") as file:
        file.write(b"x")
    assert "model.onnx has" in verify(tmp_path / "out")[0]


@pytest.fixture(scope="module")
def graph(finished_run):
    network = load(finished_run).network
    source = graphs.OnnxNetwork(PretrainedNetwork(network).eval(), network.tokenizer, 1, 32)
    return source, graphs.make_graphs(source, int8=False).files[graphs.GRAPH]


def test_a_graph_of_the_paper_s_layers_has_our_logits(graph):
    source, content = graph
    session, probe = graphs.OnnxSession(content), probe_batch(source.tokenizer, 32)
    assert session.inputs == ["input_ids", "attention_mask", "token_type_ids"]
    found, expected = session(probe), answers_of(source.network)(probe)
    assert max(largest_differences(probe, expected, found).values()) < 1e-5
    other = replace(probe, segments=torch.zeros_like(probe.segments))
    assert largest_differences(probe, expected, session(other))["logits"] > 1e-3, "segments are read"


def test_a_graph_with_other_weights_is_refused_at_every_shape(graph):
    import onnx

    source, content = graph
    model = onnx.load_model_from_string(content)
    table = max(model.graph.initializer, key=lambda it: len(it.raw_data))
    table.raw_data = (np.frombuffer(table.raw_data, np.float32) * 1.1).astype(np.float32).tobytes()
    session = graphs.OnnxSession(model.SerializeToString())
    for batch in graphs.other_shapes(source):
        with pytest.raises(CorruptError, match=r"onnxruntime at \(\d, \d+\) gets different logits"):
            graphs.check_shape(batch, answers_of(source.network), session)


@pytest.mark.slow  # its first report goes out after some seconds
def test_onnxruntime_tells_nobody_that_we_use_it(graph, tmp_path):
    (tmp_path / "model.onnx").write_bytes(graph[1])
    code = (
        "import sys, time; from pathlib import Path; from electra.interop.onnx import OnnxSession;"
        "session = OnnxSession(Path(sys.argv[1]).read_bytes()); time.sleep(15)"
    )
    with who_asks() as (proxied, asked):
        env = environment(proxied)
        del env["ORT_DISABLE_TELEMETRY"]
        subprocess.run([sys.executable, "-c", code, tmp_path / "model.onnx"], env=env, check=True, timeout=120)
    assert asked == []


def write_rows(path, count=40):
    rows = [{"text": f"the barak {'walks' if n % 2 else 'reads'} {n}", "label": "ab"[n % 2]} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def finetuned(model, folder, table, *words):
    done = electra("finetune", model, table, "--out", folder / "tasks", "epochs=2", "length=40", *words)
    assert done.returncode == 0, done.stderr
    return next((folder / "tasks").glob("*/seed-0"))


def test_a_classifier_keeps_its_answers_and_int8_says_what_it_costs(
    toy_model, tmp_path, believing, monkeypatch, capsys
):
    table = write_rows(tmp_path / "table.jsonl")
    model = finetuned(toy_model, tmp_path, table)
    done = electra("export", model, tmp_path / "out", "--format", "onnx", "--int8", "--dev", table, "--license", "mit")
    assert done.returncode == 0, done.stderr
    notes = json.loads((tmp_path / "out" / "onnx.json").read_text())
    dev = notes["int8"]["dev"]
    import electra as package

    assert dev["rows"] == 40 and dev["float32"] == package.evaluate(model, table)["scores"]
    assert (
        f"accuracy on 40 dev rows {dev['float32']['accuracy']:.4f}, int8 {dev['int8']['accuracy']:.4f}" in done.stdout
    )
    whole, quantized = (dev[name]["accuracy"] for name in ("float32", "int8"))
    assert ("int8 costs a lot" in done.stderr) == (whole - quantized > 0.03 * whole)
    assert (tmp_path / "out" / "task.json").is_file() and notes["outputs"] == ["logits"]
    card = ModelCard.load(tmp_path / "out" / "README.md", ignore_metadata_errors=False)
    assert (card.data.library_name, card.data.license, len(card.data.eval_results)) == ("onnx", "mit", 5)
    assert card.text.partition("## Data")[2] == (model / "README.md").read_text().partition("## Data")[2]
    monkeypatch.chdir(tmp_path / "out")
    (block,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    exec(block, {})
    assert len(block.splitlines()) == 5 and "array([[" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["electra", "modern"])
@pytest.mark.parametrize("kind", ["tagging", "plain", "joint"])
def test_every_head_becomes_a_graph(toy_model, modern, tmp_path, kind, encoder):
    if kind == "tagging":
        rows = [{"tokens": ["the", "barak", str(n)], "ner_tags": ["O", "B-PER", "O"]} for n in range(30)]
        words = []
    else:
        told = {"answers": [{"text": "barak", "answer_start": 4}]}
        rows = [{"id": str(n), "question": "who", "context": f"the barak walks {n}", **told} for n in range(30)]
        words = [f"head={kind}", "max_query_length=8"]
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = finetuned(toy_model if encoder == "electra" else modern, tmp_path, table, *words)
    done = electra("export", model, tmp_path / "out", "--format", "onnx", "--int8", "--dev", table)
    assert done.returncode == 0, done.stderr
    dev = json.loads((tmp_path / "out" / "onnx.json").read_text())["int8"]["dev"]
    import electra as package

    assert dev["float32"] == pytest.approx(package.evaluate(model, table)["scores"], abs=1e-6)


def test_sentence_transformers_gives_the_vectors_of_embed(finished_run, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    done = electra("export", finished_run, tmp_path / "st", "--format", "sentence-transformers", afresh=True)
    assert done.returncode == 0, done.stderr
    assert "same ids, states and vectors (mean, 24 tokens) as ours" in done.stdout
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "st"), device="cpu")
    assert theirs.max_seq_length == 24, "as many tokens as a row of pre-training, not as positions"
    vectors = theirs.encode(TEXTS, show_progress_bar=False)
    np.testing.assert_allclose(vectors, load(finished_run).embed(TEXTS, length=24), atol=1e-5)
    np.testing.assert_allclose(vectors, load(tmp_path / "st").embed(TEXTS, length=24), atol=1e-5)
    assert verify(tmp_path / "st") == []


@pytest.mark.parametrize("encoder", ["electra", "modern"])
def test_large_weights_are_several_files_that_transformers_and_we_read(
    finished_run, modern, tmp_path, believing, encoder
):
    transformers = pytest.importorskip("transformers")
    source = modern if encoder == "modern" else finished_run / "export"
    done = electra("export", source, tmp_path / "out", "--shard-size", "20KB")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "out"
    shards = sorted(folder.glob("model-*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(shards) > 2 and not (folder / "model.safetensors").exists()
    assert {shard.name for shard in shards} == set(index["weight_map"].values())
    theirs, before = (transformers.AutoModel.from_pretrained(it).eval() for it in (folder, source))
    assert all(torch.equal(it, before.state_dict()[name]) for name, it in theirs.state_dict().items())
    np.testing.assert_array_equal(load(folder).embed(TEXTS), load(source).embed(TEXTS))
    assert verify(folder) == []
    shards[1].write_bytes(shards[1].read_bytes()[:-4] + b"\0\0\0\1")
    assert f"{shards[1].name} has sha256" in verify(folder)[0]
    assert electra("embed", folder, "-", "--out", tmp_path / "x.npy", stdin="x").returncode == 4
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    del manifest[shards[1].name]
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    assert f"its manifest does not name {shards[1].name}" in verify(folder)[0]


def test_what_a_fresh_process_reads_otherwise_is_said_and_nothing_is_kept(finished_run, tmp_path, monkeypatch):
    """The second folder is changed after all that is checked in this process: the fresh one alone, which has read the first, can
    see it."""
    asked = []

    class Spoiling(FreshProcess):
        def check(self, folder, architecture, tokenizer, ours):
            asked.append(self.process.pid)
            if len(asked) == 2:
                text = (folder / "tokenizer.json").read_text()
                assert '"lowercase": true' in text
                (folder / "tokenizer.json").write_text(text.replace('"lowercase": true', '"lowercase": false'))
            return super().check(folder, architecture, tokenizer, ours)

    monkeypatch.setattr(exporting, "FreshProcess", Spoiling)
    done = electra("export", finished_run, tmp_path / "out", afresh=True)
    assert done.returncode == 4 and "in a process of its own: tokenizer.json gives different ids" in done.stderr
    assert len(asked) == 2 and len(set(asked)) == 1, "one process for all folders"
    assert list(tmp_path.iterdir()) == []


def test_an_int8_that_costs_much_is_a_warning(toy_model, tmp_path, believing, monkeypatch):
    table = write_rows(tmp_path / "table.jsonl")
    model = finetuned(toy_model, tmp_path, table)
    scores = iter([{"accuracy": 0.9}, {"accuracy": 0.8}])
    monkeypatch.setattr("electra.finetuning.classification.Classification.scores", lambda *_: next(scores))
    done = electra("export", model, tmp_path / "out", "--format", "onnx", "--int8", "--dev", table)
    assert done.returncode == 0, done.stderr
    assert "int8 costs a lot: accuracy 0.8000 where float32 has 0.9000. Use the float32 graph." in done.stderr


@pytest.mark.slow
def test_other_logits_in_a_fresh_process_name_who_and_how_much(toy_model, tmp_path):
    table = write_rows(tmp_path / "table.jsonl")
    model = finetuned(toy_model, tmp_path, table)
    again = shutil.copytree(model, tmp_path / "again")
    trained = load_task_folder(model)
    words = again, json.loads((model / "task.json").read_text())["architecture"], trained.task.tokenizer
    with FreshProcess() as fresh:
        assert fresh.check(*words, answers_of(trained.model)) == "electra and transformers in a process of its own"
        process = fresh.process.pid
        with torch.no_grad():
            trained.model.head.label.output.bias.add_(1.0)
        with pytest.raises(CorruptError, match=r"process of its own: electra gets different logits .*1 in logits"):
            fresh.check(*words, answers_of(trained.model))
        fresh.process.kill()
        with pytest.raises(CorruptError, match="it ended with exit code -9"):
            fresh.check(*words, answers_of(trained.model))
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--int8"], "int8 and dev are for ONNX"),
        (["--format", "onnx", "--dev", "x"], "set int8 too"),
        (["--format", "onnx", "--length", "9"], "pooling and length are for sentence-transformers"),
    ],
)
def test_settings_of_another_format_are_refused(toy_model, tmp_path, words, says):
    done = electra("export", toy_model, tmp_path / "out", *words)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_is_said_in_one_line(toy_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = electra("export", toy_model, tmp_path / "out", "--format", "onnx")
    assert (
        done.returncode == 5
        and "onnxruntime is not installed. Install it from the clone: pip install '.[onnx]'" in done.stderr
    )
    assert not list(tmp_path.iterdir())
