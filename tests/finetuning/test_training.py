"""One seed on the common loop: which weights are kept, when it stops, and that it depends on the seed and on nothing else."""

from types import SimpleNamespace

import pytest
import torch

from conftest import TINY
from electra.base.jobs import Signals
from electra.data.tokenizer import load_tokenizer, vocabulary_size
from electra.finetuning import training
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.plan import MethodSettings, PlannedTask, method_defaults
from electra.finetuning.training import (
    Encoded,
    ExampleBatches,
    Finetuned,
    Prepared,
    TaskObjective,
    best_of,
    collate,
    layerwise_group,
    train_task,
)
from electra.model import initialise
from electra.model.electra import ElectraEmbeddings, ElectraEncoder, ElectraEncoderSettings
from electra.train import checkpoint
from electra.train.log import read_metrics
from electra.train.loop import Run
from electra.train.optimizers import build_optimizer
from electra.train.step import Execution, Step

ROWS = [{"text": f"the barak walks {n}", "label": "ab"[n % 2]} for n in range(32)]


@pytest.fixture
def train(toy_model, tmp_path, monkeypatch):
    """Eight steps with a dev score after each second one; `scores` replaces those. Each call is a run of its own unless it
    goes on with a folder."""
    tokenizer = load_tokenizer(toy_model)

    def run(scores=(), seed=0, folder=None, **method):
        task = ClassificationSettings(epochs=2).build(tokenizer, 24, {"train": ROWS})
        model = Finetuned(ElectraEncoder(TINY, ElectraEmbeddings(TINY, vocabulary_size(tokenizer))), task.head(TINY))
        initialise(model, TINY, 1)
        examples, _ = task.encode(ROWS)
        settings = MethodSettings(**{"batch": 8, "evaluations": 4, "device": "cpu", **method})
        planned = PlannedTask(SimpleNamespace(method=settings), task, None, {})
        prepared = Prepared(planned, Encoded(ROWS, examples), {"dev": Encoded(ROWS, examples)})
        seen, left = [], iter(scores)

        def scored(rows, predictions):
            seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            return {"accuracy": next(left)}

        if scores:
            monkeypatch.setattr(task, "scores", scored)
        if folder is None:
            folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
        history = train_task(model, prepared, seed, Run(folder, {}, keeps_last=False), Signals())
        return model, history, seen

    return run


@pytest.fixture
def interrupted(train, tmp_path, monkeypatch):
    """A run that is saved after every step and ends after one of them; returns its folder."""

    def run(after: int, scores=(), **method):
        folder = tmp_path / f"interrupted-{after}"
        folder.mkdir()
        saved = checkpoint.save_checkpoint

        def save_and_stop(root, step, *rest):
            saved(root, step, *rest)
            if step == after:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(checkpoint, "save_checkpoint", save_and_stop)
            train(scores, folder=folder, save_minutes=1e-9, **method)
        return folder

    return run


def same(model, weights) -> bool:
    return all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_the_last_weights_are_kept_unless_the_best_are_asked_for(train):
    scores = (0.5, 0.9, 0.1, 0.2)
    last, history, seen = train(scores)
    assert same(last, seen[3]) and not same(last, seen[1]) and len(history.curve) == 4
    best, history, seen = train(scores, keep="best")
    assert same(best, seen[1]) and history.best_step == 4


def test_patience_counts_evaluations_without_a_better_score(train):
    _, history, seen = train((0.5, 0.4, 0.5, 0.9), patience=2)
    assert len(seen) == 3 and history.stopped_early
    _, history, _ = train((0.5, 0.4, 0.6, 0.5), patience=2)
    assert not history.stopped_early and len(history.curve) == 4


def test_weights_are_a_function_of_the_seed_whatever_is_evaluated_on_the_way(train):
    one, *_ = train()
    other, *_ = train(evaluations=1)
    assert same(one, other.state_dict())
    assert not same(one, train(seed=1)[0].state_dict())


@pytest.mark.parametrize("after", [1, 3, 4, 7])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_seed_ends_with_the_same_weights_and_the_same_metrics(
    train, interrupted, tmp_path, optimizer, after
):
    whole, expected, _ = train(optimizer=optimizer, folder=tmp_path)
    folder = interrupted(after, optimizer=optimizer)
    model, history, _ = train(optimizer=optimizer, folder=folder)
    assert same(model, whole.state_dict())
    assert (history.curve, history.losses) == (expected.curve, expected.losses)
    timing = ("seconds", "training_seconds", "tokens_per_second")
    untimed = [
        [{key: value for key, value in record.items() if key not in timing} for record in read_metrics(run)]
        for run in (folder, tmp_path)
    ]
    assert untimed[0] == untimed[1] and {record["kind"] for record in untimed[0]} == {"train", "dev"}


def test_the_best_weights_and_the_patience_outlive_an_interruption(train, interrupted):
    _, _, seen = train((0.9, 0.1, 0.2, 0.3), keep="best")
    folder = interrupted(5, (0.9, 0.1), keep="best", patience=3)
    best, history, later = train((0.2, 0.3), keep="best", patience=3, folder=folder)
    assert same(best, seen[0]) and history.best_step == 2 and len(later) == 2
    folder = interrupted(6, (0.9, 0.1, 0.2), keep="best", patience=2)
    _, history, later = train((1.0,), keep="best", patience=2, folder=folder)
    assert history.stopped_early and later == []


def test_muon_learns_something_else_than_adamw(train):
    adamw, *_ = train()
    muon, *_ = train(optimizer="muon")
    assert not same(adamw, muon.state_dict())
    assert all(torch.isfinite(parameter).all() for parameter in muon.parameters())


@pytest.mark.parametrize(("hidden", "lr", "decay"), [(256, 3e-4, 0.8), (768, 1e-4, 0.8), (1024, 5e-5, 0.9)])
def test_the_paper_s_values_are_chosen_by_the_size_of_the_model(hidden, lr, decay):
    found = method_defaults(ElectraEncoderSettings(hidden=hidden, heads=4, dropout=0.05))["paper"]
    assert (found["lr"], found["layer_decay"], found["dropout"]) == (lr, decay, 0.05)
    assert MethodSettings(**found).weight_decay == 0 and MethodSettings(**found).warmup == 0.1


def test_a_gpu_meets_few_widths_and_the_same_answers(toy_model, monkeypatch):
    """Each width is captured once, so widths are rounded up; the same rows in the same order, and padding changes no answer."""
    tokenizer = load_tokenizer(toy_model)
    rows = [{"text": "the barak walks " * (1 + n % 9), "label": "ab"[n % 2]} for n in range(64)]
    task = ClassificationSettings(pooling="mean").build(tokenizer, 20, {"train": rows})
    examples, _ = task.encode(rows)
    planned = PlannedTask(SimpleNamespace(method=MethodSettings(batch=4)), task, None, {})
    prepared = Prepared(planned, Encoded(rows, examples), {})
    as_they_are = list(ExampleBatches(prepared, 0).batches(0))
    monkeypatch.setattr(training, "choose_device", lambda method: torch.device("cuda"))
    rounded = list(ExampleBatches(prepared, 0).batches(0))
    widths = [{batch.ids.shape[1] for batch in batches} for batches in (as_they_are, rounded)]
    assert len(widths[0]) > 4 and widths[1] == {8, 16, 20}
    model = Finetuned(ElectraEncoder(TINY, ElectraEmbeddings(TINY, vocabulary_size(tokenizer))), task.head(TINY))
    initialise(model, TINY, 1)
    model.eval()
    for batch, wider in zip(as_they_are, rounded, strict=True):
        width = batch.ids.shape[1]
        assert wider.padded and torch.equal(wider.ids[:, :width], batch.ids)
        assert not wider.is_real[:, width:].any()
        for name, answer in model(batch).items():
            torch.testing.assert_close(model(wider)[name], answer, atol=1e-6, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_captured_step_learns_what_the_plain_one_learns(train, precision, optimizer):
    """Four shapes of batch, each met several times, with dropout: the same kernels with the same random numbers."""
    method = {"device": "cuda", "precision": precision, "batch": 4, "lr": 1e-3, "layer_decay": 0.9}
    weights = {}
    for record in (True, False):
        model, history, _ = train(record=record, optimizer=optimizer, **method)
        weights[record] = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
        assert history.steps == 16
    for name, tensor in weights[False].items():
        torch.testing.assert_close(weights[True][name], tensor, atol=2e-4, rtol=0, msg=name)


def test_a_step_is_the_gradient_clipped_and_applied(toy_model):
    """Step on the CPU against the same update written out."""
    tokenizer = load_tokenizer(toy_model)
    task = ClassificationSettings().build(tokenizer, 24, {"train": ROWS})
    examples, _ = task.encode(ROWS[:8])
    batch = collate(task, examples, with_targets=True)
    method = MethodSettings(lr=1e-2, betas=(0.9, 0.99), bias_correction=True, clip=0.01)
    weights = []
    for written_out in (True, False):
        model = Finetuned(ElectraEncoder(TINY, ElectraEmbeddings(TINY, vocabulary_size(tokenizer))), task.head(TINY))
        initialise(model, TINY, 1)
        objective, groups = TaskObjective(model, task).eval(), [layerwise_group(model, method)]
        optimizer = build_optimizer(objective, groups, method.optimizer_settings())
        if written_out:
            expected = task.loss(model(batch), batch.targets)
            expected.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= min(1.0, 0.01 / (norm + 1e-6))
            optimizer.step()
        else:
            step = Step(objective, optimizer, groups, Execution(torch.device("cpu")), lambda number: number)
            sums, _ = step(batch, 0, 1.0)
            loss = sums["total"]
            assert not loss.requires_grad and loss.item() == pytest.approx(expected.item())
            assert all(p.grad is None for p in model.parameters())
        weights.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_of_errors_the_lowest_is_the_best_and_of_scores_the_highest():
    errors = [{"step": step, "mse": value, "pearson": 0.0} for step, value in ((1, 0.5), (2, 0.2), (3, 0.4))]
    assert best_of(errors) == (2, 1)
    assert best_of([{"step": it["step"], "spearman": it["mse"]} for it in errors]) == (1, 2)
