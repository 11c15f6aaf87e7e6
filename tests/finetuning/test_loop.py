"""The loop alone: which weights are kept, when it stops, and that it depends on the seed and on nothing else."""

from contextlib import nullcontext

import pytest
import torch

from conftest import TINY
from electra.data.tokenizer import load_tokenizer, vocabulary_size
from electra.finetuning import loop
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.loop import Dev, Finetuned, train_task
from electra.finetuning.method import MethodSettings, size_defaults
from electra.model.electra import (
    ElectraEmbeddings,
    ElectraEncoder,
    ElectraEncoderSettings,
    initialise_electra,
)

ROWS = [{"text": f"the barak walks {n}", "label": "ab"[n % 2]} for n in range(32)]


def train(toy_model, monkeypatch=None, scores=(), seed=0, **method):
    """Eight steps with a dev score after each second one; `scores` replaces those."""
    tokenizer = load_tokenizer(toy_model)
    task = ClassificationSettings().build(tokenizer, 24, {"train": ROWS})
    encoder = ElectraEncoder(TINY, ElectraEmbeddings(TINY, vocabulary_size(tokenizer)))
    model = Finetuned(encoder, task.head(TINY))
    initialise_electra(model, TINY, 1)
    examples, _ = task.encode(ROWS)
    seen = []
    if scores:

        def scored(task, model, dev, method, pad):
            seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            return {"accuracy": scores[len(seen) - 1]}

        monkeypatch.setattr(loop, "score", scored)
    settings = MethodSettings(**{"batch": 8, "evaluations": 4, "device": "cpu", **method})
    history = train_task(task, model, examples, Dev(ROWS, examples), settings, 2, seed, 0, "toy")
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
    found = size_defaults(ElectraEncoderSettings(hidden=hidden, heads=4, dropout=0.05))
    assert (found["lr"], found["layer_decay"], found["dropout"]) == (lr, decay, 0.05)
    assert MethodSettings(**found).weight_decay == 0 and MethodSettings(**found).warmup == 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_recorded_step_learns_what_the_plain_one_learns(toy_model, precision):
    """Four shapes of batch, each met several times, with dropout: the same kernels with the same random numbers."""
    found = {}
    for record in (True, False):
        model, history, _ = train(
            toy_model, device="cuda", precision=precision, record=record, batch=4, lr=1e-3, layer_decay=0.9
        )
        found[record] = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
        assert history.steps == 16
    for name, tensor in found[False].items():
        torch.testing.assert_close(found[True][name], tensor, atol=2e-4, rtol=0, msg=name)


def test_a_step_is_the_gradient_clipped_and_applied(toy_model):
    """Step on the CPU against the same update written out."""
    from electra.finetuning.features import collate
    from electra.finetuning.optimise import build_layerwise
    from electra.finetuning.step import Step

    tokenizer = load_tokenizer(toy_model)
    task = ClassificationSettings().build(tokenizer, 24, {"train": ROWS})
    examples, _ = task.encode(ROWS[:8])
    inputs = collate(task, examples, 0, with_targets=True)
    weights = []
    for written_out in (True, False):
        model = Finetuned(
            ElectraEncoder(TINY, ElectraEmbeddings(TINY, vocabulary_size(tokenizer))), task.head(TINY)
        ).eval()
        initialise_electra(model, TINY, 1)
        optimizer = build_layerwise(model, TINY.layers, 1e-2, 0.8, "exact", (0.9, 0.99), 1e-6, 0.0, True)
        if written_out:
            expected = task.loss(model(inputs), inputs.targets)
            expected.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= min(1.0, 0.01 / (norm + 1e-6))
            optimizer.step()
        else:
            step = Step(model, task, optimizer, 0.01, nullcontext, record=False, say=print)
            loss = step(inputs)
            assert not loss.requires_grad and loss.item() == pytest.approx(expected.item())
            assert all(p.grad is None for p in model.parameters())
        weights.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
