"""Tasks x seeds: what a run starts from, the runs one after the other or side by side, and their results."""

import hashlib
import json
import logging
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save
from torch import Tensor

from electra.base import config
from electra.base.errors import SettingsError
from electra.base.files import lock, read_or_set_aside, remove_leftovers, write_json
from electra.base.jobs import Signals, run_jobs
from electra.base.progress import duration
from electra.base.randomness import mix
from electra.data.tokenizer import special_ids
from electra.finetuning import IS_ALSO, Splits, Task, report
from electra.finetuning.alarms import label_alarms, run_alarms
from electra.finetuning.baselines import UNTRAINED, baseline_scores
from electra.finetuning.folder import TaskModel, architecture, write_task_folder
from electra.finetuning.plan import Plan, describe_files, file_line, make_plan, method_defaults, plan_problems, refuse
from electra.finetuning.training import Encoded, Finetuned, Prepared, infer, train_task
from electra.interop.formats import own_tensors
from electra.interop.read import Pretrained, warn_beyond
from electra.interop.write import task_card
from electra.model import EncoderSettings, encoder_alone, initialise, readable_length
from electra.pretraining.load import load_network
from electra.train.checkpoint import checkpoint_folders, newest_state
from electra.train.device import explain_machine
from electra.train.loop import Run
from electra.train.trackers import wanted_trackers

log = logging.getLogger(__name__)
TRAINING = "training"
UNTRAINED_RATES = (3e-4, 1e-3, 3e-3)


# What a run starts from


@dataclass(frozen=True)
class Start:
    """The encoder that fine-tuning starts from; `tensors` are its weights, by our names."""

    path: str
    network: Pretrained
    tensors: Mapping[str, Tensor]

    @property
    def settings(self) -> EncoderSettings:
        return self.network.encoder.settings

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
    return Start(str(model), network, own_tensors(network.encoder))


@dataclass(frozen=True)
class PlannedTask:
    """A plan with its task, built once and shared by checks, runs and report; `settings` are those of settings.json."""

    plan: Plan
    task: Task
    settings: Mapping[str, Any]

    @property
    def fingerprint(self) -> str:
        """Of all settings that a run must not change on the way."""
        return sha256_of(report.bound(self.settings))

    @property
    def data_sha256(self) -> str:
        return sha256_of({key: self.settings[key] for key in ("task", "files", "rows")})


def sha256_of(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def plan_task(item: str, overrides: Mapping[str, Any], start: Start) -> tuple[Plan, Task]:
    plan = make_plan(item, overrides, method_defaults(start.settings))
    if plan.method.reinitialise > start.settings.layers:
        layers = f"the model has {start.settings.layers} layers"
        raise SettingsError(f"reinitialise={plan.method.reinitialise}, but {layers}. Use at most that many.")
    length = readable_length(start.settings, plan.task.length)
    if length < plan.task.length and "length" in overrides:
        raise SettingsError(f"length={plan.task.length}, but the model has {length} positions. Use at most that many.")
    return plan, plan.task.build(start.network.tokenizer, length, plan.splits)


def prepare_task(task: Task, plan: Plan, start: Start) -> Prepared:
    train = Encoded.of(task, task.training_rows(plan.splits["train"]))
    longest = max((len(example.ids) for example in train.examples), default=0)
    warn_beyond(start.settings, start.network.length, longest)
    pad = special_ids(start.network.tokenizer).pad
    return Prepared(task, train, encode_others(task, plan.splits), pad)


def encode_others(task: Task, splits: Splits) -> dict[str, Encoded]:
    return {split: Encoded.of(task, rows) for split, rows in splits.items() if split != "train"}


def build_model(plan: Plan, task: Task, start: Start, seed: int) -> Finetuned:
    """The pre-trained encoder, but for layers that start anew, under a head that depends on the seed alone."""
    dropout = {"dropout": plan.method.dropout, "attention_dropout": plan.method.attention_dropout}
    settings = start.settings.model_copy(update=dropout)
    encoder = encoder_alone(settings, len(start.network.encoder.embeddings.table))
    initialise(encoder, settings, mix(seed, "encoder"))
    if plan.method.pretrained:
        kept = settings.layers - plan.method.reinitialise
        fresh = [f"layers.{number}." for number in range(kept, settings.layers)]
        fresh += ["final_norm."] * bool(fresh)  # ModernBERT's, which belongs to its top layer
        tensors = {name: it for name, it in start.tensors.items() if not name.startswith(tuple(fresh))}
        encoder.load_state_dict({**encoder.state_dict(), **tensors})
    head = task.head(settings)
    initialise(head, settings, mix(seed, "head"))
    return Finetuned(encoder, head)


# Runs


def seed_run(task_folder: Path, name: str, seed: int, fingerprint: str) -> Run:
    """Where a seed is trained: its metrics, and until it is finished its checkpoints. What was begun with other settings
    begins again."""
    folder, title = task_folder / TRAINING / f"seed-{seed}", f"{name} seed {seed}"
    begun, content = folder / report.SETTINGS, {"settings_sha256": fingerprint}
    if (read_or_set_aside(begun) or newest_begun(folder)) != content:
        if checkpoint_folders(folder / "checkpoints"):
            log.warning("%s was begun with other settings, so it begins again; its checkpoints are removed.", title)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(begun, content)
    remedy = "Use a lower lr, or a longer warmup."
    return Run(folder, content, name=title, when_diverged=remedy, keeps_last=False, seconds_between_lines=10.0)


def newest_begun(folder: Path) -> dict[str, Any]:
    """What a checkpoint says where the file that said it is lost."""
    state = newest_state(folder / "checkpoints")
    return {key: state[key] for key in ("settings_sha256",) if key in state}


def run_one(
    plan: Plan, prepared: Prepared, start: Start, seed: int, folder: Path, fingerprint: str, signals: Signals
) -> dict[str, Any]:
    """One (task, seed), from the start to its folder."""
    task, method = prepared.task, plan.method
    run = seed_run(folder.parent, plan.name, seed, fingerprint)
    run = replace(run, settings={"model": start.path, "seed": seed, **config.dump(plan.task), **config.dump(method)})
    model = build_model(plan, task, start, seed)
    remedy = f"{method.batch} rows of {plan.task.length} tokens do not fit: use a smaller batch=… or length=…."
    kept = "Finished runs are kept: run the same command again."
    with explain_machine(remedy, kept):
        history = train_task(model, prepared, method, plan.task.epochs, seed, run, signals)
        outputs = {
            split: infer(model, task, part.examples, method, prepared.pad) for split, part in prepared.others.items()
        }
    scores: dict[str, dict[str, float]] = {}
    alarms: list[str] = []
    for split, part in prepared.others.items():  # dev is the first
        if part.is_labelled:
            predictions = task.predict(part.rows, part.examples, outputs[split])
            scores[split] = task.scores(part.rows, predictions)
            if split == "dev":
                losses = [loss for _, loss in history.losses]
                alarms = run_alarms(task, part.rows, predictions, scores[split], losses)
                task = task.fitted(scores[split])
    encoded = {"train": prepared.train, **prepared.others}
    cut = {split: (part.cut, len(part.rows)) for split, part in encoded.items()}
    result = {"task": plan.name, "seed": seed, "scores": scores, **vars(history), "kept": method.keep, "cut": cut}
    result["alarms"] = alarms
    card = task_card(plan.name, architecture(start.settings, task), scores["dev"], config.to_toml(method))
    more = {f"outputs-{split}.safetensors": save(report.pack(arrays)) for split, arrays in outputs.items()}
    more |= {report.RESULT: json.dumps(result, indent=1).encode(), "README.md": card.encode()}
    note = {"model": start.path, "seed": seed, "scores": scores}
    trained = TaskModel(model.cpu(), task, method, start.network.tokenizer, note, start.network.length)
    write_task_folder(folder, trained, more)
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    return result


@lru_cache(maxsize=1)
def _prepared(model: str, item: str, overrides: str) -> tuple[Plan, Prepared, Start]:
    start = load_start(Path(model))
    plan, task = plan_task(item, json.loads(overrides), start)
    return plan, prepare_task(task, plan, start), start


def work(
    model: str, item: str, overrides: str, seed: int, folder: str, fingerprint: str, threads: int
) -> dict[str, Any]:
    """What a worker does: the same as `run_one`, from what can be sent to another process."""
    torch.set_num_threads(threads)
    return run_one(*_prepared(model, item, overrides), seed, Path(folder), fingerprint, Signals())


def finetune(
    model: Path,
    items: Sequence[str],
    overrides: Mapping[str, Any],
    out: Path,
    seeds: int = 1,
    jobs: int = 1,
    untrained: bool = False,
) -> dict[str, Any]:
    """Every task with every seed; returns what results.json holds. Nothing is written before all tables are known to be
    fine. With `untrained` the same network from random weights stands beside the result."""
    start = load_start(model)
    planned: dict[str, PlannedTask] = {}
    problems: list[str] = []
    remedies: dict[str, None] = {}
    for item in items:
        plan, task = plan_task(item, overrides, start)
        if plan.name in planned:
            raise SettingsError(f"two tasks are called {plan.name}. Give one another name with name=….")
        wanted_trackers(plan.method.track)
        prefix = f"{plan.name}: " if len(items) > 1 else ""
        own = plan_problems(plan, task)
        problems += [f"{prefix}{problem}" for problem in own]
        if any(problem.text == IS_ALSO for problem in own):
            remedies[f"Rows of dev that are in train too: {plan.task.shared_rows_remedy}"] = None
        planned[plan.name] = PlannedTask(plan, task, report.common_settings(plan, start.path, start.sha256))
    refuse(problems, remedies)
    with lock(out), Signals() as signals:
        # what is there already is kept, if it was made alike
        remove_leftovers(out)
        todo: dict[str, list[int]] = {}
        for name, it in planned.items():
            for line in (*it.plan.notes, *map(file_line, describe_files(it.plan))):
                log.info("%s: %s", name, line)
            for text in label_alarms(it.task, it.plan.splits):
                log.warning("%s: %s", name, text)
            if not architecture(start.settings, it.task):
                log.info("%s: transformers has no class for this head; it reads the encoder, electra reads all", name)
            report.refuse_other_runs(out / name, it.settings)
            todo[name] = [seed for seed in range(seeds) if not report.run_folder(out, name, seed).exists()]
            for seed in set(range(seeds)) - set(todo[name]):  # a process may have been killed before it removed these
                shutil.rmtree(out / name / TRAINING / f"seed-{seed}" / "checkpoints", ignore_errors=True)
        left = sum(map(len, todo.values()))
        if kept := len(planned) * seeds - left:
            log.info("%d finished run%s kept", kept, "s" * (kept > 1))
        for name, it in planned.items():
            (out / name).mkdir(exist_ok=True)
            remove_leftovers(out / name)
            write_json(out / name / report.SETTINGS, it.settings)

        # the rest, side by side (the largest first) or one after the other
        if jobs > 1 and left > 1:
            words, threads = json.dumps(dict(overrides)), max(1, torch.get_num_threads() // jobs)
            arguments = []
            for it in sorted(planned.values(), key=lambda it: -len(it.plan.splits["train"]) * it.plan.task.epochs):
                for seed in todo.pop(it.plan.name):
                    folder = str(report.run_folder(out, it.plan.name, seed))
                    arguments.append((start.path, it.plan.item, words, seed, folder, it.fingerprint, threads))
            run_together(arguments, jobs, signals)
        others = {name: run_in_turn(it, todo.get(name, []), out, start, signals) for name, it in planned.items()}
        random = finetune_untrained(planned, overrides, out, seeds, jobs) if untrained else {}
        results = {}
        for name, it in planned.items():
            labelled = {split: part.rows for split, part in others[name].items() if part.is_labelled}
            baselines = baseline_scores(out / name, it.data_sha256, it.task, it.plan.splits["train"], labelled)
            if name in random:
                baselines["dev"][UNTRAINED] = random[name]
            results[name] = report.task_result(out, it.plan, it.task, others[name], start.path, baselines)
        return report.write_results(out, start.path, results)


def finetune_untrained(
    planned: Mapping[str, PlannedTask], overrides: Mapping[str, Any], out: Path, seeds: int, jobs: int
) -> dict[str, dict[str, float]]:
    """task -> the dev metrics of the same network from random weights, their mean over the seeds. Every rate is tried with one
    seed, and the best goes on; layer-wise decay would hold random weights near where they began."""

    def results_at(rate: float, names: Sequence[str], seeds: int) -> dict[str, Any]:
        log.info("from random weights, at lr %g:", rate)
        words = {**overrides, "pretrained": False, "reinitialise": 0, "layer_decay": 1.0, "lr": rate}
        items = [planned[name].plan.item for name in names]
        model = Path(planned[names[0]].settings["model"])
        results: dict[str, Any] = finetune(model, items, words, out / UNTRAINED / f"lr-{rate:g}", seeds, jobs)["tasks"]
        return results

    tried = {rate: results_at(rate, list(planned), 1) for rate in UNTRAINED_RATES}
    best: dict[float, list[str]] = {}
    for name in planned:
        best.setdefault(max(tried, key=lambda rate: tried[rate][name]["median"]), []).append(name)
    scores = {}
    for rate, names in best.items():
        for name, result in results_at(rate, names, seeds).items():
            if name in names:
                runs = [result["scores"]["dev"][f"seed {seed}"] for seed in range(seeds)]
                scores[name] = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
    return scores


def run_together(arguments: Sequence[tuple[Any, ...]], jobs: int, signals: Signals) -> None:
    """What `work` takes for each run, in several processes."""
    began = time.monotonic()
    for done, result in enumerate(run_jobs(work, arguments, jobs, signals, relays=True), 1):
        left = (time.monotonic() - began) / done * (len(arguments) - done)
        log.info("%s; %d of %d done, ETA %s", result_line(result), done, len(arguments), duration(left))
        warn_of(result)


def run_in_turn(
    planned: PlannedTask, seeds: Sequence[int], out: Path, start: Start, signals: Signals
) -> Mapping[str, Encoded]:
    """The runs of one task that are left, one after the other, here. Returns the splits that are not trained on, encoded."""
    plan, task = planned.plan, planned.task
    if not seeds:
        return encode_others(task, plan.splits)
    prepared = prepare_task(task, plan, start)
    for split, part in {"train": prepared.train, **prepared.others}.items():
        if part.cut:
            meaning = plan.task.cut_words(task.length)
            log.info("%s: %s of %s %s rows %s", plan.name, f"{part.cut:,}", f"{len(part.rows):,}", split, meaning)
    for seed in seeds:
        folder = report.run_folder(out, plan.name, seed)
        result = run_one(plan, prepared, start, seed, folder, planned.fingerprint, signals)
        log.info(result_line(result))
        warn_of(result)
    return prepared.others


def result_line(result: Mapping[str, Any]) -> str:
    name, value = next(iter(result["scores"]["dev"].items()))
    return f"{result['task']} seed {result['seed']}: dev {name} {value:.4f} ({duration(result['seconds'])})"


def warn_of(result: Mapping[str, Any]) -> None:
    for text in result["alarms"]:
        log.warning("%s seed %d: %s", result["task"], result["seed"], text)
