"""A search for rate, epochs, layer-wise decay and pooling by successive halving (Jamieson and Talwalkar, 2016).

All trials are trained with a quarter of their epochs, the better half of them with half, the best quarter with all: twelve trials
cost nine whole ones. Each time the whole schedule is run through, because a score before the rate has fallen says little.
Trial 1 is the method's own settings, and goes through to the end whatever its scores. What the user has set is not searched.
Only dev is looked at: test stays untouched until the winner is trained as it would have been without a search.

A finished trial is kept by the fingerprint of its settings, its data and its model, so that the same search again goes on where it stopped.
"""

import itertools
import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from electra.base import config
from electra.base.errors import DivergedError, SettingsError
from electra.base.files import read_or_set_aside, write_json
from electra.base.jobs import Signals
from electra.base.progress import duration
from electra.base.randomness import mix, permute
from electra.finetuning import merit, report
from electra.finetuning.plan import TASKS, MethodSettings
from electra.finetuning.seeds import PlannedTask, prepare_task, prepared_in_worker, run_in_workers, seed_run, train_seed
from electra.finetuning.training import Prepared, dev_scores, headline
from electra.train.device import explain_machine, gpu_names

log = logging.getLogger(__name__)
SEARCH = "search"
SHARES = (0.25, 0.5, 1.0)
"""Of the epochs, round after round."""
RATES, EPOCHS, DECAYS = (0.25, 0.5, 1.0, 2.0, 4.0), (0.5, 1.0, 2.0), (0.7, 0.8, 0.9, 1.0)
"""Factors of the method's own rate and epochs; decays as they are."""
Choice = dict[str, Any]
"""Settings by their keys."""


@dataclass(frozen=True)
class Trial:
    """`scores` of the headline on dev, round after round; None where it diverged."""

    number: int
    words: Choice
    scores: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Search:
    metric: str
    trials: tuple[Trial, ...]
    """The winner first, then by how far they came and how good they were."""

    @property
    def winner(self) -> Trial:
        return self.trials[0]

    def as_json(self) -> dict[str, Any]:
        trials = [{"trial": it.number, "settings": it.words, "scores": it.scores} for it in self.trials]
        return {"metric": self.metric, "shares": SHARES, "winner": self.winner.number, "trials": trials}


def first_trials(planned: PlannedTask, overrides: Mapping[str, Any], count: int) -> list[Trial]:
    """The method's own settings, then others in an order that is the same every time."""
    task, method, file = planned.plan.task, planned.plan.method, Path(planned.plan.item)
    is_own_task = file.suffix == ".toml" and file.is_file()
    set_keys = {*overrides, *(config.read_recipe(planned.plan.item, TASKS) if is_own_task else ())}
    rows = planned.task.training_rows(planned.plan.splits["train"])
    size = len(rows)
    if task.epochs * math.ceil(size / method.batch) < method.min_steps:  # a row may be several examples
        size = len(planned.task.encode(rows)[0])
    epochs = max(task.epochs, math.ceil(method.min_steps / math.ceil(size / method.batch)))
    choices: dict[str, list[Any]] = {
        "lr": [float(f"{method.lr * factor:.3g}") for factor in RATES],
        "epochs": [max(1, round(epochs * factor)) for factor in EPOCHS],
        "layer_decay": list(DECAYS),
        "pooling": ["cls", "mean"] if "pooling" in type(task).model_fields else [],
    }
    own = {"lr": method.lr, "epochs": epochs, "layer_decay": method.layer_decay, "pooling": planned.task.pooling}
    choices = {key: values for key, values in choices.items() if values and key not in set_keys}
    if not choices:
        raise SettingsError(
            f"{', '.join(report.SEARCHED)} are all set, so there is nothing to search. Leave one of them open."
        )
    fixed = {"min_steps": 0} if "epochs" in choices else {}  # they are in the epochs
    first = {key: own[key] for key in choices} | fixed
    grid = [dict(zip(choices, values, strict=True)) | fixed for values in itertools.product(*choices.values())]
    others = [words for words in grid if words != first]
    order = permute(np.arange(len(others)), len(others), mix(0, SEARCH))
    return [Trial(number, words) for number, words in enumerate([first, *(others[it] for it in order)][:count], 1)]


def altered(planned: PlannedTask, words: Mapping[str, Any]) -> PlannedTask:
    """The same task with other settings; its rows are not read again."""
    kind = type(planned.plan.task)
    task = config.validate(
        kind, config.dump(planned.plan.task) | {it: words[it] for it in words if it in kind.model_fields}
    )
    tree = config.dump(planned.plan.method) | {it: words[it] for it in words if it in MethodSettings.model_fields}
    note = f"{', '.join(it for it in words if it in report.SEARCHED)} chosen on dev by a search, so that dev scores flatter"
    method = config.validate(MethodSettings, tree)
    plan = replace(planned.plan, task=task, method=method, notes=(*planned.plan.notes, note))
    settings = {**planned.settings, "task": config.dump(task), "method": config.dump(plan.method)}
    built = task.build(planned.start.network.tokenizer, planned.task.length, plan.splits)
    return replace(planned, plan=plan, task=built, settings=settings)


def in_round(planned: PlannedTask, trial: Trial, share: float) -> Choice:
    """A trial with that share of its epochs."""
    epochs = trial.words.get("epochs", planned.plan.task.epochs)
    return {**trial.words, "epochs": max(1, round(share * epochs))}


def run_trial(planned: PlannedTask, prepared: Prepared, job: "Round", folder: Path, signals: Signals) -> dict[str, Any]:
    """What trial.json says: the dev score of one seed. No weights are kept."""
    changed = altered(planned, job.words)
    path, sha256 = folder / changed.fingerprint[:16] / "trial.json", changed.fingerprint
    stored = read_or_set_aside(path)
    if stored and stored.get("settings_sha256") == sha256 and is_trial(stored):
        return {**stored, "trial": job.trial}
    run = seed_run(path.parent, job.title, 0, sha256)
    data = replace(prepared, task=changed.task)
    began, metric, score = time.monotonic(), "", None
    with explain_machine("A trial does not fit: use a smaller batch=… or length=….", "Finished trials are kept."):
        try:
            ((model, _),) = train_seed([changed], [data], 0, run, signals)
            metric, score = headline(dev_scores(model, data, changed.plan.method))
        except DivergedError as error:
            log.warning("%s", error)
    result = {"settings_sha256": sha256, "settings": job.words, "metric": metric, "score": score}
    write_json(path, {**result, "seconds": round(time.monotonic() - began, 1)})
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    return {**result, "trial": job.trial}


def is_trial(stored: Mapping[str, Any]) -> bool:
    """Whether it has what a search asks of it; a trial that diverged has no score."""
    return isinstance(stored.get("metric"), str) and isinstance(stored.get("score", ""), int | float | None)


class Round(NamedTuple):
    """A trial in one round."""

    trial: int
    words: Choice
    title: str


def work_trial(model: str, item: str, overrides: str, job: Round, folder: Path) -> dict[str, Any]:
    """What a worker does."""
    ((planned,), (prepared,)) = prepared_in_worker(model, item, overrides)
    return run_trial(planned, prepared, job, folder, Signals())


def search(
    planned: PlannedTask, overrides: Mapping[str, Any], count: int, jobs: int, folder: Path, signals: Signals
) -> Search:
    """`folder` keeps the trials."""
    trials = {trial.number: trial for trial in first_trials(planned, overrides, count)}
    sizes = [-(-len(trials) // 2**number) for number in range(len(SHARES))]
    left, name, began, done, metric = list(trials), planned.plan.name, time.monotonic(), 0.0, ""
    devices = gpu_names(planned.plan.method.device)
    workers = jobs * max(1, len(devices))
    prepared = prepare_task(planned) if workers == 1 else None

    def results_of(jobs_left: Sequence[Round]) -> Iterator[dict[str, Any]]:
        if prepared is not None:
            yield from (run_trial(planned, prepared, job, folder, signals) for job in jobs_left)
        else:
            words = json.dumps(dict(overrides))
            sent = [(planned.start.path, planned.plan.item, words, job, folder) for job in jobs_left]
            yield from run_in_workers(work_trial, sent, workers, devices, signals)

    for share, size in zip(SHARES, sizes, strict=True):
        left = sorted(left, key=lambda number: rank(trials[number], metric))[:size]
        left += [1] * (1 not in left)
        if len(left) == 1 and trials[1].scores:
            break
        titles = {number: f"{name} trial {number}, {share:.0%} of epochs," for number in left}
        words = {number: in_round(planned, trials[number], share) for number in left}
        # a quarter of two epochs and one of three are both one: such trials are trained once
        todo = {json.dumps(words[number]): Round(number, words[number], titles[number]) for number in left}
        for result in results_of(list(todo.values())):
            metric = metric or result["metric"]
            alike = [number for number in left if words[number] == words[result["trial"]]]
            for number in alike:
                trials[number] = replace(trials[number], scores=(*trials[number].scores, result["score"]))
            done += share * len(alike)
            everything = sum(share * size for share, size in zip(SHARES, sizes, strict=True))
            eta = duration(max(0.0, everything - done) * (time.monotonic() - began) / done)
            for number in alike:
                score = report.shown(result["score"])
                log.info("%s dev %s %s; ETA of the search %s", titles[number], metric, score, eta)
    ordered = sorted(trials.values(), key=lambda trial: (-len(trial.scores), rank(trial, metric)))
    return Search(metric, tuple(ordered))


def rank(trial: Trial, metric: str) -> tuple[float, int]:
    """The best of the last round first; of equals the one that was there first, so that the default needs no reason."""
    score = trial.scores[-1] if trial.scores else None
    return math.inf if score is None else -merit(metric, score), trial.number
