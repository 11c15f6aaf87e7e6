"""Compares recipes: each is trained on the same data under the same budget, over several seeds, and measured in the same way.

A budget is time ("2m"), FLOPs ("3e14 flops", or "3e14 paper flops" by the paper's count) or steps ("500 steps"); several of them show
how scores grow with it. Time is converted to steps before the run by a few trial steps on this machine, so that the learning rate
decays completely in every run. The report has the median and the spread over the seeds of everything that was measured, and leaves
nothing out: a run that diverged is a result.

Yardsticks: the probe asks how much of a labelled table a frozen encoder already knows (logistic regression on its vectors, nothing
fine-tuned); tasks are fine-tuned, several seeds each.
"""

import hashlib
import json
import logging
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from electra.base import config
from electra.base.config import Figure
from electra.base.errors import CorruptError, DivergedError, MemoryExhaustedError, SettingsError, counted
from electra.base.files import (
    LONGEST_NAME,
    read_object,
    read_shaped_or_set_aside,
    refuse_other_kind,
    remove_leftovers,
    set_aside_file,
    write_atomically,
    write_json,
)
from electra.base.jobs import Signals, run_jobs
from electra.base.progress import Table, visible
from electra.data.shards import manifest_hash, read_manifest
from electra.finetuning.plan import file_sha256, make_plan, refuse_errors, sha256_of
from electra.finetuning.run import finetune
from electra.finetuning.speedrun import FIVE
from electra.inspector.probe import LabelledTexts, probe_accuracy
from electra.pretraining.load import CONFIG, load_network, load_settings
from electra.pretraining.run import build_parts, pretrain, refuse_alone
from electra.pretraining.settings import PretrainSettings, resolve, warn_without_effect
from electra.pretraining.trial import paper_flops, step_flops, try_step
from electra.train.device import choose_device, gpu_names, thread_share
from electra.train.log import picture, read_metrics
from electra.train.step import Execution, build_step

log = logging.getLogger(__name__)

EVALUATIONS = 4
TRIAL_SECONDS = 1.0
SECONDS = {"s": 1, "m": 60, "h": 3600}
MOST = {"seconds": 1e9, "flops": 1e30, "paper flops": 1e30, "steps": 1e12}
OF_RUNS = ("seed", "run")
OF_BUDGET = tuple(f"train.{it}" for it in ("steps", "minutes", "stages", "log_every", "evaluate_every", "save_every"))
GLUE5 = "glue5"
MEASURES = {
    "auc": "RTD AUC", "mlm_loss": "MLM loss", "probe": "probe accuracy", GLUE5: "GLUE, five", "tasks": "mean of tasks",
}  # fmt: skip
COSTS = {
    "steps": "steps", "tokens": "M tokens", "learning_rate": "rate", "flops": "FLOPs", "paper_flops": "paper's count",
}  # fmt: skip


@dataclass(frozen=True)
class Tasks:
    """Fine-tuning tasks or tables; `overrides` are settings of fine-tuning, including `data`. `jobs` run in parallel per compared run."""

    names: tuple[str, ...]
    overrides: Mapping[str, Any]
    seeds: int = 1
    jobs: int = 1


@dataclass(frozen=True)
class Yardsticks:
    """What runs are measured by, besides their own metrics."""

    table: LabelledTexts | None = None
    tasks: Tasks | None = None

    def plan(self) -> dict[str, Any]:
        """What must not change within a comparison."""
        table = {"table": "" if self.table is None else self.table.digest}
        if self.tasks is None:
            return table
        overrides = json.loads(json.dumps(dict(self.tasks.overrides), default=str))
        return table | {"tasks": dict.fromkeys(self.tasks.names, overrides)}


class Budget(NamedTuple):
    unit: Literal["seconds", "flops", "paper flops", "steps"]
    amount: float


def parse_budget(text: str) -> Budget:
    form = r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(s|m|h|steps|flops|paper flops)"
    if match := re.fullmatch(form, text.strip()):
        amount, unit = float(match[1]), match[2]
        budget = Budget("seconds", amount * SECONDS[unit]) if unit in SECONDS else Budget(unit, amount)  # type: ignore[arg-type]
        if 0 < budget.amount <= MOST[budget.unit]:
            return budget
    most = ", ".join(f"{amount:.0e} {unit}" for unit, amount in MOST.items())
    example = '"2m", "90s", "1h", "3e14 flops", "3e14 paper flops" or "500 steps"'
    raise SettingsError(f"budget {text[:40]!r} is not understood. Use {example}, above 0 and at most {most}.")


class Variant(NamedTuple):
    """A recipe with overrides and a budget. `series` is the name without the budget: its variants are one curve over budgets."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    budget: Budget
    series: str


def is_time(budgets: str) -> bool:
    """Whether at least one of the budgets is a time."""
    return any(parse_budget(text.strip()).unit == "seconds" for text in budgets.split(","))


def variants(recipes: Sequence[str], overrides: Sequence[str], budgets: str, vary: str = "") -> list[Variant]:
    """Every combination of the recipes, the values of `vary` ("generator.width=0.25,0.5,1"), if given, and the budgets
    ("1e15 flops, 2e15 flops")."""
    key, equals, values = vary.partition("=")
    if vary and not equals:
        raise SettingsError(f"vary {vary!r} is not of the form key=value,value,…")
    keys = {*config.flatten(config.parse_overrides(overrides)), key.strip()}
    for name in keys.intersection(OF_RUNS):
        raise SettingsError(f"{name} is set by the comparison, for each run: seeds count from 0, folders are in out.")
    for name in keys.intersection(OF_BUDGET):
        raise SettingsError(f"{name} is set by the comparison, from the budget. Leave it out.")
    outside_brackets = r",(?![^\[]*\])"
    added = [(f"{key}={value}",) for value in re.split(outside_brackets, values)] if vary else [()]
    texts = [text.strip() for text in budgets.split(",")]
    made = []
    for recipe, words, text in product(recipes, added, texts):
        series = " ".join((recipe, *words))
        name = series if len(texts) == 1 else f"{series}, {text}"
        made.append(Variant(name, recipe, (*overrides, *words), parse_budget(text), series))
    if len({(it.series, it.budget) for it in made}) < len(made):
        raise SettingsError("a recipe, a value or a budget is named twice. To repeat runs, use more seeds.")
    return made


Steps = Annotated[int, Field(ge=1, le=MOST["steps"])]


@dataclass(frozen=True)
class ComparedRun:
    """One run. `figures` lacks metrics that its objective does not have, and is empty if the run diverged."""

    variant: str
    seed: int
    steps: Steps
    flops: Figure
    seconds: Figure
    figures: dict[str, Figure]
    probe: Figure | None
    diverged: bool = False
    series: str = ""
    paper_flops: Figure | None = None
    tasks: dict[str, Annotated[list[Figure], Field(min_length=1)]] = field(default_factory=dict)
    """The headline of each task, seed by seed, in hundredths."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Without padding; None if the run diverged."""
    learning_rate: Figure | None = None

    def measure(self, name: str) -> float | None:
        """A measure by its name. If all of GLUE's five are there, theirs is the only mean: other tasks never count in it."""
        medians = {task: statistics.median(scores) for task, scores in self.tasks.items()}
        has_five = medians.keys() >= {*FIVE}
        if name == "probe":
            return self.probe
        if name in medians:
            return medians[name]
        if name == GLUE5:
            return statistics.fmean(medians[task] for task in FIVE) if has_five else None
        if name == "tasks":
            return statistics.fmean(medians.values()) if medians and not has_five else None
        return self.figures.get(name)


STORED_RUN = TypeAdapter(ComparedRun)


@dataclass(frozen=True)
class Job:
    variant: Variant
    seed: int
    folder: Path
    yardsticks: Yardsticks
    task_names: Mapping[str, str]
    """Task -> its name in the results."""


def run_comparison(
    chosen: Sequence[Variant], seeds: int, yardsticks: Yardsticks, jobs: int, out: Path
) -> list[ComparedRun]:
    """Every variant with every seed, `jobs` runs at a time (on each of several GPUs); the report is in `out`. Every setting is
    checked before anything starts, finished runs are kept, and an interrupted one goes on."""
    names = folder_names([variant.name for variant in chosen])
    folders = {variant: out / names[variant.name] for variant in chosen}
    plan, task_names, devices = yardsticks.plan(), {}, list[str]()
    if len({variant.budget for variant in chosen}) == 1:
        plan["budget"] = list(chosen[0].budget)
    if yardsticks.tasks is not None:
        for name in yardsticks.tasks.names:  # reads its tables: what is wrong is said now
            task = make_plan(name, dict(yardsticks.tasks.overrides), {})
            task_names[name] = task.name
            refuse_errors(task)
            plan[f"files of {name}"] = sha256_of({split: file_sha256(path) for split, path in task.files.items()})
    for variant in chosen:
        settings, sources = resolve(variant.recipe, [*variant.overrides, "seed=0", "run=x"])
        refuse_alone(settings.train)
        warn_without_effect(settings, sources)
        plan[variant.name] = hashlib.sha256(config.to_toml(settings).encode()).hexdigest()
        plan[f"data={settings.data}"] = manifest_hash(Path(settings.data))
        devices = gpu_names(settings.train.device)
    refuse_other_plan(out / "comparison.json", plan)
    queue = [
        Job(it, seed, folders[it] / f"seed-{seed}", yardsticks, task_names) for seed in range(seeds) for it in chosen
    ]

    # what is finished is in the report, whatever becomes of the others
    results: list[ComparedRun] = []
    problems: list[str] = []
    order = [variant.name for variant in chosen]
    is_timed = any(variant.budget.unit == "seconds" for variant in chosen)
    for result in finished(queue, jobs, devices):
        if isinstance(result, str):
            log.warning(result)
            problems.append(result)
            continue
        end = "diverged" if result.diverged else f"{counted(result.steps, 'step')} in {result.seconds:.0f} s"
        log.info("%s, seed %d: %s", result.variant, result.seed, end)
        results.append(result)
        results.sort(key=lambda result: (order.index(result.variant), result.seed))
        write_json(out / "results.json", summary(results))
        remove_leftovers(out, "comparison.md")
        write_atomically(out / "comparison.md", comparison_table(results, is_timed=is_timed).markdown().encode())
    if results:
        plot_comparison(out / "comparison.png", results)
    if problems:
        raise MemoryExhaustedError(
            f"{len(problems)} of {len(queue)} runs did not fit, the others are kept. {problems[0]}"
        )
    return results


def folder_names(names: Sequence[str]) -> dict[str, str]:
    """Names of variants, which may be paths, as names of folders. Those that are too long, or the same for two variants, get a hash."""
    plain = {name: re.sub(r"[^\w.+=-]+", "_", name) for name in names}
    counts = Counter(plain.values())
    hashes = {name: hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8] for name in names}
    unclear = {name for name, it in plain.items() if counts[it] > 1 or len(it.encode()) > LONGEST_NAME}
    return {name: f"{it[:40]}-{hashes[name]}" if name in unclear else it for name, it in plain.items()}


def refuse_other_plan(path: Path, plan: dict[str, Any]) -> None:
    """A folder holds one comparison: more seeds, variants and tasks may join it, another budget, table or setting may not, nor
    other shards or tables in the same place (folders of earlier versions, which do not name them, go on with those that are there)."""
    remedy = "restore it, or remove it if its runs are those of this command"
    refuse_other_kind(path.parent, path.name)
    before = read_object(path, remedy) if path.is_file() else {}
    variants = (value for name, value in before.items() if name not in ("table", "tasks", "budget"))
    tasks = before.get("tasks", {})
    if not isinstance(tasks, dict) or not all(isinstance(value, str) and len(value) == 64 for value in variants):
        raise CorruptError(f"{path} is not from a comparison: {remedy}.")
    if isinstance(names := tasks.get("names"), list):  # as earlier versions wrote it
        tasks = dict.fromkeys(names, tasks.get("overrides"))
    plan = plan | ({"tasks": tasks | plan.get("tasks", {})} if tasks else {})
    clash = [name for name, value in plan.items() if name != "tasks" and before.get(name, value) != value]
    if clash := clash + [f"settings of {task}" for task, value in tasks.items() if plan["tasks"][task] != value]:
        raise SettingsError(
            f"{path.parent} holds another comparison (not the same: {', '.join(clash)}). Use another folder."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, before | plan)


def finished(queue: Sequence[Job], jobs: int, devices: Sequence[str] = ()) -> Iterator[ComparedRun | str]:
    """Yields results, or why there is none, as they come. Parallel runs write their output to a file each."""
    workers = jobs * max(1, len(devices))
    if workers == 1:
        yield from map(run_job_if_it_fits, queue)
        return
    if queue:
        where = queue[0].folder.parent
        log.info("%d runs, %d at a time: follow output.txt in each folder of %s", len(queue), workers, where)
    with Signals() as signals:
        start = thread_share(workers)
        yield from run_jobs(run_job_quietly, [(job,) for job in queue], workers, signals, start, devices=devices)


def run_job_quietly(job: Job) -> ComparedRun | str:
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / "output.txt").open("a") as output, redirect_stdout(output), redirect_stderr(output):
        logging.basicConfig(stream=output, level=logging.INFO, format="%(message)s", force=True)
        return run_job_if_it_fits(job)


def run_job_if_it_fits(job: Job) -> ComparedRun | str:
    """Like `run_job`, but returns the message of a run that does not fit into memory, so that the others go on."""
    try:
        return run_job(job)
    except MemoryExhaustedError as error:
        return f"{job.variant.name}, seed {job.seed}: {error}"


def run_job(job: Job) -> ComparedRun:
    """Trains and measures one run. A finished run is read back and measured only by the tasks that it lacks; an interrupted run
    resumes."""
    path = job.folder / "result.json"
    stored = read_shaped_or_set_aside(path, STORED_RUN)
    if stored and (stored.variant, stored.seed) != (job.variant.name, job.seed):
        kept = set_aside_file(path).name
        log.warning("%s is of %s, seed %d. Kept as %s; measured again.", path, stored.variant, stored.seed, kept)
        stored = None
    result = stored or train_job(job)
    if not result.diverged:
        result = replace(result, tasks=result.tasks | finetuned_scores(job, result.tasks))
    if result != stored:
        write_json(path, asdict(result))
    return result


def train_job(job: Job) -> ComparedRun:
    job.folder.mkdir(parents=True, exist_ok=True)

    # what a step costs decides how many the budget buys
    own = f"seed={job.seed}", f"run={config.toml_value(str(job.folder / 'run'))}"
    settings, _ = resolve(job.variant.recipe, [*job.variant.overrides, *own])
    vocab_size = read_manifest(Path(settings.data)).vocab_size
    flops, paper = step_flops(settings, vocab_size), paper_flops(with_steps(settings, 1), vocab_size)
    settings = with_steps(settings, plan_steps(job.variant.budget, settings, flops, paper))

    # train and measure
    started = time.monotonic()
    metrics, probe, diverged, tokens = {}, None, False, None
    try:
        metrics = pretrain(settings, "the electra compare command again")
        told = read_metrics(Path(settings.run), "train")[-1:]  # the seconds of all its processes
        seconds = max([time.monotonic() - started, *(it.get("seconds") or 0.0 for it in told)])
        tokens = next((int(it["tokens"]) for it in told if it.get("tokens")), None)
        if job.yardsticks.table is not None:
            network = load_network(Path(settings.run), "encoder")
            network.encoder.to(choose_device(settings.train))
            probe = probe_accuracy(job.yardsticks.table, network, settings.rows.length)
    except DivergedError:  # a result, and the others go on
        diverged, seconds = True, time.monotonic() - started
    steps = settings.train.steps
    return ComparedRun(
        variant=job.variant.name,
        seed=job.seed,
        steps=steps,
        flops=flops * steps,
        seconds=seconds,
        figures={key: value for key, value in metrics.items() if isinstance(value, float)},
        probe=probe,
        diverged=diverged,
        series=job.variant.series,
        paper_flops=paper * steps,
        tokens=tokens,
        learning_rate=settings.optimizer.lr,
    )


def finetuned_scores(job: Job, known: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Scores of the tasks that are not `known` with all seeds. A task that diverges has none, and the others go on."""
    scores: dict[str, list[float]] = {}
    if (tasks := job.yardsticks.tasks) is None:
        return scores
    missing = {item: name for item, name in job.task_names.items() if len(known.get(name, ())) < tasks.seeds}
    run, out = job.folder / "run", job.folder / "finetune"
    tune = partial(finetune, run, overrides=tasks.overrides, out=out, seeds=tasks.seeds, jobs=tasks.jobs)
    if tasks.jobs > 1 and missing:  # all tasks in parallel; below, each finds its runs finished
        with suppress(DivergedError):
            tune(list(missing))
    for item, name in missing.items():
        try:
            results = tune([item])
        except DivergedError as error:
            log.warning("%s, seed %d: no score of %s: %s", job.variant.name, job.seed, name, error)
            continue
        result = results["tasks"][name]
        by_seed = result["scores"]["dev"]
        scores[name] = [100 * by_seed[f"seed {seed}"][result["metric"]] for seed in range(tasks.seeds)]
    return scores


def plan_steps(budget: Budget, settings: PretrainSettings, flops: float, paper: float) -> int:
    """The steps that a budget buys. A run that was begun keeps its steps: measured again, they would differ, and it could not resume."""
    run = Path(settings.run)
    if (run / CONFIG).is_file():
        return load_settings(run).train.steps
    match budget.unit:
        case "steps":
            cost = 1.0
        case "flops":
            cost = flops
        case "paper flops":
            cost = paper
        case "seconds":
            cost = step_seconds(settings)
    return max(1, round(budget.amount / cost))


def step_seconds(settings: PretrainSettings) -> float:
    device = choose_device(settings.train)
    parts = build_parts(settings, device, verify=False)
    objective, execution = parts.objective.to(device).train(), Execution.of(settings.train, device)
    step = build_step(objective, settings.optimizer_of_run(), execution, settings.seed)
    return try_step(step, parts.loader.batch_at(0), seconds=TRIAL_SECONDS)[0]


def with_steps(settings: PretrainSettings, steps: int) -> PretrainSettings:
    """The settings for `steps` steps: EVALUATIONS evaluations and saves, and warm-up as the same fraction of the run or its first stage."""
    often, tree = -(-steps // EVALUATIONS), config.dump(settings)
    tree["train"] |= {"steps": steps, "minutes": 0.0, "stages": (), "log_every": max(1, steps // 50)}
    tree["train"] |= {"evaluate_every": often, "save_every": often}
    if settings.schedule.warmup >= 1:
        planned = (*settings.train.stages, settings.train.steps)[0]
        tree["schedule"]["warmup"] = round(settings.schedule.warmup * steps / planned)
    return config.validate(PretrainSettings, tree)


def by_variant(results: Sequence[ComparedRun]) -> dict[str, list[ComparedRun]]:
    return {name: [it for it in results if it.variant == name] for name in dict.fromkeys(it.variant for it in results)}


def median_flops(results: Sequence[ComparedRun]) -> float:
    return statistics.median(result.flops for result in results)


def comparable(results: Sequence[ComparedRun]) -> list[ComparedRun]:
    """A run that lacks a task which others have (it diverged there) has no mean: it would be that of other tasks than theirs."""
    names = dict.fromkeys(task for result in results for task in result.tasks)
    return [replace(it, tasks={name: it.tasks.get(name, [math.nan]) for name in names}) for it in results]


def measured(results: Sequence[ComparedRun], measure: str) -> list[float]:
    values = (result.measure(measure) for result in results)
    return [value for value in values if value is not None and not math.isnan(value)]


def measures_of(results: Sequence[ComparedRun]) -> dict[str, str]:
    """The measures that at least one run has, with their titles; of tasks first the mean, then each."""
    named = MEASURES | {task: task for result in results for task in result.tasks}
    return {measure: name for measure, name in named.items() if measured(results, measure)}


def summary(results: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """One row per variant, in the order of the results: the median, least and greatest of every measure over its seeds, and
    everything of each run. What the seeds cost is one number, or the least and the greatest where time was the budget."""
    rows = []
    for name, runs in by_variant(comparable(results)).items():
        row: dict[str, Any] = {"variant": name, "series": runs[0].series, "seeds": len(runs)}
        row["diverged"] = sum(result.diverged for result in runs)
        for cost in COSTS:
            values = [it for result in runs if (it := getattr(result, cost)) is not None] or [None]
            row[cost] = values[0] if len({*values}) == 1 else [min(values), max(values)]
        for measure in measures_of(runs):
            values = measured(runs, measure)
            spread = {"median": statistics.median(values), "least": min(values), "greatest": max(values)}
            row[measure] = spread | {"seeds": values}
        row["runs"] = [asdict(it) | {GLUE5: it.measure(GLUE5)} for it in results if it.variant == name]
        rows.append(row)
    return rows


def comparison_table(
    results: Sequence[ComparedRun], title: str = "", is_wide: bool = True, is_timed: bool = False
) -> Table:
    """A terminal has no room for every seed's score (`is_wide` = False). Where the budget is time (`is_timed`) trial steps planned
    the runs, and what these took stands beside it."""
    measures = measures_of(comparable(results))
    hundredths = {GLUE5, "tasks", *(task for result in results for task in result.tasks)}
    rows = []
    for row in summary(results):
        seeds = f"{row['seeds']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else "")
        cells = [with_spread(row.get(name), 1 if name in hundredths else 3, is_wide) for name in measures]
        seconds = sorted(run["seconds"] for run in row["runs"])
        taken = [cost_cell("seconds", [seconds[0], seconds[-1]])] if is_timed else []
        rows.append((row["variant"], seeds, *taken, *(cost_cell(name, row[name]) for name in COSTS), *cells))
    head = ("recipe", "seeds", *(["seconds taken"] if is_timed else []), *COSTS.values(), *measures.values())
    return Table(head, rows, title)


def cost_cell(name: str, cost: float | list[float] | None) -> str:
    """A number, or the least and the greatest."""
    unit, form = {"seconds": (1, ",.0f"), "steps": (1, ",.0f"), "tokens": (1e6, ".4g"), "learning_rate": (1, "g")}.get(
        name, (1, ".2e")
    )
    ends = cost if isinstance(cost, list) else [cost]
    return "–".join(dict.fromkeys("–" if end is None else format(end / unit, form) for end in ends))


def with_spread(values: Mapping[str, Any] | None, digits: int, is_wide: bool) -> str:
    """The median; with several seeds also all values in order, or the least and the greatest."""
    if values is None:
        return "–"
    median, least, greatest = (f"{values[key]:.{digits}f}" for key in ("median", "least", "greatest"))
    spread = ", ".join(f"{point:.{digits}f}" for point in values["seeds"]) if is_wide else f"{least}–{greatest}"
    return f"{median} ({spread})" if len(values["seeds"]) > 1 else median


def plot_comparison(out: Path, results: Sequence[ComparedRun]) -> None:
    """With several budgets scores over FLOPs, a curve for each series; else a line of dots for each variant. Above the others, four
    in a row, what counts most."""
    results = comparable(results)
    runs_of, measures = by_variant(results), measures_of(results)
    if not measures:  # every run diverged
        return
    first = next(name for name in (GLUE5, "tasks", "probe", *measures) if name in measures)
    names = list(dict.fromkeys((first, *measures)))
    is_curve = len({run.series for run in results}) < len(runs_of)
    columns = min(4, max(1, len(names) - 1))
    rows = [range(start, start + columns) for start in range(1, len(names), columns)]
    places = [[0] * columns, *([it if it < len(names) else -1 for it in row] for row in rows)]
    height = 3.2 if is_curve else 1.0 + 0.4 * len(runs_of)
    size = (3 + 3.2 * max(2, columns), 0.8 + height * (len(places) + 0.4 * is_curve))
    ratios = [1.4 if is_curve else 1.0, *(1.0 for _ in rows)]
    title = f"dots: seeds, {'line' if is_curve else 'bar'}: median"
    with picture(out, title, places, size, height_ratios=ratios) as axes:
        for axis, measure in zip(axes, names, strict=True):
            (draw_curves if is_curve else draw_dots)(axis, runs_of, measure)
            axis.set(**{"ylabel" if is_curve else "xlabel": measures[measure]})
        if is_curve:
            axes[0].legend(fontsize=9, loc="center left", bbox_to_anchor=(1.01, 0.5))


def draw_curves(axis: Any, runs_of: Mapping[str, Sequence[ComparedRun]], measure: str) -> None:
    for series in dict.fromkeys(runs[0].series for runs in runs_of.values()):
        own = [runs for runs in runs_of.values() if runs[0].series == series and measured(runs, measure)]
        own.sort(key=median_flops)
        medians = [statistics.median(measured(runs, measure)) for runs in own]
        (line,) = axis.plot([median_flops(runs) for runs in own], medians, label=visible(series))
        points = [(run.flops, value) for runs in own for run in runs for value in measured([run], measure)]
        axis.plot(*zip(*points, strict=True), "o", color=line.get_color(), alpha=0.5) if points else None
    axis.set(xscale="log", xlabel="FLOPs")


def draw_dots(axis: Any, runs_of: Mapping[str, Sequence[ComparedRun]], measure: str) -> None:
    for place, runs in enumerate(runs_of.values()):
        if values := measured(runs, measure):
            axis.plot(values, [place] * len(values), "o", color="tab:blue", alpha=0.55)
            axis.plot([statistics.median(values)], [place], "|", color="black", ms=16, mew=2)
    names = map(visible, runs_of) if axis.get_subplotspec().is_first_col() else [""] * len(runs_of)
    axis.set_yticks(range(len(runs_of)), list(names))
    axis.set_ylim(len(runs_of) - 0.5, -0.5)  # the first on top, no dot on the frame
    axis.margins(x=0.1)
