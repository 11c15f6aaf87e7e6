"""From finished runs to results.md for people, results.json for programs, curves and submissions; and the check that all runs of
a folder have the same settings."""

import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load_file

from electra.base import config
from electra.base.config import Figure
from electra.base.errors import CorruptError, SettingsError, counted
from electra.base.files import (
    folder_problems,
    json_text,
    read_object,
    read_or_set_aside,
    set_aside_file,
    validation_text,
    write_atomically,
    write_json,
)
from electra.base.progress import Table, literal, visible
from electra.data.tables import TableWriter, column_of
from electra.finetuning import Mistake, Outputs, Rows, merit
from electra.finetuning.baselines import BASELINES, Scores, first_and_last, label_alarms, result_alarms
from electra.finetuning.folder import seed_folders
from electra.finetuning.plan import MethodSettings, PlannedTask, bound, describe_files, file_line, settings_class
from electra.finetuning.training import Encoded
from electra.train.log import plot_scores

log = logging.getLogger(__name__)
RESULT, ALL_RESULTS = "result.json", "results.json"
WRONG, MOST_WRONG = "wrong.jsonl", 1000
"""The dev rows that the ensemble got wrong, the surest first, for people to look at."""
SETTINGS = "settings.json"
MODEL_SHA256, TOGETHER, FILES = "model_sha256", "together.", "files."
AGAIN = "Restore it, or remove the folder to train that seed again"
SEARCHED = ("lr", "epochs", "layer_decay", "pooling")
GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
"""The eight tasks of the paper's mean, which leaves out WNLI."""


def run_folder(out: Path, name: str, seed: int) -> Path:
    return out / name / f"seed-{seed}"


def refuse_other_runs(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / SETTINGS
    if not path.is_file() or not list(folder.glob("seed-*")):
        return
    remedy = "restore it, or remove the folder to train again"
    stored = read_object(path, remedy)
    try:  # older settings lack newer keys
        for part, kind in (("method", MethodSettings), ("task", settings_class(stored["task"]["kind"]))):
            stored[part] = config.dump(config.validate(kind, stored[part]))
    except (KeyError, TypeError, SettingsError) as error:
        raise CorruptError(f"{path} is damaged ({error}): {remedy}.") from None
    if clauses := other_runs(folder.name, stored, settings):
        raise SettingsError(
            f"{folder} holds runs {', '.join(clauses)}. Train in the same way, or choose another out.", ("out",)
        )


def other_runs(name: str, stored: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """How the runs of a folder differ from these settings, as clauses that name models and files, not hashes; empty if they do not."""
    before, now = config.flatten(bound(stored)), config.flatten(bound(settings))
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    clauses = []
    if MODEL_SHA256 in keys:
        is_moved = stored.get("model") != settings["model"]
        clauses.append(f"of {'another model' if is_moved else 'other weights'} ({stored.get('model')})")
    if others := [key for key in keys if key.startswith(TOGETHER) and key != TOGETHER + name]:
        were = [key.removeprefix(TOGETHER) for key in before if key.startswith(TOGETHER) and key != TOGETHER + name]
        rows = "other rows of " * all(key in before and key in now for key in others)
        clauses.append(f"trained together with {rows}{', '.join(were)}" if were else "trained alone")
    for split in dict.fromkeys(key.split(".")[1] for key in keys if key.startswith(FILES)):
        clauses.append(f"with another file for {split} ({before.get(f'{FILES}{split}.file', 'none')})")
    told = [key for key in keys if key == MODEL_SHA256 or key.startswith((TOGETHER, FILES))]
    if rest := config.differences(bound(stored), bound(settings), told):
        lines = "; ".join(line.removeprefix("task.").removeprefix("method.") for line in rest)
        clauses.append(f"with other settings ({lines})")
    return clauses


# The outputs of a run, for the ensemble


def pack(outputs: Sequence[Outputs]) -> dict[str, np.ndarray]:
    """Concatenates the arrays of each output, which may differ in shape, and stores their shapes beside them."""
    packed = {}
    for name in outputs[0] if outputs else ():
        arrays = [np.asarray(output[name], np.float32) for output in outputs]
        packed[f"{name}.values"] = np.concatenate([array.ravel() for array in arrays])
        shapes = [array.shape for array in arrays]
        packed[f"{name}.shapes"] = np.array(shapes, np.int64).reshape(len(arrays), arrays[0].ndim)
    return packed


def unpack(packed: Mapping[str, np.ndarray]) -> list[Outputs]:
    outputs: list[Outputs] = []
    for name in (key.removesuffix(".values") for key in packed if key.endswith(".values")):
        shapes = packed[f"{name}.shapes"]
        ends = np.cumsum(shapes.prod(1))
        if (shapes < 0).any() or ends[-1] != len(packed[f"{name}.values"]):
            raise ValueError(f"the shapes of {name} are not those of its values")
        outputs = outputs or [{} for _ in shapes]
        for output, values, shape in zip(outputs, np.split(packed[f"{name}.values"], ends[:-1]), shapes, strict=True):
            output[name] = values.reshape(shape)
    return outputs


# Results


class StoredRun(BaseModel):
    """What a result.json must have."""

    scores: dict[str, dict[str, Figure]]
    seconds: Figure
    cut: dict[str, tuple[int, int]]
    curve: list[dict[str, Figure | None]]
    alarms: list[str] = []


class StoredFile(BaseModel):
    split: str
    file: str
    rows: int
    official: bool | None
    official_rows: int | None


class StoredClass(BaseModel):
    label: str
    precision: Figure
    recall: Figure
    f1: Figure
    rows: int


class StoredTrial(BaseModel):
    trial: int
    settings: dict[str, float | str]
    scores: list[Figure | None]


class StoredSearch(BaseModel):
    metric: str
    shares: list[Figure]
    trials: list[StoredTrial]


class StoredResult(BaseModel):
    """What a task's entry in a results.json must have."""

    metric: str
    runs: int
    median: Figure
    mean: Figure
    sd: Figure | None
    best: Figure
    best_seed: int
    ensemble: dict[str, Figure]
    scores: dict[str, dict[str, dict[str, Figure]]]
    files: list[StoredFile]
    notes: list[str]
    cut: dict[str, tuple[int, int]]
    cut_words: str
    baselines: Scores = {}
    labels: list[str] = []
    confusion: list[list[int]] = []
    per_class: list[StoredClass] = []
    alarms: list[str] = []
    search: StoredSearch | None = None

    @model_validator(mode="after")
    def parts_fit(self) -> "StoredResult":
        judged = [self.ensemble, *self.baselines.get("dev", {}).values()]
        fits = all(self.metric in scores for scores in judged) and all(self.scores.values())
        fits &= any(file.split == "dev" for file in self.files)
        fits &= not self.confusion or len(self.confusion) == len(self.labels)
        if self.search is not None:
            searched = [it.settings.keys() for it in self.search.trials]
            fits &= bool(searched) and all(it == searched[0] for it in searched)
        if not fits:
            raise ValueError("its parts are not of one result")
        return self


def read_result(folder: Path) -> dict[str, Any]:
    """The result.json of a finished run, checked."""
    content = read_object(folder / RESULT, AGAIN.lower())
    try:
        stored = StoredRun.model_validate(content)
    except ValidationError as error:
        raise CorruptError(f"{folder / RESULT} is damaged ({validation_text(error)}). {AGAIN}.") from None
    if not stored.scores.get("dev"):
        raise CorruptError(f"{folder / RESULT} has no scores of dev. {AGAIN}.")
    return content


def scored(run: Mapping[str, Any]) -> dict[str, list[str]]:
    """split -> the names of its metrics."""
    return {split: list(scores) for split, scores in run["scores"].items()}


def read_outputs(folder: Path, split: str, rows: int) -> list[Outputs]:
    path = folder / f"outputs-{split}.safetensors"
    try:
        outputs = unpack(load_file(path))
    except FileNotFoundError:
        raise CorruptError(f"{path} is missing. {AGAIN}.") from None
    except (SafetensorError, KeyError, ValueError, IndexError) as error:
        raise CorruptError(f"{path} cannot be read ({error}). {AGAIN}.") from None
    if len(outputs) != rows:
        raise CorruptError(f"{path} has outputs of {len(outputs)} rows, not {rows}. {AGAIN}.")
    return outputs


def task_result(out: Path, planned: PlannedTask, others: Mapping[str, Encoded], baselines: Scores) -> dict[str, Any]:
    """The results over all finished seeds of a task, with scores of each and of the ensemble; writes submissions and mistakes.
    `others` are the splits that were not trained on, dev first. `best` was chosen on the same dev set that it is a score of."""
    plan, task = planned.plan, planned.task
    folders = seed_folders(out / plan.name, RESULT)
    for folder in folders.values():
        if problems := [it for it in folder_problems(folder) if it.startswith((RESULT, "outputs-", "its manifest"))]:
            raise CorruptError(f"{folder}: {problems[0]}. {AGAIN}.")
    runs = {seed: read_result(folder) for seed, folder in folders.items()}
    seeds, first = list(runs), next(iter(runs.values()))
    for seed, run in runs.items():
        if scored(run) != scored(first):
            raise CorruptError(f"{folders[seed] / RESULT} has other scores than {folders[seeds[0]] / RESULT}. {AGAIN}.")
    scores: dict[str, dict[str, Any]] = {
        split: {f"seed {seed}": run["scores"][split] for seed, run in runs.items()} for split in first["scores"]
    }
    tables: dict[str, Any] = {}
    for split, part in others.items():
        outputs = [read_outputs(folder, split, len(part.examples)) for folder in folders.values()]
        predictions = task.ensemble(part.rows, part.examples, outputs)
        if split in scores:
            scores[split]["ensemble"] = task.scores(part.rows, predictions)
        if split == "dev":
            tables = task.tables(part.rows, predictions)
            task = task.fitted(scores["dev"]["ensemble"])
            predictions = task.ensemble(part.rows, part.examples, outputs)
            wrong = task.mistakes(part.rows, predictions)
            write_wrong(out / plan.name / WRONG, plan.task.input_columns, part.rows, wrong, plan.numbers.get("dev"))
        if split in plan.source.submission:
            path, content = out / "submission" / plan.source.submission[split], task.submission(part.rows, predictions)
            path.parent.mkdir(exist_ok=True)
            if isinstance(content, Mapping):
                write_json(path, content)
            else:
                with TableWriter(path) as writer:
                    writer.write(content, answers={"prediction"})
    headline = next(iter(first["scores"]["dev"]))
    values = [run["scores"]["dev"][headline] for run in runs.values()]
    best = max(range(len(values)), key=lambda place: merit(headline, values[place]))
    result = {
        "model": planned.start.path,
        "metric": headline,
        "runs": len(values),
        "median": statistics.median(values),
        "mean": statistics.fmean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "best": values[best],
        "best_seed": seeds[best],
        "ensemble": scores["dev"]["ensemble"],
        "scores": scores,
        "seconds": {seed: run["seconds"] for seed, run in runs.items()},
        "files": describe_files(plan),
        "notes": plan.notes,
        "cut": first["cut"],
        "cut_words": plan.task.cut_words(task.length),
        "cut_remedy": plan.task.cut_remedy,
        "baselines": baselines,
        **tables,
    }
    of_seeds = [f"seed {seed}: {text}" for seed, run in runs.items() for text in run.get("alarms", ())]
    ends = [first_and_last([loss for _, loss in run.get("losses", ())]) for run in runs.values()]
    losses = [statistics.median(it) for it in zip(*ends, strict=True)]
    alarms = result_alarms(result | {"losses": losses})
    return result | {"alarms": [*label_alarms(task, plan.splits), *of_seeds, *alarms]}


def write_wrong(
    path: Path, columns: Sequence[str], rows: Rows, mistakes: Sequence[Mistake], numbers: Sequence[int] | None
) -> None:
    """Writes the surest mistakes. `numbers` are the row numbers in the file, if the rows are only a part of it."""
    lines = []
    for it in sorted(mistakes, key=lambda it: -it.confidence)[:MOST_WRONG]:
        row = rows[it.row]
        texts = {name: row.get(column_of(name, row)) for name in columns}
        number = numbers[it.row] if numbers else it.row + 1
        lines.append({"row": number, "input": texts} | it._replace(row=number)._asdict())
    write_atomically(path, "".join(json_text(line) + "\n" for line in lines).encode())


def earlier_results(out: Path) -> dict[str, dict[str, Any]]:
    """The results of earlier commands, by task."""
    path = out / ALL_RESULTS
    content = read_or_set_aside(path) or {}
    tasks = content.get("tasks")
    described: dict[str, Any] = tasks if isinstance(tasks, dict) else {}
    if odd := [name for name, entry in described.items() if not is_result(entry)]:
        log.warning("%s: %s cannot be read. Kept as %s; a new one is written.", path, odd[0], set_aside_file(path).name)
    return {name: {"model": content.get("model", ""), **entry} for name, entry in described.items() if name not in odd}


def write_results(
    out: Path, model: str, results: Mapping[str, Mapping[str, Any]], earlier: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Writes the results of all finished runs of the folder: this command's tasks first, then those of `earlier` commands."""
    results = dict(results)
    for name in sorted({path.parents[1].name for path in out.glob(f"*/seed-*/{RESULT}")} - results.keys()):
        if name in earlier:
            results[name] = earlier[name]
        else:
            log.info("%s: its finished runs are not in the results yet. Run its command again until it finishes.", name)
    for name, result in results.items():
        plot_task(out / name, result)
    whole = {"model": model, "tasks": results, "glue": glue_mean(results)}
    write_atomically(out / "results.md", visible(results_page(whole)).encode())
    write_json(out / ALL_RESULTS, whole)
    return whole


def baselines_of(result: Mapping[str, Any], split: str = "dev") -> dict[str, dict[str, float]]:
    """The baselines' scores by name; empty for results that are older than baselines."""
    by_name: dict[str, dict[str, float]] = result.get("baselines", {}).get(split, {})
    return by_name


def plot_task(folder: Path, result: Mapping[str, Any]) -> None:
    """The dev score and the loss of every seed against the steps, with the baselines as levels."""
    metric = result["metric"]
    runs = {seed: read_result(it) for seed, it in seed_folders(folder, RESULT).items()}
    curves = {f"seed {seed}": run["curve"] for seed, run in runs.items()}
    levels = {name: scores[metric] for name, scores in baselines_of(result).items()}
    losses = {f"seed {seed}": run.get("losses", []) for seed, run in runs.items()}
    plot_scores(curves, levels, losses, metric, folder / "curves.png")


def is_result(entry: object) -> bool:
    """Whether an entry of results.json has everything that results.md needs."""
    try:
        StoredResult.model_validate(entry)
    except ValidationError:
        return False
    return True


def glue_mean(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The mean of the medians over the eight tasks, if all are there, which sets were not the official ones, and which tasks started
    from another model than most (`start=mnli`, or an earlier command)."""
    if not set(GLUE) <= results.keys():
        return None
    models = {name: str(results[name]["model"]) for name in GLUE}
    ((most, _),) = Counter(models.values()).most_common(1)
    others = [f"{name} started from {model}" for name, model in models.items() if model != most]
    wrong = [f"{name} {entry['split']} ({entry['file']})" for name in GLUE for entry in unofficial(results[name])]
    mean = statistics.fmean(results[name]["median"] for name in GLUE)
    return {"mean": mean, "not_official": wrong, "mixed": [*others, f"the others from {most}"] if others else []}


def unofficial(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in result["files"] if entry["official"] is False]


# results.md


def results_page(whole: Mapping[str, Any]) -> str:
    model, results, glue = whole["model"], whole["tasks"], whole["glue"]
    paragraphs = [f"# Fine-tuning {literal(model)}", summary_table(results).markdown(), *baseline_lines(results)]
    if any(map(unofficial, results.values())):
        paragraphs.append("\\* not the official files: see below which and how many rows.")
    if glue:
        paragraphs.append(f"GLUE mean of the eight medians (without WNLI): **{100 * glue['mean']:.2f}**")
        if glue["mixed"]:
            paragraphs.append(f"The mean is not of one model: {literal(', '.join(glue['mixed']))}.")
        if glue["not_official"]:
            paragraphs.append(f"Not comparable with published means: {'; '.join(glue['not_official'])}.")
    for name, result in results.items():
        alarms = [f"- **WARNING**: {literal(text)}" for text in result.get("alarms", ())]
        lines = [f"started from {result['model']}"] if result["model"] != model else []
        lines += [*map(file_line, result["files"]), *result["notes"]]
        for split, (count, of) in result["cut"].items():
            lines += [f"{split}: {count:,} of {of:,} rows {result['cut_words']}"] if count else []
        paragraphs += [f"## {name}", "\n".join([*alarms, *(f"- {literal(line)}" for line in lines)])]
        if "search" in result:
            table = search_table(result["search"])
            paragraphs += [f"{table.title}:", table.markdown()]
        for split, by_seed in result["scores"].items():  # every metric of every seed and of the ensemble
            listed = {**by_seed, **baselines_of(result, split)}
            rows = [[name, *map(shown, scores.values())] for name, scores in listed.items()]
            paragraphs.append(Table([split, *next(iter(by_seed.values()))], rows).markdown())
        if result.get("confusion"):
            pairs = zip(result["labels"], result["confusion"], strict=True)
            rows = [[f"**{literal(label)}**", *(f"{count:,}" for count in counts)] for label, counts in pairs]
            paragraphs.append("Rows are the true classes, columns the answers of the ensemble:")
            paragraphs.append(Table(["", *map(literal, result["labels"])], rows).markdown())
        if result.get("per_class"):
            keys = ("precision", "recall", "f1")
            rows = [
                [literal(it["label"]), *(shown(it[key]) for key in keys), f"{it['rows']:,}"]
                for it in result["per_class"]
            ]
            paragraphs.append(Table(["class", "precision", "recall", "F1", "rows"], rows).markdown())
        paragraphs.append(f"![dev score against steps]({name}/curves.png)")
    return "\n\n".join(paragraph.strip() for paragraph in paragraphs) + "\n"


def search_table(found: Mapping[str, Any]) -> Table:
    """All trials of a `Search`, given as in results.json."""
    trials = found["trials"]
    keys = [key for key in SEARCHED if key in trials[0]["settings"]]
    rounds = [f"{share:.0%}" for share in found["shares"]][: max(len(it["scores"]) for it in trials)]
    rows = []
    for it in trials:
        cells = [f"{it['settings'][key]:g}" if key != "pooling" else it["settings"][key] for key in keys]
        scores = [shown(score) for score in it["scores"]]
        rows.append([str(it["trial"]), *cells, *scores, *[""] * (len(rounds) - len(scores))])
    title = (
        f"search, dev {found['metric']} after a share of the epochs (trial 1: the default; the first line was chosen)"
    )
    return Table(["trial", *keys, *rounds], rows, title)


def summary_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    names = baseline_names(results)
    header = ["task", "metric", "median", "mean", "sd", "best (chosen on dev)", "ensemble", *names, "runs", "dev"]
    rows = []
    for name, result in results.items():
        dev = next(entry for entry in result["files"] if entry["split"] == "dev")
        cells = [name + "*" * bool(unofficial(result)), result["metric"]]
        cells += [shown(result[key]) for key in ("median", "mean", "sd")]
        cells += [f"{shown(result['best'])} (seed {result['best_seed']})", shown(result["ensemble"][result["metric"]])]
        cells += [baseline_cell(result, baseline) for baseline in names]
        rows.append([*cells, str(result["runs"]), f"{dev['file']} ({counted(dev['rows'], 'row')})"])
    return Table(header, rows)


def baseline_names(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The baselines that at least one task has."""
    return [name for name in BASELINES if any(name in baselines_of(result) for result in results.values())]


def baseline_cell(result: Mapping[str, Any], name: str) -> str:
    return shown(baselines_of(result).get(name, {}).get(result["metric"]))


def baseline_lines(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the baselines' names mean, one line each."""
    return [f"{name}: {BASELINES[name]}" for name in baseline_names(results)]


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
