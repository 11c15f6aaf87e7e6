"""Tasks x seeds: what a run starts from, the runs one after the other or side by side, and their results."""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save
from tokenizers import Tokenizer
from torch import Tensor

from electra.base import config
from electra.base.errors import SettingsError
from electra.base.files import lock, read_json, remove_leftovers, write_json
from electra.base.jobs import Signals, run_jobs
from electra.base.progress import duration
from electra.base.randomness import mix
from electra.data.tokenizer import special_ids
from electra.finetuning import Splits, Task
from electra.finetuning.folder import TaskModel, architecture, write_task_folder
from electra.finetuning.plan import (
    FREE_METHOD_KEYS,
    Plan,
    describe_files,
    file_line,
    make_plan,
    plan_problems,
    refuse,
    size_defaults,
)
from electra.finetuning.report import (
    RESULT,
    SETTINGS,
    common_settings,
    pack,
    refuse_other_runs,
    run_folder,
    task_result,
    write_results,
)
from electra.finetuning.training import Dev, Finetuned, Prepared, infer, train_task
from electra.interop.formats import own_tensors
from electra.interop.read import warn_beyond
from electra.interop.write import task_card
from electra.model import EncoderSettings, encoder_alone, initialise
from electra.pretraining.load import load_network
from electra.train.device import explain_device, explain_memory
from electra.train.loop import Run

log = logging.getLogger(__name__)
TRAINING = "training"


# What a run starts from


@dataclass(frozen=True)
class Start:
    """The encoder that fine-tuning starts from, by our names."""

    path: str
    settings: EncoderSettings
    vocab_size: int
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer
    length: int | None = None
    """How many positions pre-training had trained."""

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def load_start(model: Path) -> Start:
    """A run folder, our export, or any ELECTRA or ModernBERT folder of transformers: pre-trained, bare or fine-tuned on another task."""
    network = load_network(model, "encoder")
    encoder = network.encoder
    sizes = encoder.settings, len(encoder.embeddings.table)
    return Start(str(model), *sizes, own_tensors(encoder), network.tokenizer, network.length)


@dataclass(frozen=True)
class PlannedTask:
    """A plan with its task, built once and shared by checks, runs and report; `settings` are those of settings.json."""

    plan: Plan
    task: Task
    settings: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        """Of all settings that a run must not change on the way."""
        bound = {key: value for key, value in self.settings.items() if key != "model"}
        method = self.settings["method"].items()
        bound["method"] = {key: value for key, value in method if key not in FREE_METHOD_KEYS}
        return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


def plan_task(item: str, overrides: Mapping[str, Any], start: Start) -> tuple[Plan, Task]:
    plan = make_plan(item, overrides, size_defaults(start.settings))
    length = min(plan.task.length, start.settings.positions)
    return plan, plan.task.build(start.tokenizer, length, plan.splits)


def prepare_task(task: Task, splits: Splits, start: Start) -> Prepared:
    rows = task.training_rows(splits["train"])
    train, cut = task.encode(rows)
    longest = max((len(example.ids) for example in train), default=0)
    warn_beyond(start.settings, start.length, longest)
    others, cut_in_others = encode_others(task, splits)
    labelled = tuple(
        split
        for split, part in others.items()
        if part.examples and all(example.target is not None for example in part.examples)
    )
    pad = special_ids(start.tokenizer).pad
    return Prepared(task, train, others, labelled, {"train": (cut, len(rows)), **cut_in_others}, pad)


def encode_others(task: Task, splits: Splits) -> tuple[dict[str, Dev], dict[str, tuple[int, int]]]:
    """Every split but train, and (how many rows were cut, of how many)."""
    others, cut = {}, {}
    for split, rows in splits.items():
        if split != "train":
            examples, count = task.encode(rows)
            others[split], cut[split] = Dev(rows, examples), (count, len(rows))
    return others, cut


def build_model(plan: Plan, task: Task, start: Start, seed: int) -> Finetuned:
    """The pre-trained encoder under a head that depends on the seed alone."""
    dropout = {"dropout": plan.method.dropout, "attention_dropout": plan.method.attention_dropout}
    settings = start.settings.model_copy(update=dropout)
    encoder = encoder_alone(settings, start.vocab_size)
    initialise(encoder, settings, mix(seed, "encoder"))
    if plan.method.pretrained:
        encoder.load_state_dict(start.tensors)
    head = task.head(settings)
    initialise(head, settings, mix(seed, "head"))
    return Finetuned(encoder, head)


# Runs


@dataclass(frozen=True)
class SeedJob:
    """A (task, seed) that is not finished, and the folder that will hold it when it is."""

    planned: PlannedTask
    seed: int
    folder: Path


def seed_run(task_folder: Path, name: str, seed: int, fingerprint: str) -> Run:
    """Where a seed is trained: its metrics, and until it is finished its checkpoints. What was begun with other settings
    begins again."""
    folder = task_folder / TRAINING / f"seed-{seed}"
    begun = folder / SETTINGS
    content = {"settings_sha256": fingerprint}
    if not begun.is_file() or read_json(begun) != content:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(begun, content)
    remedy = "Use a lower lr, or a longer warmup."
    title = f"{name} seed {seed}"
    return Run(folder, content, name=title, when_diverged=remedy, keeps_last=False, seconds_between_lines=10.0)


def run_one(
    plan: Plan, prepared: Prepared, start: Start, seed: int, folder: Path, run: Run, signals: Signals
) -> dict[str, Any]:
    """One (task, seed), from the start to its folder."""
    task, method = prepared.task, plan.method
    model = build_model(plan, task, start, seed)
    remedy = f"{method.batch} rows of {plan.task.length} tokens do not fit: use a smaller batch=… or length=…."
    kept = "Finished runs are kept: run the same command again."
    with explain_memory(remedy), explain_device(kept):
        history = train_task(model, prepared, method, plan.task.epochs, seed, run, signals)
        outputs = {
            split: infer(model, task, part.examples, method, prepared.pad) for split, part in prepared.others.items()
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
    more = {f"outputs-{split}.safetensors": save(pack(arrays)) for split, arrays in outputs.items()}
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
    plan, task = plan_task(item, json.loads(overrides), _start(model))
    return plan, prepare_task(task, plan.splits, _start(model))


def work(
    model: str, item: str, overrides: str, seed: int, folder: str, fingerprint: str, threads: int
) -> dict[str, Any]:
    """What a worker does: the same as `run_one`, from what can be sent to another process."""
    torch.set_num_threads(threads)
    plan, prepared = _prepared(model, item, overrides)
    run = seed_run(Path(folder).parent, plan.name, seed, fingerprint)
    return run_one(plan, prepared, _start(model), seed, Path(folder), run, Signals())


def finetune(
    model: Path, items: Sequence[str], overrides: Mapping[str, Any], out: Path, seeds: int = 1, jobs: int = 1
) -> dict[str, Any]:
    """Every task with every seed; returns what results.json holds. Nothing is written before all tables are known to be
    fine."""
    start = load_start(model)
    planned: dict[str, PlannedTask] = {}
    problems: list[str] = []
    for item in items:
        plan, task = plan_task(item, overrides, start)
        if plan.name in planned:
            raise SettingsError(f"two tasks are called {plan.name}. Give one another name with name=….")
        prefix = f"{plan.name}: " if len(items) > 1 else ""
        problems += [f"{prefix}{problem}" for problem in plan_problems(plan, task)]
        planned[plan.name] = PlannedTask(plan, task, common_settings(plan, start.path, start.sha256))
    if problems:
        refuse(problems)
    with lock(out), Signals() as signals:
        # what is there already is kept, if it was made alike
        remove_leftovers(out)
        todo: list[SeedJob] = []
        for name, it in planned.items():
            for line in (*it.plan.notes, *map(file_line, describe_files(it.plan))):
                log.info("%s: %s", name, line)
            if not it.task.architecture:
                log.info("%s: transformers has no class for this head; it reads the encoder, electra reads all", name)
            refuse_other_runs(out / name, it.settings)
            folders = {seed: run_folder(out, name, seed) for seed in range(seeds)}
            todo += [SeedJob(it, seed, folder) for seed, folder in folders.items() if not folder.exists()]
            for folder in (out / name / TRAINING).glob("seed-*"):
                if (out / name / folder.name).exists():  # killed between the one and the other
                    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        kept = len(planned) * seeds - len(todo)
        if kept:
            log.info("%d finished run%s kept", kept, "s" * (kept > 1))
        for name, it in planned.items():
            (out / name).mkdir(exist_ok=True)
            remove_leftovers(out / name)
            write_json(out / name / SETTINGS, it.settings)

        # the rest
        if jobs > 1 and len(todo) > 1:
            run_together(todo, start, overrides, jobs, signals)
            todo = []
        results = {}
        for name, it in planned.items():
            others = run_in_turn(it, [job for job in todo if job.planned is it], start, signals)
            results[name] = task_result(out, it.plan, it.task, others, start.path)
        return write_results(out, start.path, results)


def run_together(
    todo: Sequence[SeedJob], start: Start, overrides: Mapping[str, Any], jobs: int, signals: Signals
) -> None:
    """The largest first, in several processes."""
    ordered = sorted(todo, key=lambda job: -len(job.planned.plan.splits["train"]) * job.planned.plan.task.epochs)
    threads = max(1, torch.get_num_threads() // jobs)
    words = json.dumps(dict(overrides))
    arguments = [
        (start.path, it.plan.item, words, job.seed, str(job.folder), it.fingerprint, threads)
        for job in ordered
        for it in [job.planned]
    ]
    began = time.monotonic()
    for done, result in enumerate(run_jobs(work, arguments, jobs, signals), 1):
        left = (time.monotonic() - began) / done * (len(todo) - done)
        log.info("%s; %d of %d done, ETA %s", result_line(result), done, len(todo), duration(left))


def run_in_turn(planned: PlannedTask, jobs: Sequence[SeedJob], start: Start, signals: Signals) -> Mapping[str, Dev]:
    """The runs of one task that are left, one after the other, here. Returns the splits that are not trained on, encoded."""
    plan, task = planned.plan, planned.task
    if not jobs:
        return encode_others(task, plan.splits)[0]
    prepared = prepare_task(task, plan.splits, start)
    for split, (count, rows) in prepared.cut.items():
        if count:
            meaning = plan.task.cut_words(task.length)
            log.info("%s: %s of %s %s rows %s", plan.name, f"{count:,}", f"{rows:,}", split, meaning)
    for job in jobs:
        run = seed_run(job.folder.parent, plan.name, job.seed, planned.fingerprint)
        log.info(result_line(run_one(plan, prepared, start, job.seed, job.folder, run, signals)))
    return prepared.others


def result_line(result: Mapping[str, Any]) -> str:
    name, value = next(iter(result["scores"]["dev"].items()))
    return f"{result['task']} seed {result['seed']}: dev {name} {value:.4f} ({duration(result['seconds'])})"
