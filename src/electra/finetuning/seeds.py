"""One seed of a task, or of several that are trained together: what it starts from, its training, its folders."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from electra.base import config
from electra.base.errors import DataError, SettingsError, counted
from electra.base.files import read_object, read_or_set_aside, write_json
from electra.base.jobs import Result, Signals, run_jobs
from electra.base.randomness import mix
from electra.finetuning import Task, report
from electra.finetuning.baselines import run_alarms
from electra.finetuning.folder import TASK_FILE, TaskModel, seed_folders, task_card, write_task_folder
from electra.finetuning.plan import PlannedTask, Start, make_plan, method_defaults, sha256_of
from electra.finetuning.training import Encoded, Finetuned, History, Prepared, infer, train_jointly, train_task
from electra.interop.read import warn_beyond
from electra.model import encoder_alone, initialise, readable_length
from electra.pretraining.load import load_network
from electra.train.checkpoint import checkpoint_folders, newest_state
from electra.train.device import explain_machine, machine, thread_share
from electra.train.loop import Run

log = logging.getLogger(__name__)
TRAINING = "training"


# What a run starts from


def load_start(model: Path) -> Start:
    """The encoder of a run, our export, or any ELECTRA or ModernBERT folder of transformers: pre-trained, bare or fine-tuned before."""
    return Start(str(model), load_network(model, "encoder"))


def intermediate_start(word: str, out: Path, base: Start) -> Start:
    """For start=mnli: the encoder that was fine-tuned on that task in the same results folder, or that of any fine-tuned folder.
    Of several seeds, the first."""
    folder = next((it for it in (out / word, Path(word)) if it.is_dir()), out / word)
    chosen = next(iter(seed_folders(folder).values()), folder)
    if not (chosen / TASK_FILE).is_file():
        remedy = f"Fine-tune on {word} first, with the same out, or give the path of a fine-tuned folder."
        raise DataError(f"start={word}: {folder} holds no fine-tuned model. {remedy}", ("out",))
    stored = read_object(folder / report.SETTINGS) if (folder / report.SETTINGS).is_file() else None
    if stored and stored.get("model_sha256") != base.sha256:
        log.warning("%s was fine-tuned from %s, not from %s", folder, stored.get("model"), base.path)
    return load_start(chosen)


# Plans


def plan_item(item: str, overrides: Mapping[str, Any], start: Start) -> list[PlannedTask]:
    """Plans one task, or several that are trained together (a+b)."""
    planned = [plan_task(part, overrides, start) for part in joined_tasks(item)]
    if len(planned) == 1:
        return planned
    first = planned[0]
    for it in planned[1:]:
        methods = config.dump(first.plan.method), config.dump(it.plan.method)
        if unlike := config.differences(*methods, ("min_steps",)):
            names = f"{first.plan.name} and {it.plan.name} are trained together"
            raise SettingsError(f"{names}, but with different methods ({'; '.join(unlike)}). Make these equal.")
    together = {it.plan.name: it.data_sha256 for it in planned}
    if len(together) < len(planned):
        raise SettingsError(f"{item}: a task is named twice. Name each task once.")
    return [trained_together(it, together) for it in planned]


def trained_together(planned: PlannedTask, together: Mapping[str, str]) -> PlannedTask:
    others = ", ".join(name for name in together if name != planned.plan.name)
    plan = replace(planned.plan, notes=(*planned.plan.notes, f"one encoder, trained together with {others}"))
    return replace(planned, plan=plan, together=together)


def joined_tasks(item: str) -> list[str]:
    """The parts of a+b. An existing file is one part: it may have a + in its name."""
    parts = [item] if os.path.exists(item) else item.split("+")  # noqa: PTH110  (False, not an error, where it is too long)
    if not all(parts):
        raise SettingsError(f"{item!r} names no task before or after a +. Write a+b.")
    return parts


def plan_task(item: str, overrides: Mapping[str, Any], start: Start) -> PlannedTask:
    plan = make_plan(item, overrides, method_defaults(start.settings))
    if plan.method.reinitialise > start.settings.layers:
        layers = f"the model has {counted(start.settings.layers, 'layer')}"
        raise SettingsError(f"reinitialise={plan.method.reinitialise}, but {layers}. Use at most that many.")
    length = readable_length(start.settings, plan.task.length)
    if length < plan.task.length and "length" in overrides:
        raise SettingsError(f"length={plan.task.length}, but the model has {length} positions. Use at most that many.")
    task = plan.task.build(start.network.tokenizer, length, plan.splits)
    return PlannedTask(plan, task, start, overrides)


def prepare_task(planned: PlannedTask) -> Prepared:
    task, start = planned.task, planned.start
    train = Encoded.of(task, task.training_rows(planned.plan.splits["train"]))
    longest = max((len(example.ids) for example in train.examples), default=0)
    warn_beyond(start.settings, start.network.length, longest)
    return Prepared(planned, train, encode_others(planned))


@lru_cache(maxsize=1)
def prepared_in_worker(model: str, item: str, overrides: str) -> list[Prepared]:
    """Plans and encodes a task once for all runs of a worker. `overrides` are JSON, because the cache needs hashable arguments."""
    return list(map(prepare_task, plan_item(item, json.loads(overrides), load_start(Path(model)))))


def run_in_workers(
    function: Callable[..., Result],
    jobs: Sequence[tuple[Any, ...]],
    workers: int,
    devices: Sequence[str],
    signals: Signals,
) -> Iterator[Result]:
    """Runs the jobs in processes that share the threads and the GPUs of this one."""
    return run_jobs(function, jobs, workers, signals, thread_share(workers), relays=True, devices=devices)


def encode_others(planned: PlannedTask) -> dict[str, Encoded]:
    """Encodes the splits that are not trained on. A test split with placeholders for answers (`is_filled_in`) counts as unlabelled."""
    splits = planned.plan.splits.items()
    others = {split: Encoded.of(planned.task, rows) for split, rows in splits if split != "train"}
    for split, part in others.items():
        if split != "dev" and part.is_labelled and part.is_filled_in:
            others[split] = replace(part, examples=[replace(example, target=None) for example in part.examples])
    return others


# Training


def build_model(planned: PlannedTask, seed: int) -> Finetuned:
    """The pre-trained encoder, except for reinitialised layers, with a head whose weights depend on the seed alone."""
    start, method = planned.start, planned.plan.method
    dropout = {"dropout": method.dropout, "attention_dropout": method.attention_dropout}
    settings = start.settings.model_copy(update=dropout)
    encoder = encoder_alone(settings, len(start.network.encoder.embeddings.table))
    initialise(encoder, settings, mix(seed, "encoder"))
    if method.pretrained:
        kept = settings.layers - method.reinitialise
        fresh = [f"layers.{number}." for number in range(kept, settings.layers)]
        fresh += ["final_norm."] * bool(fresh)  # ModernBERT's, which belongs to its top layer
        tensors = {name: it for name, it in start.tensors.items() if not name.startswith(tuple(fresh))}
        encoder.load_state_dict({**encoder.state_dict(), **tensors})
    head = planned.task.head(settings)
    initialise(head, settings, mix(seed, "head"))
    return Finetuned(encoder, head)


def train_seed(prepared: Sequence[Prepared], seed: int, run: Run, signals: Signals) -> list[tuple[Finetuned, History]]:
    """Trains one seed and returns the network of each task with its history; several tasks share one encoder."""
    models = [build_model(it.planned, seed) for it in prepared]
    if len(models) == 1:
        return [(models[0], train_task(models[0], prepared[0], seed, run, signals))]
    models = [Finetuned(models[0].encoder, model.head) for model in models]
    return list(zip(models, train_jointly(models, prepared, seed, run, signals), strict=True))


def seed_run(task_folder: Path, name: str, seed: int, fingerprint: str) -> Run:
    """The folder where a seed is trained, with its metrics and, until it is finished, its checkpoints. A run that was begun with
    other settings begins again."""
    folder, title = task_folder / TRAINING / f"seed-{seed}", f"{name} seed {seed}"
    begun, content = folder / report.SETTINGS, {"settings_sha256": fingerprint}
    if (read_or_set_aside(begun) or newest_begun(folder)) != content:
        if checkpoint_folders(folder / "checkpoints"):
            log.warning("%s was started with other settings, so it starts over; its checkpoints are removed.", title)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(begun, content)
    remedy = "Use a lower lr, or a longer warmup."
    return Run(folder, content, name=title, when_diverged=remedy, keeps_last=False, seconds_between_lines=10.0)


def newest_begun(folder: Path) -> dict[str, Any]:
    """The settings' hash from the newest checkpoint, in case the file that has it is lost."""
    state = newest_state(folder / "checkpoints")
    return {key: state[key] for key in ("settings_sha256",) if key in state}


def group_name(planned: Sequence[PlannedTask]) -> str:
    return "+".join(it.plan.name for it in planned)


def run_seed(prepared: Sequence[Prepared], seed: int, out: Path, signals: Signals) -> list[dict[str, Any]]:
    """Trains one seed of a task, or of several together, and writes its folders; returns the contents of their result.json."""
    planned = [it.planned for it in prepared]
    name, method = group_name(planned), planned[0].plan.method
    fingerprints = {it.plan.name: it.fingerprint for it in planned}
    fingerprint = sha256_of(fingerprints) if len(planned) > 1 else planned[0].fingerprint
    run = seed_run(out / name, name, seed, fingerprint)
    settings = {"model": planned[0].start.path, "seed": seed, **config.dump(method)}
    if len(planned) == 1:
        settings |= config.dump(planned[0].plan.task)
    run = replace(run, settings=settings)
    length = max(it.plan.task.length for it in planned)
    remedy = f"{method.batch} rows of {length} tokens do not fit: use a smaller batch=… or length=…."
    with explain_machine(remedy, "Finished runs are kept: run the same command again."):
        trained = train_seed(prepared, seed, run, signals)
        outputs = [
            {split: infer(model, its.task, part.examples, method) for split, part in its.others.items()}
            for its, (model, _) in zip(prepared, trained, strict=True)
        ]
    results = []
    for its, (model, history), answers in zip(prepared, trained, outputs, strict=True):
        it = its.planned
        folder = report.run_folder(out, it.plan.name, seed)
        task, result = judged(its, answers, history)
        trained_on = it.settings["files"]["train"]["sha256"]
        result = {"task": it.plan.name, "seed": seed, "train_sha256": trained_on, "machine": machine(), **result}
        if not folder.exists():  # of several, some may have been written before the process was killed
            write_seed(folder, it, task, model, answers, result)
        results.append(result)
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    return results


def judged(prepared: Prepared, outputs: Mapping[str, Sequence[Any]], history: History) -> tuple[Task, dict[str, Any]]:
    """Returns the task with what is chosen on dev, and the content of result.json: scores, history, cut rows, alarms."""
    task = prepared.task
    scores: dict[str, dict[str, float]] = {}
    alarms: list[str] = []
    for split, part in prepared.others.items():  # dev is the first
        if part.is_labelled:
            predictions = task.predict(part.rows, part.examples, outputs[split])
            scores[split] = task.scores(part.rows, predictions)
            if split == "dev":
                task = task.fitted(scores[split])
                predictions = task.predict(part.rows, part.examples, outputs[split])
                losses = [loss for _, loss in history.losses]
                alarms = run_alarms(task, part.rows, predictions, scores[split], losses)
    encoded = {"train": prepared.train, **prepared.others}
    cut = {split: (part.cut, len(part.rows)) for split, part in encoded.items()}
    return task, {"scores": scores, **vars(history), "kept": prepared.method.keep, "cut": cut, "alarms": alarms}


def write_seed(
    folder: Path, planned: PlannedTask, task: Task, model: Finetuned, outputs: Mapping[str, Any], result: dict[str, Any]
) -> None:
    start, card = planned.start, task_card(planned, result)
    more = {f"outputs-{split}.safetensors": save(report.pack(arrays)) for split, arrays in outputs.items()}
    more |= {report.RESULT: json.dumps(result, indent=1).encode(), "README.md": card.encode()}
    note = {"model": start.path, **{key: result[key] for key in ("scores", "seed", "train_sha256")}}
    if planned.together:
        note["together"] = list(planned.together)
    trained = TaskModel(model.cpu(), task, planned.plan.method, note, start.network.length)
    write_task_folder(folder, trained, more)
