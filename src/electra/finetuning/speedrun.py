"""A speed-run: what can be learned in a given number of minutes? Text to shards, pre-training until the time is up, fine-tuning
on GLUE over seeds, and a search for dev texts in the corpus; then a report.

    OUT/tokenizer, OUT/shards    if the data is text
    OUT/run, OUT/finetune        the pre-training run, the fine-tuning runs
    OUT/timings.json             what each stage took, over all starts
    OUT/overlap.json             dev texts in the corpus
    OUT/speedrun.json            everything that was measured
    OUT/report.md, report.png    the same for people

Every stage keeps what is finished, so that the same call resumes after an interruption.
"""

import logging
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from tokenizers import Tokenizer

from electra.base import config
from electra.base.errors import DataError, SettingsError, counted
from electra.base.files import (
    lock,
    read_object,
    read_shaped_or_set_aside,
    refuse_other_kind,
    remove_leftovers,
    write_atomically,
    write_json,
)
from electra.base.progress import Table, duration, literal
from electra.data.corpus import Corpus
from electra.data.overlap import Overlap, find_overlap
from electra.data.prepare import prepare
from electra.data.shards import MANIFEST, TOKENIZER, read_manifest
from electra.data.tables import column_of
from electra.data.tokenizer import (
    TokenizerSettings,
    adopt_vocabulary,
    is_same_tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from electra.finetuning.plan import TASKS, Plan, make_plan, plain, refuse_errors
from electra.finetuning.report import GLUE, SETTINGS, read_result, run_folder
from electra.finetuning.run import finetune, refuse_tables
from electra.pretraining.run import environment, pretrain, refuse_alone
from electra.pretraining.settings import PretrainSettings, resolve
from electra.pretraining.trial import device_peak, paper_flops, step_flops
from electra.train.device import choose_device
from electra.train.log import RUN_STATE, Record, picture, plot_run, read_metrics
from electra.train.settings import ScheduleSettings

log = logging.getLogger(__name__)

RECIPE = "modern-small"
"""The default recipe."""
TIMED_WORDS = ("train.save_every=1000000000", "train.save_minutes=2")
FIVE = ("cola", "sst2", "mrpc", "stsb", "rte")
"""The tasks of `glue5_median`: small sets that are complete wherever GLUE is."""
TITLES = {
    "cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "rte": "RTE", "mnli": "MNLI", "qnli": "QNLI",
    "qqp": "QQP", "wnli": "WNLI",
}  # fmt: skip
FULLY_TRAINED = {
    "cola": 56.8, "sst2": 88.3, "mrpc": 87.4, "stsb": 86.8, "rte": 68.5, "mnli": 78.9, "qnli": 87.9, "qqp": 88.3,
}  # fmt: skip
"""Dev scores of ELECTRA-Small on OpenWebText, a million steps, in the README of the original code."""
FULLY_TRAINED_FIVE = 77.6
TOKENS, V100_HOURS = 128 * 128 * 1_000_000, 96
CURVE = {0.0625: (74.1, 8.9e16), 0.125: (76.0, 1.8e17), 0.25: (77.7, 3.6e17), 0.5: (79.0, 7.1e17), 1.0: (79.9, 1.4e18)}
"""The paper's table 1: mean of eight tasks, dev, and FLOPs of ELECTRA-Small after a fraction of its training."""


@dataclass(frozen=True)
class SpeedrunSettings:
    """`data`: text, or shards made by "electra prepare". `glue`: a folder with a folder for each task. `words`: overrides of the
    recipe; `method`: settings of fine-tuning, the same for all tasks. `tokenizer`: a tokenizer.json or a vocab.txt; without
    one it is trained on the text. `tasks`: empty for all tasks of the paper's mean that are in `glue`."""

    data: Path
    glue: Path
    out: Path = Path("runs/speedrun")
    recipe: str = RECIPE
    words: Sequence[str] = ()
    minutes: float = 10.0
    seeds: int = 5
    jobs: int = 1
    tasks: Sequence[str] = ()
    tokenizer: Path | None = None
    method: Mapping[str, Any] = field(default_factory=dict)

    def pretraining(self, data: Path) -> PretrainSettings:
        """The settings of pre-training. Warm-up is the same fraction of the steps as in the recipe, unless `words` set it."""
        given = [*self.words, f"data={config.toml_value(str(data))}", f"train.minutes={self.minutes}"]
        timed = [word for word in TIMED_WORDS if word.partition("=")[0] not in config.parse_overrides(given)]
        settings, sources = resolve(self.recipe, [*timed, f"run={config.toml_value(str(self.out / 'run'))}", *given])
        warmup, steps = settings.schedule.warmup, settings.train.steps
        if warmup >= 1 and sources["schedule.warmup"] != "command line":
            share = ScheduleSettings(**config.dump(settings.schedule) | {"warmup": min(0.5, warmup / steps)})
            settings = settings.model_copy(update={"schedule": share})
        return settings

    def finetuning(self) -> dict[str, Any]:
        return {"evaluations": 1, **self.method, "data": str(self.glue)}


def speedrun(settings: SpeedrunSettings, command: str = "") -> dict[str, Any]:
    """Runs all stages and returns the content of speedrun.json. `command` is the one that resumes after an interruption."""
    # refuse what cannot work before anything is computed
    if not 0 < settings.minutes < math.inf:
        raise SettingsError(f"minutes ({settings.minutes}) must be above 0.")
    refuse_other_kind(settings.out, "a speed-run")
    shards = settings.data if (settings.data / MANIFEST).is_file() else settings.out / "shards"
    if not settings.data.exists():
        raise DataError(f"{settings.data} does not exist. Give text, or a folder of token shards (data=…).")
    refuse_other_tokenizer(settings, shards)
    pretraining = settings.pretraining(shards)
    refuse_alone(pretraining.train)
    plans = plan_tasks(settings)

    with lock(settings.out):
        remove_leftovers(settings.out)
        timings = Timings(settings.out / "timings.json")
        with timings.stage("prepare"):
            if shards != settings.data:
                prepare_text(settings, shards)
        tokenizer = load_tokenizer(shards)
        refuse_tables([(it, it.task.build(tokenizer, it.task.length, it.splits)) for it in plans.values()])
        with timings.stage("pretrain"):
            heldout = pretrain(pretraining, command)
            plot_run(Path(pretraining.run), Path(pretraining.run) / "curves.png")
        with timings.stage("overlap"):
            overlap = check_overlap(settings, plans, shards)
        with timings.stage("finetune"):
            out = settings.out / "finetune"
            finetuned = finetune(
                Path(pretraining.run), list(plans), settings.finetuning(), out, settings.seeds, settings.jobs
            )
        fixed = read_object(out / next(iter(plans)) / SETTINGS)
        result = {
            **scores(settings, plans, finetuned["tasks"]),
            "method": fixed["method"] | {"pooling": fixed["task"]["pooling"]},
            **measurements(pretraining, heldout),
            "wall_clock": timings.split(Path(pretraining.run)),
            "overlap": overlap,
            "environment": environment(),
            "command": command,
        }
        write_json(settings.out / "speedrun.json", result)
        plot(settings.out / "report.png", result, read_metrics(Path(pretraining.run)))
        write_atomically(settings.out / "report.md", page(result).encode())
        return result


def plan_tasks(settings: SpeedrunSettings) -> dict[str, Plan]:
    """Plans the tasks that are asked for, by default all of the paper's mean that are in `glue`, and reads their files."""
    if not settings.glue.is_dir():
        raise DataError(f"{settings.glue} is not a folder. Give one with a folder for each GLUE task (glue=…).")
    folders = {plain(path.name) for path in settings.glue.iterdir() if path.is_dir()}
    if unknown := [name for name in settings.tasks if name not in config.recipe_names(TASKS)]:
        raise SettingsError(f"there is no task {unknown[0]!r}, only {', '.join(config.recipe_names(TASKS))}.")
    names = settings.tasks or [name for name in dict.fromkeys([*FIVE, *GLUE]) if name in folders]
    if not names:
        raise DataError(f"{settings.glue} has no folder of a GLUE task ({', '.join(FIVE)}, …).")
    plans = {name: make_plan(name, settings.finetuning(), {}) for name in names}
    for plan in plans.values():
        refuse_errors(plan)
    return plans


def refuse_other_tokenizer(settings: SpeedrunSettings, shards: Path) -> None:
    """Refuses a tokenizer other than the one that the tokens are made with."""
    if settings.tokenizer is None:
        return
    if shards == settings.data:
        raise SettingsError(
            f"{shards} are token shards, which have their tokenizer. Take tokenizer out, or give the text as data."
        )
    wanted, folder = read_vocabulary(settings.tokenizer), settings.out / "tokenizer"
    if (folder / TOKENIZER).is_file() and not is_same_tokenizer(wanted, load_tokenizer(folder)):
        raise SettingsError(
            f"{settings.out} was started with a tokenizer other than {settings.tokenizer}. Use another folder (out)."
        )


def read_vocabulary(path: Path) -> Tokenizer:
    return adopt_vocabulary(path) if path.suffix == ".txt" else load_tokenizer(path)


def prepare_text(settings: SpeedrunSettings, shards: Path) -> None:
    """Makes shards from text, after the tokenizer, which is trained on the same text unless one is given."""
    folder = settings.out / "tokenizer"
    if not (folder / TOKENIZER).is_file():
        if settings.tokenizer is None:
            tokenizer = train_tokenizer(Corpus([settings.data]), TokenizerSettings())
        else:
            tokenizer = read_vocabulary(settings.tokenizer)
        save_tokenizer(tokenizer, folder)
    prepare([settings.data], shards, folder)


def check_overlap(settings: SpeedrunSettings, plans: Mapping[str, Plan], shards: Path) -> dict[str, Any]:
    path = settings.out / "overlap.json"
    overlaps = read_shaped_or_set_aside(path, OVERLAPS) or {}
    if overlaps.keys() != plans.keys():
        texts = {name: [row_texts(plan, row) for row in plan.splits["dev"]] for name, plan in plans.items()}
        overlaps = find_overlap(texts, shards)
        write_json(path, {name: asdict(overlap) for name, overlap in overlaps.items()})
    return {name: asdict(overlap) for name, overlap in overlaps.items()}


def row_texts(plan: Plan, row: Mapping[str, Any]) -> list[str]:
    values = (row.get(column_of(name, row)) for name in plan.task.input_columns)
    return [value for value in values if isinstance(value, str)]


@dataclass
class Stage:
    seconds: float = 0.0
    finished: bool = False


OVERLAPS, STAGES = TypeAdapter(dict[str, Overlap]), TypeAdapter(dict[str, Stage])


class Timings:
    """The seconds of each stage, added up over all starts. A stage that was finished before is not counted again."""

    def __init__(self, path: Path):
        self.path = path
        self.stages = read_shaped_or_set_aside(path, STAGES) or {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        entry = self.stages.setdefault(name, Stage())
        began, counted = time.monotonic(), not entry.finished
        try:
            yield
            entry.finished = True
        finally:
            if counted:
                entry.seconds += time.monotonic() - began
                write_json(self.path, {name: asdict(stage) for name, stage in self.stages.items()})

    def split(self, run: Path) -> dict[str, float]:
        """The seconds of each part; "start" is what a pre-training run takes before its first step and for its export."""
        inside = {key: round(value, 2) for key, value in read_object(run / RUN_STATE)["seconds"].items()}
        seconds = {name: round(entry.seconds, 2) for name, entry in self.stages.items()}
        start = max(0.0, round(seconds.pop("pretrain") - sum(inside.values()), 2))
        prepared = {"prepare": seconds.pop("prepare"), "start": start}
        parts = {**prepared, **inside, **seconds}
        return parts | {"total": round(sum(parts.values()), 2)}


def scores(
    settings: SpeedrunSettings, plans: Mapping[str, Plan], tasks: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The scores times a hundred, as papers print them."""
    results = {}
    for name in plans:
        result = tasks[name]
        by_seed = [100 * result["scores"]["dev"][f"seed {seed}"][result["metric"]] for seed in range(settings.seeds)]
        spread = {"least": min(by_seed), "greatest": max(by_seed)}
        spread |= {"sd": statistics.stdev(by_seed)} if len(by_seed) > 1 else {}
        middle = {"metric": result["metric"], "median": statistics.median(by_seed)}
        steps = read_result(run_folder(settings.out / "finetune", name, 0))["steps"]  # min_steps repeats small tables
        rest = {"seeds": by_seed, "files": result["files"], "steps": steps}
        results[name] = {**middle, **spread, **rest}
    five = [results[name]["median"] for name in FIVE if name in results]
    mean = statistics.fmean(five) if len(five) == len(FIVE) else None
    return {"glue5_median": mean, "minutes": settings.minutes, "seeds": settings.seeds, "tasks": results}


def measurements(settings: PretrainSettings, heldout: Mapping[str, float]) -> dict[str, Any]:
    """What was measured in the pre-training run."""
    run, train = Path(settings.run), settings.train
    state, vocab_size = read_object(run / RUN_STATE), read_manifest(Path(settings.data)).vocab_size
    steps, seconds = state["step"], state["seconds"]["train"]
    done = settings.model_copy(update={"train": train.model_copy(update={"steps": steps})})
    flops = steps * step_flops(settings, vocab_size)
    peak = device_peak(choose_device(train))
    return {
        "tokens": state["tokens"],
        "steps": steps,
        "tokens_per_second": state["tokens"] / seconds,
        "mfu": flops / seconds / peak if peak else None,
        "flops": flops,
        "paper_flops": paper_flops(done, vocab_size),
        "heldout": {key: value for key, value in heldout.items() if key not in ("kind", "step")},
        "alarms": [record["text"] for record in read_metrics(run, "alarm")],
        "pretraining_seed": settings.seed,
        "pretraining": config.dump(settings),
    }


# speedrun.json for people, beside what the paper and its code report of ELECTRA-Small


def page(result: Mapping[str, Any]) -> str:
    five, device = result["glue5_median"], result["environment"]["gpu"] or f"{result['environment']['cpu_count']} cores"
    headline = f"**{five:.1f}**" if five is not None else "not known, since tasks are missing"
    keys = (
        "optimizer",
        "lr",
        "layer_decay",
        "schedule",
        "warmup",
        "batch",
        "dropout",
        "pooling",
        "bias_correction",
        "keep",
    )
    method = ", ".join(f"{key} {result['method'][key]}" for key in keys)
    weights = "those of the last step of each run; nothing was selected on dev"
    if result["method"]["keep"] == "best" or result["method"]["patience"]:
        weights = "chosen on dev, so scores are optimistic"
    paragraphs = [
        f"# {result['minutes']:g} minutes on {device}",
        f"Mean of CoLA, SST-2, MRPC, STS-B and RTE, dev, median of {result['seeds']} fine-tuning seeds: {headline}.",
        "![scores beside the fully trained original; losses over time](report.png)",
        "## Scores",
        tasks_table(result).markdown(),
        f"\\* not the official files: their sizes are below. `±` is the standard deviation over seeds. Weights are {weights}. "
        f"One method for all tasks: {method}.",
        "\n".join(f"- {line}" for line in file_lines(result)),
        "## Beside ELECTRA-Small",
        beside_table(result).markdown(),
        "`five` is the mean of CoLA, SST-2, MRPC, STS-B and RTE, `eight` that of all GLUE tasks but WNLI; the original's five are "
        "those of its released code. \\* with files that are not the official ones, so not to be held against the paper's. FLOPs are "
        "counted as the paper counts.",
        "## Pre-training",
        run_table(result).markdown(),
        *(f"Alarm: {text}" for text in result["alarms"]),
        "## Wall-clock",
        clock_table(result["wall_clock"]).markdown(),
        f"The budget of {result['minutes']:g} minutes is for `train` alone.",
        "## Dev texts in the corpus",
        overlap_table(result["overlap"]).markdown(),
        "Rows whose text (either of two) shares an n-gram of words with the training split: 13 words for texts of at least 13, 8 for "
        "texts of 8 to 12; shorter texts are not judged. `whole text`: every n-gram of a text is in the corpus.",
        *(
            f"- {TITLES.get(name, name)}: “{literal(it['examples'][0])}”"
            for name, it in result["overlap"].items()
            if it["examples"]
        ),
    ]
    return "\n\n".join(paragraph.strip() for paragraph in paragraphs) + "\n"


def tasks_table(result: Mapping[str, Any]) -> Table:
    rows = []
    for name, task in result["tasks"].items():
        spread = f"{task['least']:.1f} – {task['greatest']:.1f}" + (f" (± {task['sd']:.1f})" if "sd" in task else "")
        original = f"{FULLY_TRAINED[name]:.1f}" if name in FULLY_TRAINED else "–"
        title = TITLES.get(name, name) + "*" * has_other_files(task)
        rows.append((title, task["metric"], f"{task['median']:.1f}", spread, original))
    if result["glue5_median"] is not None:
        rows.append(("mean of the five", "", f"{result['glue5_median']:.1f}", "", f"{FULLY_TRAINED_FIVE}"))
    return Table(("task", "metric", "median", "spread", "ELECTRA-Small, 100 %"), rows)


def file_lines(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, task in result["tasks"].items():
        parts = [
            f"{it['split']} {counted(it['rows'], 'row')}" for it in task["files"] if it["split"] in ("train", "dev")
        ]
        seeds = " ".join(f"{value:.1f}" for value in task["seeds"])
        lines.append(f"{TITLES.get(name, name)}: {', '.join(parts)}, {counted(task['steps'], 'step')}, seeds: {seeds}")
    return lines


def eight_cell(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """The mean that the paper prints, if all of its tasks were scored; with a star if a file is not the official one."""
    if not set(GLUE) <= tasks.keys():
        return "–"
    mean = statistics.fmean(tasks[name]["median"] for name in GLUE)
    return f"{mean:.1f}" + "*" * any(has_other_files(tasks[name]) for name in GLUE)


def has_other_files(task: Mapping[str, Any]) -> bool:
    """Whether train or dev has another size than the official split: a part of it, or made again."""
    return any(entry["official"] is False for entry in task["files"] if entry["split"] in ("train", "dev"))


def beside_table(result: Mapping[str, Any]) -> Table:
    five = "–" if result["glue5_median"] is None else f"{result['glue5_median']:.1f}"
    cost = f"{result['minutes']:g} min", f"{result['tokens'] / 1e6:,.0f} M", f"{result['paper_flops']:.2g}"
    rows = [("this run", *cost, five, eight_cell(result["tasks"]))]
    for share, (mean, operations) in CURVE.items():
        hours, tokens = f"{share * V100_HOURS:g} h, V100", f"{share * TOKENS / 1e6:,.0f} M"
        full = f"{FULLY_TRAINED_FIVE}" if share == 1 else "–"
        rows.append((f"ELECTRA-Small, {100 * share:g} %", hours, tokens, f"{operations:.2g}", full, f"{mean:.1f}"))
    return Table(("", "training", "tokens", "FLOPs", "five", "eight"), rows)


def run_table(result: Mapping[str, Any]) -> Table:
    heldout = result["heldout"]
    rows = [
        ("steps", f"{result['steps']:,}"),
        ("tokens", f"{result['tokens']:,}"),
        ("tokens per second", f"{result['tokens_per_second']:,.0f}"),
        ("MFU (of the nominal bfloat16 peak)", "–" if result["mfu"] is None else f"{result['mfu']:.1%}"),
        ("FLOPs, matrix products", f"{result['flops']:.3g}"),
        ("FLOPs as the paper counts", f"{result['paper_flops']:.3g}"),
        *((f"held-out {key}", f"{heldout[key]:.4f}") for key in ("mlm_loss", "rtd_loss", "auc") if key in heldout),
        ("seed", str(result["pretraining_seed"])),
    ]
    return Table(("", "pre-training"), rows)


def clock_table(seconds: Mapping[str, float]) -> Table:
    meanings = {
        "prepare": "tokenizer and shards",
        "start": "data, network, export",
        "compile": "compiling and capturing the step",
        "train": "pre-training",
        "evaluate": "held-out metrics",
        "save": "checkpoints",
        "overlap": "dev texts in the corpus",
        "finetune": "fine-tuning, all tasks and seeds",
        "total": "",
    }
    rows = [(name, meanings[name], f"{seconds[name]:,.1f} s", duration(seconds[name])) for name in meanings]
    return Table(("stage", "", "seconds", "time"), rows)


def overlap_table(overlap: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for name, it in overlap.items():
        shares = (f"{it[key]:,} ({it[key] / max(1, it['rows']):.1%})" for key in ("with_ngram", "whole_text"))
        rows.append((TITLES.get(name, name), f"{it['rows']:,}", f"{it['rows'] - it['checked']:,}", *shares))
    return Table(("task", "dev rows", "too short", "with an n-gram in the corpus", "whole text"), rows)


def plot(out: Path, result: Mapping[str, Any], records: Sequence[Record]) -> None:
    five = result["glue5_median"]
    title = f"{result['minutes']:g} minutes, {result['tokens'] / 1e6:,.0f} M tokens"
    title += "" if five is None else f", mean of five {five:.1f} (fully trained: {FULLY_TRAINED_FIVE})"
    with picture(out, title, [range(3)], (16, 4.6), width_ratios=(1.4, 1, 1)) as (scores, losses, detection):
        draw_scores(scores, result["tasks"])
        curves = {kind: [it for it in records if it["kind"] == kind] for kind in ("train", "heldout")}
        minutes = {it["step"]: it["training_seconds"] / 60 for it in curves["train"]}
        for axis, key, label in (
            (losses, "mlm_loss", "generator's loss (MLM)"),
            (detection, "auc", "discriminator's AUC"),
        ):
            for kind, style in (
                ("train", {"linewidth": 1, "alpha": 0.6}),
                ("heldout", {"marker": "o", "markersize": 3}),
            ):
                points = [
                    (minutes[it["step"]], it[key]) for it in curves[kind] if it["step"] in minutes and it.get(key)
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), label=kind.replace("heldout", "held-out"), **style)
            axis.set(xlabel="minutes of training", ylabel=label)
            axis.legend(fontsize=8)


def draw_scores(axis: Any, tasks: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws the dev scores beside those of the fully trained original."""
    for place, (name, task) in enumerate(tasks.items()):
        axis.bar(place, task["median"], 0.6, color="tab:blue", alpha=0.6, label="median" if not place else None)
        dots = [place] * len(task["seeds"]), task["seeds"]
        axis.plot(*dots, "o", color="black", markersize=3, label="seeds" if not place else None)
        if name in FULLY_TRAINED:
            there = [place - 0.38, place + 0.38], [FULLY_TRAINED[name]] * 2
            label = "ELECTRA-Small, 4 days on a V100" if not place else None
            axis.plot(*there, color="tab:red", linewidth=2, label=label)
    axis.set_xticks(range(len(tasks)), [TITLES.get(name, name) for name in tasks])
    axis.set(ylim=(0, 119), ylabel="dev score")
    axis.legend(fontsize=8, loc="upper center", ncols=3)
