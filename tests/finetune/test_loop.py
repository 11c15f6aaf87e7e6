"""The loop alone: which weights are kept, when it stops, and that it depends on the seed and on nothing else."""

import pytest
import torch

from conftest import TINY
from electra.data.tokenizer import load_tokenizer, vocabulary_size
from electra.finetune import loop
from electra.finetune.class_rows import ClassificationSettings
from electra.finetune.classification import build_classification
from electra.finetune.loop import Dev, Finetuned, train_task
from electra.finetune.method import MethodSettings, size_defaults
from electra.model.encoder import Embeddings, Encoder, EncoderSettings, initialise

ROWS = [{"text": f"the barak walks {n}", "label": "ab"[n % 2]} for n in range(32)]


def train(toy_model, monkeypatch=None, scores=(), seed=0, **method):
    """Eight steps with a dev score after each second one; `scores` replaces those."""
    tokenizer = load_tokenizer(toy_model)
    task = build_classification(ClassificationSettings(), tokenizer, 24, {"train": ROWS})
    encoder = Encoder(TINY, Embeddings(TINY, vocabulary_size(tokenizer)))
    model = Finetuned(encoder, task.head(TINY))
    initialise(model, TINY, 1)
    examples, _ = task.encode(ROWS)
    seen = []
    if scores:

        def scored(task, model, dev, method, pad):
            seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            return {"accuracy": scores[len(seen) - 1]}

        monkeypatch.setattr(loop, "score", scored)
    settings = MethodSettings(**{"batch": 8, "evaluations": 4, "device": "cpu", **method})
    history = train_task(task, model, examples, Dev(ROWS, examples), settings, 2, seed, 0, "toy", quiet=True)
    return model, history, seen


def same(model, weights) -> bool:
    return all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_the_last_weights_are_kept_unless_the_best_are_asked_for(toy_model, monkeypatch):
    scores = (0.5, 0.9, 0.1, 0.2)
    last, history, seen = train(toy_model, monkeypatch, scores)
    assert same(last, seen[3]) and not same(last, seen[1]) and len(history.curve) == 4
    best, history, seen = train(toy_model, monkeypatch, scores, keep="best")
    assert same(best, seen[1]) and history.best_step == 4


def test_patience_counts_evaluations_without_a_better_score(toy_model, monkeypatch):
    _, history, seen = train(toy_model, monkeypatch, (0.5, 0.4, 0.5, 0.9), patience=2)
    assert len(seen) == 3 and history.stopped_early
    _, history, _ = train(toy_model, monkeypatch, (0.5, 0.4, 0.6, 0.5), patience=2)
    assert not history.stopped_early and len(history.curve) == 4


def test_weights_are_a_function_of_the_seed_whatever_is_evaluated_on_the_way(toy_model):
    one, *_ = train(toy_model)
    other, *_ = train(toy_model, evaluations=1)
    assert same(one, other.state_dict())
    assert not same(one, train(toy_model, seed=1)[0].state_dict())


@pytest.mark.parametrize(("hidden", "lr", "decay"), [(256, 3e-4, 0.8), (768, 1e-4, 0.8), (1024, 5e-5, 0.9)])
def test_the_paper_s_values_are_chosen_by_the_size_of_the_model(hidden, lr, decay):
    found = size_defaults(EncoderSettings(hidden=hidden, heads=4, dropout=0.05))
    assert (found["lr"], found["layer_decay"], found["dropout"]) == (lr, decay, 0.05)
    assert MethodSettings(**found).weight_decay == 0 and MethodSettings(**found).warmup == 0.1
