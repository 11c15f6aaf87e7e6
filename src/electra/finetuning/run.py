"""Tasks x seeds."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save

from electra.base import config
from electra.base.errors import SettingsError
from electra.base.files import lock, remove_leftovers, write_json
from electra.base.jobs import Signals, run_jobs
from electra.base.progress import duration
from electra.finetuning import Splits
from electra.finetuning.folder import TaskModel, architecture, write_task_folder
from electra.finetuning.method import FREE_TO_CHANGE, size_defaults
from electra.finetuning.plan import Plan, describe_files, file_line, make_plan
from electra.finetuning.results import (
    RESULT,
    SETTINGS,
    common_settings,
    pack,
    refuse_other_settings,
    refuse_problems,
    run_folder,
    write_results,
)
from electra.finetuning.start import (
    Start,
    build,
    build_model,
    load_start,
    prepare_task,
    usable_length,
)
from electra.finetuning.training import Prepared, infer, train_task
from electra.interop.write import task_card
from electra.train.device import explain_device, explain_memory
from electra.train.loop import Run

log = logging.getLogger(__name__)
TRAINING = "training"


@dataclass(frozen=True)
class Job:
    """A (task, seed) that is not finished, and the folder that will hold it when it is."""

    item: str
    plan: Plan
    splits: Splits
    seed: int
    folder: Path
    fingerprint: str


def seed_run(task_folder: Path, name: str, seed: int, fingerprint: str) -> Run:
    """Where a seed is trained: its metrics, and until it is finished its checkpoints. What was begun with other settings
    begins again."""
    folder = task_folder / TRAINING / f"seed-{seed}"
    begun = folder / SETTINGS
    content = {"settings_sha256": fingerprint}
    if not begun.is_file() or json.loads(begun.read_bytes()) != content:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(begun, content)
    remedy = "Use a lower lr, or a longer warmup."
    title = f"{name} seed {seed}"
    return Run(
        folder, content, name=title, when_diverged=remedy, keeps_last=False, seconds_between_lines=10.0
    )


def run_one(
    plan: Plan, prepared: Prepared, start: Start, seed: int, folder: Path, run: Run, signals: Signals
) -> dict[str, Any]:
    """One (task, seed), from the start to its folder."""
    task, method = prepared.task, plan.method
    model = build_model(plan, task, start, seed)
    remedy = (
        f"{method.batch} rows of {plan.task.length} tokens do not fit: use a smaller batch=… or length=…."
    )
    kept = "Finished runs are kept: run the same command again."
    with explain_memory(remedy), explain_device(kept):
        history = train_task(model, prepared, method, plan.task.epochs, seed, run, signals)
        outputs = {
            split: infer(model, task, part.examples, method, prepared.pad)
            for split, part in prepared.others.items()
        }
    scores: dict[str, dict[str, float]] = {}
    for split in prepared.labelled:  # dev is the first
        part = prepared.others[split]
        scores[split] = task.scores(part.rows, task.predict(part.rows, part.examples, outputs[split]))
        if split == "dev":
            task = task.fitted(scores[split])
    result = {
        "task": plan.name,
        "seed": seed,
        "scores": scores,
        "steps": history.steps,
        "seconds": round(history.seconds, 3),
        "curve": history.curve,
        "losses": history.losses,
        "best_step": history.best_step,
        "stopped_early": history.stopped_early,
        "kept": method.keep,
        "cut": dict(prepared.cut),
    }
    more = {f"outputs-{split}.safetensors": save(pack(found)) for split, found in outputs.items()}
    more[RESULT] = json.dumps(result, indent=1).encode()
    note = {"model": start.path, "seed": seed, "scores": scores}
    name = architecture(start.settings, task)
    more["README.md"] = task_card(plan.name, name, scores["dev"], config.to_toml(method)).encode()
    model.cpu()
    trained = TaskModel(model, task, method, start.tokenizer, note, start.length)
    write_task_folder(folder, trained, more)
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    return result


@lru_cache(maxsize=1)
def _start(model: str) -> Start:
    return load_start(Path(model))


@lru_cache(maxsize=1)
def _prepared(model: str, item: str, overrides: str) -> tuple[Plan, Prepared]:
    plan, splits = make_plan(item, json.loads(overrides), size_defaults(_start(model).settings))
    return plan, prepare_task(plan, splits, _start(model))


def work(
    model: str, item: str, overrides: str, seed: int, folder: str, fingerprint: str, threads: int
) -> dict[str, Any]:
    """What a worker does: the same as `run_one`, from what can be sent to another process."""
    torch.set_num_threads(threads)
    plan, prepared = _prepared(model, item, overrides)
    run = seed_run(Path(folder).parent, plan.name, seed, fingerprint)
    return run_one(plan, prepared, _start(model), seed, Path(folder), run, Signals())


def finetune(
    model: Path,
    items: Sequence[str],
    overrides: Mapping[str, Any],
    out: Path,
    seeds: int = 1,
    jobs: int = 1,
) -> dict[str, Any]:
    """Every task with every seed; returns what results.json holds. Nothing is written before all tables are known to be
    fine."""
    start = load_start(model)
    plans: dict[str, tuple[str, Plan, Splits]] = {}
    for item in items:
        plan, splits = make_plan(item, overrides, size_defaults(start.settings))
        if plan.name in plans:
            raise SettingsError(f"two tasks are called {plan.name}. Give one another name with name=….")
        plans[plan.name] = (item, plan, splits)
    refuse_problems(plans, start)
    with lock(out), Signals() as signals:
        # what is there already is kept, if it was made alike
        remove_leftovers(out)
        todo: list[Job] = []
        settings = {name: common_settings(plan, splits, start) for name, (_, plan, splits) in plans.items()}
        for name, (item, plan, splits) in plans.items():
            for line in (*plan.notes, *map(file_line, describe_files(plan, splits))):
                log.info("%s: %s", name, line)
            if not build(plan, splits, start).architecture:
                log.info(
                    "%s: transformers has no class for this head; it reads the encoder, electra reads all",
                    name,
                )
            refuse_other_settings(out / name, settings[name])
            for seed in range(seeds):
                folder = run_folder(out, name, seed)
                if not folder.exists():
                    todo.append(Job(item, plan, splits, seed, folder, fingerprint_of(settings[name])))
        kept = len(plans) * seeds - len(todo)
        if kept:
            log.info("%d finished run%s kept", kept, "s" * (kept > 1))
        for name in plans:
            (out / name).mkdir(exist_ok=True)
            remove_leftovers(out / name)
            write_json(out / name / SETTINGS, settings[name])

        # the rest
        if jobs > 1 and len(todo) > 1:
            run_together(todo, start, overrides, jobs, signals)
        else:
            run_in_turn(todo, start, signals)
        return write_results(out, plans, start, log.info)


def fingerprint_of(settings: Mapping[str, Any]) -> str:
    """Of all settings that a run must not change on the way."""
    bound = {key: value for key, value in settings.items() if key != "model"}
    bound["method"] = {key: value for key, value in settings["method"].items() if key not in FREE_TO_CHANGE}
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


def run_together(
    todo: Sequence[Job], start: Start, overrides: Mapping[str, Any], jobs: int, signals: Signals
) -> None:
    """The largest first, in several processes."""
    ordered = sorted(todo, key=lambda job: -len(job.splits["train"]) * job.plan.task.epochs)
    threads = max(1, torch.get_num_threads() // jobs)
    given = json.dumps(dict(overrides))
    arguments = [
        (start.path, job.item, given, job.seed, str(job.folder), job.fingerprint, threads) for job in ordered
    ]
    began = time.monotonic()
    for done, result in enumerate(run_jobs(work, arguments, jobs, signals), 1):
        left = (time.monotonic() - began) / done * (len(todo) - done)
        log.info("%s; %d of %d done, ETA %s", result_line(result), done, len(todo), duration(left))


def run_in_turn(todo: Sequence[Job], start: Start, signals: Signals) -> None:
    """One after the other, here."""
    prepared: dict[str, Prepared] = {}
    for job in todo:
        plan = job.plan
        if plan.name not in prepared:
            prepared = {plan.name: prepare_task(plan, job.splits, start)}
            for split, (count, rows) in prepared[plan.name].cut.items():
                if count:
                    meaning = plan.task.cut_words(usable_length(plan, start))
                    log.info("%s: %s of %s %s rows %s", plan.name, f"{count:,}", f"{rows:,}", split, meaning)
        run = seed_run(job.folder.parent, plan.name, job.seed, job.fingerprint)
        result = run_one(plan, prepared[plan.name], start, job.seed, job.folder, run, signals)
        log.info(result_line(result))


def result_line(result: Mapping[str, Any]) -> str:
    name, value = next(iter(result["scores"]["dev"].items()))
    return f"{result['task']} seed {result['seed']}: dev {name} {value:.4f} ({duration(result['seconds'])})"
