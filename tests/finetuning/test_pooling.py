"""What the label of a row is read from: [CLS] or the mean of its tokens, here and in transformers."""

import json

import pytest
import torch

from conftest import SPECIAL, TINY, VOCABULARY, make_batch
from electra.data.tokenizer import load_tokenizer, vocabulary_size
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.folder import TaskModel, load_task_folder, write_task_folder
from electra.finetuning.plan import MethodSettings
from electra.finetuning.training import Finetuned
from electra.interop import formats
from electra.model import encoder_alone, initialise
from electra.model.heads import pool
from electra.model.modern import ModernEncoderSettings

MODERN = ModernEncoderSettings(layers=2, hidden=32, heads=2, intermediate=48, embedding=12, positions=64, window=8)


def network(settings, tokenizer, vocab_size, **more) -> tuple[Finetuned, object]:
    task = ClassificationSettings(text=("a", "b"), labels=("x", "y", "z"), **more).build(tokenizer, 24, {})
    model = Finetuned(encoder_alone(settings, vocab_size), task.head(settings))
    initialise(model, settings, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval(), task


def test_the_mean_is_over_real_tokens_alone():
    batch = make_batch()
    hidden = torch.randn(*batch.ids.shape, 8, generator=torch.Generator().manual_seed(0))
    for row, length in enumerate(batch.is_real.sum(1).tolist()):
        expected = hidden[row, :length].double().numpy().mean(0)
        assert pool(hidden, batch.is_real, "mean")[row].double().numpy() == pytest.approx(expected, abs=1e-6)
    assert pool(hidden, batch.is_real, "cls").equal(hidden[:, 0])


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_pooled_logits_are_those_of_modernberts_classifier(pooling, padded, prepared):
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    model, _ = network(MODERN, load_tokenizer(prepared), VOCABULARY, pooling=pooling)
    name = "ModernBertForSequenceClassification"
    config = formats.config_json(MODERN, VOCABULARY, SPECIAL, name, pooling) | {"num_labels": 3}
    theirs = transformers.ModernBertForSequenceClassification(transformers.ModernBertConfig(**config)).eval()
    theirs.load_state_dict(formats.network_tensors(model.encoder, model.head, name))
    batch = make_batch(padded=padded)
    with torch.no_grad():
        ours, expected = model(batch)["logits"], theirs(batch.ids, batch.is_real.long()).logits
    assert (ours - expected).abs().max() <= 1e-5
    other, _ = network(MODERN, load_tokenizer(prepared), VOCABULARY, pooling="mean" if pooling == "cls" else "cls")
    assert (ours - other(batch)["logits"]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("settings", "head", "pooling", "reader"),
    [
        (MODERN, "transformers", "cls", "ModernBertForSequenceClassification"),
        (MODERN, "transformers", "mean", "ModernBertForSequenceClassification"),
        (MODERN, "linear", "mean", ""),
        (TINY, "transformers", "mean", ""),
    ],
)
def test_a_folder_says_how_it_pools(settings, head, pooling, reader, prepared, tmp_path):
    """Reading it back, by us and by transformers, is part of writing."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    tokenizer = load_tokenizer(prepared)
    model, task = network(settings, tokenizer, vocabulary_size(tokenizer), head=head, pooling=pooling)
    line = write_task_folder(tmp_path / "out", TaskModel(model, task, MethodSettings(), {}), {})
    assert ("read back by electra and transformers" in line) == bool(reader)
    assert json.loads((tmp_path / "out" / "task.json").read_text())["architecture"] == reader
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("classifier_pooling") == (pooling if settings is MODERN else None)
    batch = make_batch(vocabulary=60)
    with torch.no_grad():
        again = load_task_folder(tmp_path / "out").model(batch)["logits"]
        assert (again - model(batch)["logits"]).abs().max() <= 1e-5
