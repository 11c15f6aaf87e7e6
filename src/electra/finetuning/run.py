"""Fine-tunes tasks x seeds: the runs one after the other or in parallel, their baselines, and their results."""

import json
import logging
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from electra.base.errors import SettingsError, counted
from electra.base.files import lock, refuse_other_kind, remove_leftovers, write_json
from electra.base.jobs import Signals
from electra.base.progress import duration
from electra.finetuning import IS_ALSO, Problem, Task, merit, report
from electra.finetuning.baselines import UNTRAINED, baseline_scores, label_alarms
from electra.finetuning.folder import architecture, seed_folders, task_card
from electra.finetuning.plan import Plan, PlannedTask, Start, describe_files, file_line, plan_problems, refuse
from electra.finetuning.search import SEARCH, Search, altered, search
from electra.finetuning.seeds import (
    TRAINING,
    encode_others,
    group_name,
    intermediate_start,
    load_start,
    plan_item,
    prepare_task,
    prepared_in_worker,
    run_in_workers,
    run_seed,
)
from electra.finetuning.training import Encoded
from electra.interop.card import update_card
from electra.train.device import gpu_names
from electra.train.trackers import wanted_trackers

log = logging.getLogger(__name__)
UNTRAINED_RATES = (3e-4, 1e-3, 3e-3)
Group = list[PlannedTask]
"""Tasks that are trained together; mostly one."""


def work(model: str, item: str, overrides: str, seed: int, out: Path) -> list[dict[str, Any]]:
    """What a worker does: `run_seed`, with arguments that can be sent to another process."""
    return run_seed(prepared_in_worker(model, item, overrides), seed, out, Signals())


def plan_all(items: Sequence[str], overrides: Mapping[str, Any], start: Start) -> dict[str, Group]:
    """Plans all tasks; returns item -> its tasks. All problems of all tables are reported at once."""
    groups = {item: plan_item(item, overrides, start) for item in items}
    planned = [it for item in items for it in groups[item]]
    names: set[str] = set()
    for it in planned:
        if it.plan.name in names:
            raise SettingsError(f"two tasks are called {it.plan.name}. Give one another name with name=….")
        names.add(it.plan.name)
        wanted_trackers(it.plan.method.track)
    refuse_tables([(it.plan, it.task) for it in planned])
    return groups


def refuse_tables(tables: Sequence[tuple[Plan, Task]]) -> None:
    problems: list[Problem] = []
    remedies: dict[str, None] = {}
    for plan, task in tables:
        own = plan_problems(plan, task)
        if any(problem.text == IS_ALSO for problem in own):
            remedies[
                f"Rows of dev that are also in train (ignoring case and spacing): {plan.task.shared_rows_remedy}"
            ] = None
        if len(tables) > 1:
            own = [replace(it, split=f"{plan.name}: {it.split}".removesuffix(": ")) for it in own]
        problems += own
    refuse(problems, remedies)


def finetune(
    model: Path,
    items: Sequence[str],
    overrides: Mapping[str, Any],
    out: Path,
    seeds: int = 1,
    jobs: int = 1,
    untrained: bool = False,
    trials: int = 0,
) -> dict[str, Any]:
    """Every task with every seed; returns what results.json holds, and under "done" the names of these tasks. Nothing is written before all tables are known to be
    fine. With `untrained` the same network from random weights stands beside the result. `start` of the overrides is a
    task whose fine-tuned encoder the others start from. So many `trials` are searched for better settings first."""
    if seeds < 1:
        raise SettingsError(f"{seeds} seeds train nothing. Give at least 1.", ("seeds",))
    refuse_other_kind(out, "results of fine-tuning")
    base = load_start(model)
    overrides = dict(overrides)
    intermediate = str(overrides.pop("start", ""))
    groups, done = plan_all(items, overrides, base), list[str]()
    if intermediate:
        before = [item for item in items if intermediate in (it.plan.name for it in groups[item])]
        others = [item for item in items if item not in before]
        if not others:
            raise SettingsError(f"start={intermediate}, but {intermediate} is the task itself. Start from another one.")
        if before:
            done = finetune(model, before, overrides, out, seeds, jobs, untrained, trials)["done"]
        groups = plan_all(others, overrides, intermediate_start(intermediate, out, base))
    if trials and (joint := next((item for item in groups if len(groups[item]) > 1), "")):
        raise SettingsError(f"{joint} are trained together: settings can be searched for one task only.")
    with lock(out), Signals() as signals:
        searches: dict[str, Search] = {}
        for item in groups if trials else ():
            (planned,) = groups[item]
            result = search(planned, trials, jobs, out / planned.plan.name / SEARCH, signals)
            searches[planned.plan.name], groups[item] = result, [altered(planned, result.winner.settings)]
        # of runs that somebody has removed, nothing stands beside new ones
        earlier = {name: it for name, it in report.earlier_results(out).items() if any((out / name).glob("seed-*"))}
        encoded = train_groups(groups, out, seeds, jobs, signals)
        random = {name: report.baselines_of(result).get(UNTRAINED) for name, result in earlier.items()}
        if untrained:
            random |= finetune_untrained(base.path, groups, out, seeds, jobs)
        results = {}
        for it in (it for group in groups.values() for it in group):
            name = it.plan.name
            labelled = {split: part.rows for split, part in encoded[name].items() if part.is_labelled}
            baselines = baseline_scores(out / name, it.data_sha256, it.task, it.plan.splits["train"], labelled)
            if scores := random.get(name):
                baselines["dev"][UNTRAINED] = scores
            results[name] = report.task_result(out, it, encoded[name], baselines)
            for folder in seed_folders(out / name, report.RESULT).values():
                update_card(folder, task_card(it, report.read_result(folder), results[name]))
            if name in searches:
                results[name]["search"] = searches[name].as_json()
        return report.write_results(out, base.path, results, earlier) | {"done": [*done, *results]}


def train_groups(
    groups: Mapping[str, Group], out: Path, seeds: int, jobs: int, signals: Signals
) -> dict[str, Mapping[str, Encoded]]:
    """Trains the runs that are not finished, in parallel (the largest first) or one after the other. Returns the splits that are
    not trained on, by task."""
    todo = begin(groups, out, seeds)
    devices = gpu_names(next(iter(groups.values()))[0].plan.method.device)
    workers = jobs * max(1, len(devices))
    if workers > 1 and sum(map(len, todo.values())) > 1:
        rows = {item: sum(len(it.plan.splits["train"]) * it.plan.task.epochs for it in groups[item]) for item in groups}
        arguments: list[tuple[Any, ...]] = []
        for item in sorted(groups, key=lambda item: -rows[item]):
            first = groups[item][0]
            text = json.dumps(first.overrides)
            arguments += [(first.start.path, item, text, seed, out) for seed in todo.pop(item)]
        began = time.monotonic()
        for done, results in enumerate(run_in_workers(work, arguments, workers, devices, signals), 1):
            left = (time.monotonic() - began) / done * (len(arguments) - done)
            say_results(results, f"; {done} of {len(arguments)} done, ETA {duration(left)}")
    encoded: dict[str, Mapping[str, Encoded]] = {}
    for item, group in groups.items():
        encoded |= run_in_turn(group, todo.get(item, []), out, signals)
    return encoded


def begin(groups: Mapping[str, Group], out: Path, seeds: int) -> dict[str, list[int]]:
    """Writes the settings, keeps finished runs and refuses those with other settings. Returns the seeds that are left, by item."""
    remove_leftovers(out)
    todo: dict[str, list[int]] = {}
    for item, group in groups.items():
        for it in group:
            name = it.plan.name
            for line in (*it.plan.notes, *map(file_line, describe_files(it.plan))):
                log.info("%s: %s", name, line)
            for text in label_alarms(it.task, it.plan.splits):
                log.warning("%s: %s", name, text)
            if not architecture(it.start.settings, it.task):
                log.info("%s: transformers has no class for this head; it reads the encoder, electra reads all", name)
            report.refuse_other_runs(out / name, it.settings)
            seed_folders(out / name, report.RESULT)  # a folder without a result is reported now
        names = [it.plan.name for it in group]
        todo[item] = [
            seed for seed in range(seeds) if not all(report.run_folder(out, name, seed).exists() for name in names)
        ]
        for seed in set(range(seeds)) - set(todo[item]):  # a process may have been killed before it removed these
            folder = out / group_name(group) / TRAINING / f"seed-{seed}"
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if kept := len(groups) * seeds - sum(map(len, todo.values())):
        log.info("%s kept", counted(kept, "finished run"))
    for group in groups.values():
        for it in group:
            (out / it.plan.name).mkdir(exist_ok=True)
            remove_leftovers(out / it.plan.name)
            write_json(out / it.plan.name / report.SETTINGS, it.settings)
    return todo


def finetune_untrained(
    model: str, groups: Mapping[str, Group], out: Path, seeds: int, jobs: int
) -> dict[str, dict[str, float]]:
    """task -> the dev metrics of the same network from random weights, averaged over the seeds. Every rate is tried with one seed,
    and all seeds use the best. There is no layer-wise decay, which would keep random weights near their initial values."""
    item_of = {it.plan.name: item for item, group in groups.items() for it in group}

    def results_at(rate: float, names: Sequence[str], seeds: int) -> dict[str, Any]:
        """Logs one line per task and hides all warnings: most of these rates are not chosen in the end."""
        alike: dict[str, list[str]] = {}  # items by their settings, which a search may have changed
        for item in dict.fromkeys(item_of[name] for name in names):
            changes = {"pretrained": False, "reinitialise": 0, "layer_decay": 1.0, "lr": rate}
            alike.setdefault(json.dumps({**groups[item][0].overrides, **changes}), []).append(item)
        results: dict[str, Any] = {}
        level, folder = log.level, out / UNTRAINED / f"lr-{rate:g}"
        log.setLevel(logging.ERROR)
        try:
            for text, items in alike.items():
                results |= finetune(Path(model), items, json.loads(text), folder, seeds, jobs)["tasks"]
        finally:
            log.setLevel(level)
        for name, result in results.items():
            metric, median = result["metric"], result["median"]
            log.info("%s from random weights, at lr %g: dev %s %.4f", name, rate, metric, median)
        return results

    tried = {rate: results_at(rate, list(item_of), 1) for rate in UNTRAINED_RATES}
    best: dict[float, list[str]] = {}
    for name in item_of:
        metric = next(iter(tried.values()))[name]["metric"]
        # by the first seed alone: a command that is repeated finds more seeds at the rate it chose before
        first = {rate: results[name]["scores"]["dev"]["seed 0"][metric] for rate, results in tried.items()}
        merits = {rate: merit(metric, score) for rate, score in first.items()}
        best.setdefault(max(merits, key=merits.__getitem__), []).append(name)
    scores = {}
    for rate, names in best.items():
        for name, result in results_at(rate, names, seeds).items():
            if name in names:
                runs = [result["scores"]["dev"][f"seed {seed}"] for seed in range(seeds)]
                scores[name] = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    return scores


def run_in_turn(planned: Group, seeds: Sequence[int], out: Path, signals: Signals) -> dict[str, Mapping[str, Encoded]]:
    """Trains the remaining runs of a group one after the other in this process. Returns the splits that are not trained on, by task."""
    if not seeds:
        return {it.plan.name: encode_others(it) for it in planned}
    prepared = list(map(prepare_task, planned))
    for it in prepared:
        for split, part in {"train": it.train, **it.others}.items():
            if part.cut:
                meaning = it.task.settings.cut_words(it.task.length)
                counts = f"{part.cut:,} of {len(part.rows):,} {split} rows"
                log.info("%s: %s %s", it.name, counts, meaning)
    for seed in seeds:
        say_results(run_seed(prepared, seed, out, signals))
    return {it.name: it.others for it in prepared}


def say_results(results: Sequence[Mapping[str, Any]], ending: str = "") -> None:
    for result in results:
        name, value = next(iter(result["scores"]["dev"].items()))
        line = f"{result['task']} seed {result['seed']}: dev {name} {value:.4f} ({duration(result['seconds'])})"
        log.info("%s%s", line, ending)
        for text in result["alarms"]:
            log.warning("%s seed %d: %s", result["task"], result["seed"], text)
