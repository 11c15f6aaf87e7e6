"""A search for learning rate, epochs, layer-wise decay and pooling by successive halving (Jamieson and Talwalkar, 2016).

All trials are trained for a quarter of their epochs, the better half of them for half, the best quarter for all: twelve trials
cost nine whole ones. Each round goes through the whole schedule, because a score before the rate has decayed says little.
Trial 1 has the method's own settings and takes part in every round, whatever its scores. What the user has set is not searched.
Only dev is used: test stays untouched until the winner is trained as it would have been without a search.

A finished trial is stored under the fingerprint of its settings, data and model, so that the same search resumes where it stopped.
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
from typing import Any, NamedTuple, TypeVar

import numpy as np

from electra.base import config
from electra.base.errors import DivergedError, SettingsError
from electra.base.files import read_or_set_aside, write_json
from electra.base.jobs import Signals
from electra.base.progress import duration
from electra.base.randomness import mix, permute
from electra.finetuning import merit, report
from electra.finetuning.plan import TASKS, PlannedTask
from electra.finetuning.seeds import prepare_task, prepared_in_worker, run_in_workers, seed_run, train_seed
from electra.finetuning.training import Prepared, dev_scores, headline
from electra.train.device import explain_machine, gpu_names

log = logging.getLogger(__name__)
Altered = TypeVar("Altered", bound=config.Settings)
SEARCH = "search"
SHARES = (0.25, 0.5, 1.0)
"""The fraction of the epochs in each round."""
RATES, EPOCHS, DECAYS = (0.25, 0.5, 1.0, 2.0, 4.0), (0.5, 1.0, 2.0), (0.7, 0.8, 0.9, 1.0)
"""Factors on the method's own rate and epochs; the decays themselves."""


@dataclass(frozen=True)
class Trial:
    """One choice of settings. `scores` are its dev headlines, round by round; None in a round where it diverged."""

    number: int
    settings: dict[str, Any]
    scores: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Search:
    metric: str
    trials: tuple[Trial, ...]
    """The winner first, then by the number of rounds they took part in and their last score."""

    @property
    def winner(self) -> Trial:
        return self.trials[0]

    def as_json(self) -> dict[str, Any]:
        trials = [{"trial": it.number, "settings": it.settings, "scores": it.scores} for it in self.trials]
        return {"metric": self.metric, "shares": SHARES, "winner": self.winner.number, "trials": trials}


def first_trials(planned: PlannedTask, count: int) -> list[Trial]:
    """Trial 1 with the method's own settings, then other settings in an order that is always the same."""
    task, method, file = planned.plan.task, planned.plan.method, Path(planned.plan.item)
    is_own_task = file.suffix == ".toml" and file.is_file()
    set_keys = {*planned.overrides, *(config.read_recipe(planned.plan.item, TASKS) if is_own_task else ())}
    rows = planned.task.training_rows(planned.plan.splits["train"])
    if task.epochs * math.ceil(len(rows) / method.batch) < method.min_steps:  # a row may give several examples
        examples = len(planned.task.encode(rows)[0])
        epochs = max(task.epochs, math.ceil(method.min_steps / math.ceil(examples / method.batch)))
    else:
        epochs = task.epochs
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
    fixed = {"min_steps": 0} if "epochs" in choices else {}  # the epochs include them
    first = {key: own[key] for key in choices} | fixed
    grid = [dict(zip(choices, values, strict=True)) | fixed for values in itertools.product(*choices.values())]
    others = [settings for settings in grid if settings != first]
    order = permute(np.arange(len(others)), len(others), mix(0, SEARCH))
    return [Trial(number, it) for number, it in enumerate([first, *(others[it] for it in order)][:count], 1)]


def altered(planned: PlannedTask, changes: Mapping[str, Any]) -> PlannedTask:
    """The same task with other settings, without reading its rows again."""

    def changed(part: Altered) -> Altered:
        own = {key: value for key, value in changes.items() if key in type(part).model_fields}
        return config.validate(type(part), config.dump(part) | own)

    task, method = changed(planned.plan.task), changed(planned.plan.method)
    searched = ", ".join(key for key in changes if key in report.SEARCHED)
    note = f"{searched} chosen on dev by a search, so dev scores are optimistic"
    plan = replace(planned.plan, task=task, method=method, notes=(*planned.plan.notes, note))
    built = task.build(planned.start.network.tokenizer, planned.task.length, plan.splits)
    return replace(planned, plan=plan, task=built, overrides={**planned.overrides, **changes})


class Round(NamedTuple):
    """A trial with the epochs of one round."""

    title: str
    settings: dict[str, Any]


def run_trial(prepared: Prepared, job: Round, folder: Path, signals: Signals) -> dict[str, Any]:
    """Trains a trial with one seed, unless it is finished, and returns the content of trial.json: its dev score. No weights are kept."""
    changed = altered(prepared.planned, job.settings)
    path, sha256 = folder / changed.fingerprint[:16] / "trial.json", changed.fingerprint
    stored = read_or_set_aside(path)
    if stored and stored.get("settings_sha256") == sha256 and is_trial(stored):
        return {**stored, "settings": job.settings}
    run = seed_run(path.parent, job.title, 0, sha256)
    data = replace(prepared, planned=changed)
    began, metric, score = time.monotonic(), "", None
    with explain_machine("A trial does not fit: use a smaller batch=… or length=….", "Finished trials are kept."):
        try:
            ((model, _),) = train_seed([data], 0, run, signals)
            metric, score = headline(dev_scores(model, data))
        except DivergedError as error:
            log.warning("%s", error)
    result = {"settings_sha256": sha256, "settings": job.settings, "metric": metric, "score": score}
    write_json(path, {**result, "seconds": round(time.monotonic() - began, 1)})
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    return result


def is_trial(stored: Mapping[str, Any]) -> bool:
    """Whether it has everything that a search needs; the score of a trial that diverged is None."""
    return isinstance(stored.get("metric"), str) and isinstance(stored.get("score", ""), int | float | None)


def work_trial(model: str, item: str, overrides: str, job: Round, folder: Path) -> dict[str, Any]:
    """What a worker does: `run_trial`, with arguments that can be sent to another process."""
    (prepared,) = prepared_in_worker(model, item, overrides)
    return run_trial(prepared, job, folder, Signals())


def search(planned: PlannedTask, count: int, jobs: int, folder: Path, signals: Signals) -> Search:
    """Runs the search with `count` trials, which are stored in `folder`."""
    trials = {trial.number: trial for trial in first_trials(planned, count)}
    sizes = [-(-len(trials) // 2**number) for number in range(len(SHARES))]
    left, name, began, done, metric = list(trials), planned.plan.name, time.monotonic(), 0.0, ""
    devices = gpu_names(planned.plan.method.device)
    workers = jobs * max(1, len(devices))
    prepared = prepare_task(planned) if workers == 1 else None

    def results_of(jobs_left: Sequence[Round]) -> Iterator[dict[str, Any]]:
        if prepared is not None:
            yield from (run_trial(prepared, job, folder, signals) for job in jobs_left)
        else:
            text = json.dumps(dict(planned.overrides))
            arguments = [(planned.start.path, planned.plan.item, text, job, folder) for job in jobs_left]
            yield from run_in_workers(work_trial, arguments, workers, devices, signals)

    for share, size in zip(SHARES, sizes, strict=True):
        left = sorted(left, key=lambda number: rank(trials[number], metric))[:size]
        left += [1] * (1 not in left)
        if len(left) == 1 and trials[1].scores:
            break
        rounds = {}
        for number in left:
            settings = trials[number].settings
            epochs = max(1, round(share * settings.get("epochs", planned.plan.task.epochs)))
            title = f"{name} trial {number}, {share:.0%} of epochs,"
            rounds[number] = Round(title, {**settings, "epochs": epochs})
        # a quarter of two epochs and a quarter of three both round to one: such trials are trained once
        todo = {json.dumps(it.settings): it for it in rounds.values()}
        for result in results_of(list(todo.values())):
            metric = metric or result["metric"]
            alike = [number for number in left if rounds[number].settings == result["settings"]]
            for number in alike:
                trials[number] = replace(trials[number], scores=(*trials[number].scores, result["score"]))
            done += share * len(alike)
            everything = sum(share * size for share, size in zip(SHARES, sizes, strict=True))
            eta = duration(max(0.0, everything - done) * (time.monotonic() - began) / done)
            for number in alike:
                score = report.shown(result["score"])
                log.info("%s dev %s %s; ETA of the search %s", rounds[number].title, metric, score, eta)
    ordered = sorted(trials.values(), key=lambda trial: (-len(trial.scores), rank(trial, metric)))
    return Search(metric, tuple(ordered))


def rank(trial: Trial, metric: str) -> tuple[float, int]:
    """Sorts trials: the best of the last round first, and of equals the lower number, so that the default wins ties."""
    score = trial.scores[-1] if trial.scores else None
    return math.inf if score is None else -merit(metric, score), trial.number
