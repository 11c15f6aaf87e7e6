"""Folders of fine-tuned models: transformers' format plus task.json, which has everything needed to predict. They are written
and checked like exports of pre-training (interop.write).

Classifiers that somebody else fine-tuned with transformers (ELECTRA and ModernBERT with a head for rows, tokens or answers) are read
too: what task.json says about ours (labels and their order, kind of problem, pooling) is taken from config.json."""

import json
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra.base import config
from electra.base.errors import CorruptError, DataError, SettingsError, counted
from electra.base.files import read_object
from electra.base.progress import Table, duration, literal
from electra.data.tokenizer import tokenizer_hash
from electra.finetuning import Task, TaskSettings
from electra.finetuning.classification import PROBLEM_TYPES, ClassificationSettings
from electra.finetuning.plan import MethodSettings, Plan, PlannedTask, describe_files, file_line, settings_class
from electra.finetuning.questions import SpanSettings
from electra.finetuning.tagging import GUESSED, TaggingSettings, fits
from electra.finetuning.training import Finetuned
from electra.interop.card import LIMITS, PIPELINES, Card, facts, usage
from electra.interop.formats import FORMATS, head_tensors, task_class
from electra.interop.read import Pretrained, Stored, read_folder, says_discriminator
from electra.interop.write import PLAIN, Folder, Manner, answers_of, whole_or_absent
from electra.model import EncoderSettings, readable_length
from electra.pretraining.card import hardware

TASK_FILE = "task.json"
LONGEST_ROW = 512
"""Tokens per row of a classifier made with transformers, unless its tokenizer's settings say fewer. More rarely help and cost memory."""
CLASSES = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_SEED = re.compile(r"seed-(0|[1-9]\d{0,9})", re.ASCII)


@dataclass(frozen=True)
class TaskModel:
    """A fine-tuned network with its task and method; `note` is what else task.json says about it."""

    model: Finetuned
    task: Task
    method: MethodSettings
    note: Mapping[str, Any]
    length: int | None = None
    """How many positions pre-training trained."""

    @property
    def pretrained(self) -> Pretrained:
        """The encoder without the head."""
        return Pretrained(self.model.encoder, None, "encoder", self.task.tokenizer, length=self.length)


def architecture(settings: EncoderSettings, task: Task) -> str:
    """The transformers class that reads the encoder with the task's head, or "" if there is none."""
    return task_class(settings, task.architecture, task.pooling)


def task_folder(trained: TaskModel, files: Mapping[str, bytes]) -> Folder:
    """The folder to write: what transformers reads, task.json, and `files`."""
    encoder, task = trained.model.encoder, trained.task
    name = architecture(encoder.settings, task)
    described = {"format": 1, "architecture": name, "length": task.length, "task": config.dump(task.settings)}
    described |= {"method": config.dump(trained.method), **trained.note}
    text = json.dumps(described, indent=1, ensure_ascii=False) + "\n"
    parts = encoder, trained.model.head, name, task.tokenizer, task.config_entries()
    return Folder(*parts, {**files, TASK_FILE: text.encode()}, trained.length, task.pooling)


def write_task_folder(out: Path, trained: TaskModel, files: Mapping[str, bytes], manner: Manner = PLAIN) -> str:
    """Writes the folder and returns a sentence that says which libraries read it back, and what they found."""
    folder = task_folder(trained, files)
    with whole_or_absent(out) as temporary:
        ours = answers_of(trained.model)
        readers = folder.write(temporary, ours, lambda path: answers_of(load_task_folder(path).model), manner)
    if not folder.architecture:
        return f"transformers has no such head; its AutoModel reads the encoder, electra reads all (read back by {readers})"
    return f"same ids and same logits as ours, read back by {readers}"


def seed_folders(folder: Path, holding: str = TASK_FILE) -> dict[int, Path]:
    """The finished runs of a task, in order of their seeds. Folders with other names, such as copies, are ignored."""
    matches = ((_SEED.fullmatch(path.name), path) for path in folder.glob("seed-*"))
    folders = dict(sorted((int(match[1]), path) for match, path in matches if match))
    if odd := next((path for path in folders.values() if not (path / holding).exists()), None):
        raise CorruptError(f"{odd / holding} is missing. Restore it, or remove the folder.")
    return folders


def refuse_unlike(models: Mapping[Path, TaskModel]) -> None:
    """Refuses seeds whose outputs cannot be averaged, because their labels or tokens differ."""

    def described(it: TaskModel) -> tuple[object, ...]:
        return it.task.settings.kind, it.task.config_entries(), it.task.length, tokenizer_hash(it.task.tokenizer)

    first, *others = models
    for folder in others:
        pairs = zip(
            ("kind", "labels", "length", "tokenizer"), described(models[first]), described(models[folder]), strict=True
        )
        if unlike := [name for name, one, other in pairs if one != other]:
            raise CorruptError(
                f"{folder} is not of the same task as {first} ({', '.join(unlike)}). Remove one of them."
            )


def load_task_folder(folder: Path) -> TaskModel:
    if not (folder / TASK_FILE).is_file():
        if inside := min((it.parent.parent for it in folder.glob(f"*/seed-*/{TASK_FILE}")), default=None):
            raise DataError(f"{folder} holds fine-tuned models. Give a model inside it, such as {inside}.")
        what = f"is not a fine-tuned model of ours: it has no {TASK_FILE}" if folder.exists() else "does not exist"
        raise DataError(f'{folder} {what}. "electra finetune" writes such folders.')
    stored = read_folder(folder)
    described = read_object(folder / TASK_FILE)
    try:
        settings = config.validate(settings_class(described["task"]["kind"]), described["task"])
        # wherever it was trained, any machine may use it
        method = config.validate(MethodSettings, described["method"] | {"device": "auto"})
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{folder / TASK_FILE} cannot be used: {str(error).splitlines()[0]}.") from None
    # folders without a length were written before rotary encoders could read beyond their `positions`
    length = described.get("length", min(settings.length, stored.settings.positions))
    if not isinstance(length, int) or not 8 <= length <= max(settings.length, stored.settings.positions):
        raise CorruptError(f"{folder / TASK_FILE}: length is {length!r}, more than the task or the network has.")
    task = settings.build(stored.tokenizer, length, {})
    labels, named = task.config_entries().get("id2label"), stored.config.get("id2label")
    if labels and named != labels:
        raise CorruptError(f"{folder / 'config.json'}: its labels (id2label) are not those of {TASK_FILE}.")
    return stored_model(stored, TASK_FILE, task, method, described)


def stored_model(
    stored: Stored, described_by: str, task: Task, method: MethodSettings, note: Mapping[str, Any]
) -> TaskModel:
    head = task.head(stored.settings)
    encoder = stored.build(head, architecture(stored.settings, task), described_by)
    return TaskModel(Finetuned(encoder, head).eval(), task, method, note, stored.length)


# Classifiers that somebody else fine-tuned with transformers


def is_classifier(folder: Path) -> bool:
    """Whether config.json names a class with a head for labels or answers. A ModernBERT discriminator names one too."""
    path = folder / "config.json"
    return path.is_file() and class_name(read_object(path)).endswith(CLASSES)


def class_name(content: Mapping[str, Any]) -> str:
    named = content.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def adopt_classifier(folder: Path, columns: Mapping[str, Any]) -> TaskModel:
    """Reads a classifier made with transformers. Only `columns` can say how many texts a row has: one, unless two are named."""
    stored = read_folder(folder)
    name = class_name(stored.config)
    suffix = name.removeprefix(FORMATS[stored.settings.kind].family)
    if suffix not in CLASSES or (FORMATS[stored.settings.kind].discriminator == name and says_discriminator(stored)):
        listed = ", ".join(f"{FORMATS[stored.settings.kind].family}{it}" for it in CLASSES)
        raise DataError(
            f"{folder} holds no fine-tuned model: neither task.json, which electra finetune writes, nor one of {listed} "
            f"(its config.json says {name or 'nothing'})."
        )
    length = readable_length(stored.settings, longest(folder))
    tree = {"length": length, **adopted_settings(stored, name, suffix, columns)}
    if suffix == "ForQuestionAnswering":
        tree["max_query_length"] = min(64, length // 4)
    kinds: dict[str, type[TaskSettings]] = dict(
        zip(CLASSES, (ClassificationSettings, TaggingSettings, SpanSettings), strict=True)
    )
    try:
        settings = config.validate(kinds[suffix], tree)
    except SettingsError as error:
        raise DataError(f"{folder / 'config.json'}: its labels cannot be used ({error}).") from None
    task = settings.build(stored.tokenizer, settings.length, {})
    return stored_model(stored, "its config.json", task, MethodSettings(), {"model": str(folder)})


def longest(folder: Path) -> int:
    path = folder / "tokenizer_config.json"
    limit = read_object(path).get("model_max_length") if path.is_file() else None
    return min(LONGEST_ROW, limit) if isinstance(limit, int) and limit >= 8 else LONGEST_ROW


def adopted_settings(stored: Stored, name: str, suffix: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    if suffix == "ForQuestionAnswering":
        return {}
    outputs = len(head_tensors(stored.tensors, name).get("label.output.weight", ()))
    labels = labels_of(stored.config, outputs)
    if suffix == "ForTokenClassification":
        scheme = next((it for it in GUESSED if all(fits(label, it) for label in labels)), "none")
        return {"labels": labels, "scheme": scheme}
    kind = {theirs: ours for ours, theirs in PROBLEM_TYPES.items()}.get(str(stored.config.get("problem_type")))
    kind = kind or ("regression" if outputs == 1 else "classification")
    pooling = stored.config.get("classifier_pooling", "cls") if stored.settings.kind == "modernbert" else "cls"
    return {
        "kind": kind,
        "text": columns.get("text", ("text",)),
        "labels": () if kind == "regression" else labels,
        "pooling": pooling,
    }


def labels_of(content: Mapping[str, Any], outputs: int) -> tuple[str, ...]:
    """The labels in the order of the outputs. transformers writes none if they are its default, LABEL_0 and LABEL_1."""
    named = content.get("id2label")
    if not isinstance(named, dict):
        return tuple(f"LABEL_{number}" for number in range(outputs))
    if set(named) != {str(number) for number in range(outputs)}:
        raise DataError(f"config.json names {len(named)} labels (id2label), the head has {outputs} outputs.")
    return tuple(str(named[str(number)]) for number in range(outputs))


# Model cards: at first for one seed; once there are results, with the mean of all seeds and the baselines


def task_card(planned: PlannedTask, run: Mapping[str, Any], result: Mapping[str, Any] | None = None) -> str:
    """The model card of a seed. `run` is the content of its result.json, `result` the task's entry in results.json."""
    plan, task, encoder, seed = planned.plan, planned.task, planned.start.settings, run["seed"]
    name, kind = architecture(encoder, task), str(config.dump(plan.task)["kind"])
    use = usage(name) if name else usage("") + "\n\ntransformers has no class for this head; it reads the encoder."
    use += '\n\nWith the toolkit: `electra predict FOLDER "some text"`, or a table of many. `task.json` says what it expects.'
    labels = task.config_entries().get("id2label") or {}
    pipeline = PIPELINES.get(kind, "text-classification")
    data = [(split["split"], literal(file_line(split).partition(": ")[2])) for split in describe_files(plan)]
    data.append(("labels", literal(", ".join(map(str, labels.values())))))
    data.append(("sha256 of the train rows' file", str(run.get("train_sha256", ""))))
    limits = [LIMITS, f"- {dev_limit(plan)}", f"- {reading_limit(task)}"]
    match task.settings:
        case ClassificationSettings(kind="regression", scale=float(scale), offset=offset) if (scale, offset) != (1, 0):
            limits.append(
                f"- The network's output x means {scale:.6g} x + {offset:.6g}; `electra predict` answers with that."
            )
    about_training = [("steps", f"{run['steps']:,} of {plan.method.batch} rows")] if "steps" in run else []
    if isinstance(machine := run.get("machine"), dict):  # older runs do not have it
        about_training += hardware(machine, plan.method.device, run["seconds"], duration(run["seconds"]))
    sections = {"Data": facts(data), "Training": facts(about_training)} if about_training else {"Data": facts(data)}
    notes = "\n".join(f"- {literal(note)}" for note in plan.notes)
    sections |= {"Scores": f"{score_table(run, result or {})}\n{notes}", "Limits": "\n".join(limits)}
    results = [
        {
            "task": {"type": pipeline},
            "dataset": {"type": plan.name, "name": plan.name, "split": split},
            "metrics": [
                {"type": metric, "value": round(value, 6), "name": f"{metric}, seed {seed}"}
                for metric, value in metrics.items()
                if math.isfinite(value)
            ],
        }
        for split, metrics in run["scores"].items()
    ]
    title, settings = f"Fine-tuned on {plan.name}", config.to_toml(plan.method)
    about = f"One seed ({seed}) of {literal(kind)}, made with the `electra` toolkit from {literal(planned.start.path)}."
    tags = ("electra", encoder.kind, kind)
    return Card(title, about, use, tags, pipeline, sections, settings, results=results).text()


def dev_limit(plan: Plan) -> str:
    if not plan.shared_rows:
        return "Scores on dev are of rows that were not trained on."
    rows = counted(len(plan.splits["dev"]), "row")
    return f"{plan.shared_rows:,} of {rows} of dev are in train too, so scores on dev are too good."


def reading_limit(task: Task) -> str:
    match task.settings:
        case TaggingSettings():
            return f"Sentences beyond {task.length} tokens are read in parts."
        case SpanSettings():
            return f"Contexts are read in windows of {task.length} tokens, the question included."
        case ClassificationSettings(long="windows"):
            return f"Text beyond {task.length} tokens is read in windows, and their outputs are averaged."
    return f"Text beyond {task.length} tokens is cut."


def score_table(run: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """One row per split and metric: this seed, mean and standard deviation over all seeds, and the baselines."""
    count, baselines = result.get("runs", 1), result.get("baselines", {})
    columns, rows = ["split", "metric", f"seed {run['seed']}", *[f"mean of {count} seeds (± sd)"] * (count > 1)], []
    for split, metrics in run["scores"].items():
        for metric, value in metrics.items():
            row = [literal(split), literal(metric), f"{value:.4f}"]
            if count > 1:
                values = [its[metric] for name, its in result["scores"][split].items() if name != "ensemble"]
                row.append(f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}")
            for name in baselines.get("dev", {}):
                baseline = baselines.get(split, {}).get(name, {}).get(metric)
                row.append("" if baseline is None else f"{baseline:.4f}")
            rows.append(row)
    return Table([*columns, *(f"baseline: {name}" for name in baselines.get("dev", {}))], rows).markdown()
