"""Tasks x seeds."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
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
from electra.data.tokenizer import special_ids
from electra.finetuning import Splits
from electra.finetuning.folder import TaskModel, architecture, write_task_folder
from electra.finetuning.loop import infer, train_task
from electra.finetuning.method import size_defaults
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
    Prepared,
    Start,
    build,
    build_model,
    load_start,
    prepare_task,
    usable_length,
)
from electra.interop.write import task_card
from electra.train import device as guard


def run_one(
    plan: Plan, prepared: Prepared, start: Start, seed: int, folder: Path, signals: Signals
) -> dict[str, Any]:
    """One (task, seed), from the start to its folder."""
    task, method = prepared.task, plan.method
    pad = special_ids(start.tokenizer).pad
    model = build_model(plan, task, start, seed)

    def should_stop() -> Exception | None:
        if signals.received is None:
            return None
        return signals.stop(
            f"stopped in {plan.name} seed {seed}; finished runs are kept, this one begins again."
        )

    remedy = (
        f"{method.batch} rows of {plan.task.length} tokens do not fit: use a smaller batch=… or length=…."
    )
    kept = "Finished runs are kept: run the same command again."
    with guard.explain_memory(remedy), guard.explain_device(kept):
        history = train_task(
            task,
            model,
            prepared.train,
            prepared.others["dev"],
            method,
            plan.task.epochs,
            seed,
            pad,
            f"{plan.name} seed {seed}",
            should_stop,
        )
        outputs = {
            split: infer(model, task, part.examples, method, pad) for split, part in prepared.others.items()
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
    return result


@lru_cache(maxsize=1)
def _start(model: str) -> Start:
    return load_start(Path(model))


@lru_cache(maxsize=1)
def _prepared(model: str, item: str, words: str) -> tuple[Plan, Prepared]:
    plan, splits = make_plan(item, json.loads(words), size_defaults(_start(model).settings))
    return plan, prepare_task(plan, splits, _start(model))


def work(model: str, item: str, words: str, seed: int, folder: str, threads: int) -> dict[str, Any]:
    """What a worker does: the same as `run_one`, from what can be sent to another process."""
    torch.set_num_threads(threads)
    plan, prepared = _prepared(model, item, words)
    return run_one(plan, prepared, _start(model), seed, Path(folder), Signals())


def finetune(
    model: Path,
    items: Sequence[str],
    overrides: Mapping[str, Any],
    out: Path,
    seeds: int = 1,
    jobs: int = 1,
    say: Callable[[str], None] = print,
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
        remove_leftovers(out)
        todo = []
        for name, (item, plan, splits) in plans.items():
            for line in (*plan.notes, *map(file_line, describe_files(plan, splits))):
                say(f"{name}: {line}")
            if not build(plan, splits, start).architecture:
                say(
                    f"{name}: transformers has no class for this head; it reads the encoder, electra reads all"
                )
            refuse_other_settings(out / name, common_settings(plan, splits, start))
            todo += [
                (item, plan, splits, seed)
                for seed in range(seeds)
                if not run_folder(out, name, seed).exists()
            ]
        kept = len(plans) * seeds - len(todo)
        if kept:
            say(f"{kept} finished run{'s' * (kept > 1)} kept")
        for name, (_, plan, splits) in plans.items():
            (out / name).mkdir(exist_ok=True)
            remove_leftovers(out / name)
            write_json(out / name / SETTINGS, common_settings(plan, splits, start))
        run_all(todo, start, overrides, out, jobs, signals, say)
        return write_results(out, plans, start, say)


def run_all(
    todo: Sequence[tuple[str, Plan, Splits, int]],
    start: Start,
    overrides: Mapping[str, Any],
    out: Path,
    jobs: int,
    signals: Signals,
    say: Callable[[str], None],
) -> None:
    """One after the other here, or the largest first in several processes."""
    if jobs > 1 and len(todo) > 1:
        ordered = sorted(todo, key=lambda job: -len(job[2]["train"]) * job[1].task.epochs)
        threads = max(1, torch.get_num_threads() // jobs)
        words = json.dumps(dict(overrides))
        arguments = [
            (start.path, item, words, seed, str(run_folder(out, plan.name, seed)), threads)
            for item, plan, _, seed in ordered
        ]
        began = time.monotonic()
        for done, result in enumerate(run_jobs(work, arguments, jobs, signals), 1):
            left = (time.monotonic() - began) / done * (len(todo) - done)
            say(f"{result_line(result)}; {done} of {len(todo)} done, ETA {duration(left)}")
        return
    prepared: dict[str, Prepared] = {}
    for _, plan, splits, seed in todo:
        if plan.name not in prepared:
            prepared = {plan.name: prepare_task(plan, splits, start)}
            for split, (count, rows) in prepared[plan.name].cut.items():
                if count:
                    words = plan.task.cut_words(usable_length(plan, start))
                    say(f"{plan.name}: {count:,} of {rows:,} {split} rows {words}")
        folder = run_folder(out, plan.name, seed)
        result = run_one(plan, prepared[plan.name], start, seed, folder, signals)
        say(result_line(result))


def result_line(result: Mapping[str, Any]) -> str:
    name, value = next(iter(result["scores"]["dev"].items()))
    return f"{result['task']} seed {result['seed']}: dev {name} {value:.4f} ({duration(result['seconds'])})"
