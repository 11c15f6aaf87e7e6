"""A speed-run: what can be learned in so many minutes? Text to shards, pre-training until the time is over, fine-tuning on GLUE over
seeds, and a look for dev texts in the corpus; then a report (`speedrun_report.py`).

    OUT/tokenizer, OUT/shards    where the data is text
    OUT/run, OUT/finetune        the pre-training run, the fine-tuning runs
    OUT/timings.json             what each stage took, over all starts
    OUT/overlap.json             dev texts in the corpus
    OUT/speedrun.json            everything that was measured
    OUT/report.md, report.png    the same for people

Every stage keeps what is finished, so that the same call goes on after an interruption.
"""

import gc
import logging
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from electra.base import config
from electra.base.errors import DataError, SettingsError
from electra.base.files import lock, read_object, read_or_set_aside, remove_leftovers, write_json
from electra.data.corpus import Corpus
from electra.data.overlap import find_overlap
from electra.data.prepare import prepare
from electra.data.shards import MANIFEST, read_manifest
from electra.data.tables import column_of
from electra.data.tokenizer import TokenizerSettings, adopt_vocabulary, load_tokenizer, save_tokenizer, train_tokenizer
from electra.finetuning.plan import TASKS, Plan, make_plan, plain
from electra.finetuning.report import GLUE, SETTINGS
from electra.finetuning.run import finetune
from electra.finetuning.speedrun_report import write_report
from electra.pretraining.run import environment, pretrain
from electra.pretraining.settings import PretrainSettings, resolve
from electra.pretraining.trial import count_flops, device_peak, paper_flops
from electra.train.device import choose_device
from electra.train.log import RUN_STATE, plot_run, read_metrics
from electra.train.settings import ScheduleSettings

log = logging.getLogger(__name__)

RECIPE = "modern-small"
"""What is trained where nobody names a recipe."""
TIMED_WORDS = ("train.save_every=1000000000", "train.save_minutes=2")
FIVE = ("cola", "sst2", "mrpc", "stsb", "rte")
"""The tasks of `glue5_median`: small sets that are complete wherever GLUE is."""


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
        """Warm-up keeps the share that it has of the recipe's steps, unless `words` say otherwise."""
        given = [*self.words, f"data={config.toml_value(str(data))}", f"train.minutes={self.minutes}"]
        words = [*TIMED_WORDS, f"run={config.toml_value(str(self.out / 'run'))}"]
        settings, sources = resolve(self.recipe, [*words, *given])
        warmup, steps = settings.schedule.warmup, settings.train.steps
        if warmup >= 1 and sources["schedule.warmup"] != "command line":
            share = ScheduleSettings(**config.dump(settings.schedule) | {"warmup": min(0.5, warmup / steps)})
            settings = settings.model_copy(update={"schedule": share})
        return settings

    def finetuning(self) -> dict[str, Any]:
        return {"evaluations": 1, **self.method, "data": str(self.glue)}


def speedrun(settings: SpeedrunSettings, command: str = "") -> dict[str, Any]:
    """Returns what speedrun.json holds. `command` is what goes on after an interruption."""
    # what cannot work is refused before anything is computed
    if not 0 < settings.minutes < math.inf:
        raise SettingsError(f"minutes ({settings.minutes}) must be above 0.")
    shards = settings.data if (settings.data / MANIFEST).is_file() else settings.out / "shards"
    if not settings.data.exists():
        raise DataError(f"{settings.data} does not exist. Give text, or a folder of token shards (data=…).")
    pretraining = settings.pretraining(shards)
    plans = plan_tasks(settings)

    with lock(settings.out):
        remove_leftovers(settings.out)
        timings = Timings(settings.out / "timings.json")
        with timings.stage("prepare"):
            if shards != settings.data:
                prepare_text(settings, shards)
        with timings.stage("pretrain"):
            heldout = pretrain(pretraining, command)
            plot_run(Path(pretraining.run), Path(pretraining.run) / "curves.png")
            gc.collect()  # what graphs hold on the device
            torch.cuda.empty_cache()
        with timings.stage("overlap"):
            overlap = check_overlap(settings, plans, shards)
        with timings.stage("finetune"):
            out = settings.out / "finetune"
            finetuned = finetune(
                Path(pretraining.run), list(plans), settings.finetuning(), out, settings.seeds, settings.jobs
            )
        result = {
            **scores(settings, plans, finetuned["tasks"]),
            "method": read_object(out / next(iter(plans)) / SETTINGS)["method"],
            **measurements(pretraining, heldout),
            "wall_clock": timings.split(Path(pretraining.run)),
            "overlap": overlap,
            "environment": environment(),
            "command": command,
        }
        write_json(settings.out / "speedrun.json", result)
        write_report(settings.out, result, read_metrics(Path(pretraining.run)))
        return result


def plan_tasks(settings: SpeedrunSettings) -> dict[str, Plan]:
    """Every task that is asked for or at hand, with its files read."""
    if not settings.glue.is_dir():
        raise DataError(f"{settings.glue} is not a folder. Give one with a folder for each GLUE task (glue=…).")
    folders = {plain(path.name) for path in settings.glue.iterdir() if path.is_dir()}
    if unknown := [name for name in settings.tasks if name not in config.recipe_names(TASKS)]:
        raise SettingsError(f"there is no task {unknown[0]!r}, only {', '.join(config.recipe_names(TASKS))}.")
    names = settings.tasks or [name for name in dict.fromkeys([*FIVE, *GLUE]) if name in folders]
    if not names:
        raise DataError(f"{settings.glue} has no folder of a GLUE task ({', '.join(FIVE)}, …).")
    return {name: make_plan(name, settings.finetuning(), {}) for name in names}


def prepare_text(settings: SpeedrunSettings, shards: Path) -> None:
    """The tokenizer first, where none is given: of the text itself."""
    folder, given = settings.out / "tokenizer", settings.tokenizer
    if not (folder / "tokenizer.json").is_file():
        if given is None:
            tokenizer = train_tokenizer(Corpus([settings.data]), TokenizerSettings())
        else:
            tokenizer = adopt_vocabulary(given) if given.suffix == ".txt" else load_tokenizer(given)
        save_tokenizer(tokenizer, folder)
    prepare([settings.data], shards, folder)


def check_overlap(settings: SpeedrunSettings, plans: Mapping[str, Plan], shards: Path) -> dict[str, Any]:
    path = settings.out / "overlap.json"
    if not path.is_file() or read_object(path).keys() != plans.keys():
        texts = {name: [row_texts(plan, row) for row in plan.splits["dev"]] for name, plan in plans.items()}
        write_json(path, {name: asdict(overlap) for name, overlap in find_overlap(texts, shards).items()})
    content: dict[str, Any] = read_object(path)
    return content


def row_texts(plan: Plan, row: Mapping[str, Any]) -> list[str]:
    values = (row.get(column_of(name, row)) for name in plan.task.input_columns)
    return [value for value in values if isinstance(value, str)]


class Timings:
    """Seconds of each stage, over all starts. A stage that was finished before is not counted again."""

    def __init__(self, path: Path):
        self.path = path
        self.stages: dict[str, dict[str, Any]] = read_or_set_aside(path) or {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        entry = self.stages.setdefault(name, {"seconds": 0.0, "finished": False})
        began, counted = time.monotonic(), not entry["finished"]
        try:
            yield
            entry["finished"] = True
        finally:
            if counted:
                entry["seconds"] += time.monotonic() - began
                write_json(self.path, self.stages)

    def split(self, run: Path) -> dict[str, float]:
        """In seconds; "start" is what a pre-training run takes before its first step and for its export."""
        inside = {key: round(value, 2) for key, value in read_object(run / RUN_STATE)["seconds"].items()}
        seconds = {name: round(entry["seconds"], 2) for name, entry in self.stages.items()}
        start = max(0.0, round(seconds.pop("pretrain") - sum(inside.values()), 2))
        prepared = {"prepare": seconds.pop("prepare"), "start": start}
        return {
            **prepared,
            **inside,
            **seconds,
            "total": round(sum([*prepared.values(), *inside.values(), *seconds.values()]), 2),
        }


def scores(
    settings: SpeedrunSettings, plans: Mapping[str, Plan], tasks: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """In hundredths, as papers print them."""
    results = {}
    for name, plan in plans.items():
        result = tasks[name]
        by_seed = [100 * result["scores"]["dev"][f"seed {seed}"][result["metric"]] for seed in range(settings.seeds)]
        spread = {"least": min(by_seed), "greatest": max(by_seed)}
        spread |= {"sd": statistics.stdev(by_seed)} if len(by_seed) > 1 else {}
        files = {"files": result["files"], "epochs": plan.task.epochs}
        results[name] = {
            "metric": result["metric"],
            "median": statistics.median(by_seed),
            **spread,
            "seeds": by_seed,
            **files,
        }
    five = [results[name]["median"] for name in FIVE if name in results]
    return {
        "glue5_median": statistics.fmean(five) if len(five) == len(FIVE) else None,
        "minutes": settings.minutes,
        "seeds": settings.seeds,
        "tasks": results,
    }


def measurements(settings: PretrainSettings, heldout: Mapping[str, float]) -> dict[str, Any]:
    """Of the pre-training run."""
    run, train = Path(settings.run), settings.train
    state, vocab_size = read_object(run / RUN_STATE), read_manifest(Path(settings.data)).vocab_size
    steps, seconds = state["step"], state["seconds"]["train"]
    done = settings.model_copy(update={"train": train.model_copy(update={"steps": steps})})
    flops = sum(count_flops(settings, vocab_size).values()) * steps * train.batch * settings.rows.length
    peak = device_peak(choose_device(train))
    return {
        "tokens": state["tokens"],
        "steps": steps,
        "tokens_per_second": state["tokens"] / seconds,
        "mfu": flops / seconds / peak if peak else None,
        "flops": flops,
        "paper_flops": paper_flops(done, vocab_size),
        "heldout": {key: value for key, value in heldout.items() if key not in ("kind", "step")},
        "alarms": [record["text"] for record in read_metrics(run) if record["kind"] == "alarm"],
        "pretraining_seed": settings.seed,
        "pretraining": config.dump(settings),
    }
