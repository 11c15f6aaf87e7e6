"""Recipes side by side: each trained on the same data under the same budget, over several seeds, and measured alike.

A budget is time (`2m`), FLOPs (`3e14`) or steps (`500 steps`). Time is turned into steps before the run by a few trial
steps on this machine, so that the learning rate falls to its end in every run. A recipe whose generator is frozen and has
no source yet (two-stage) gets it from a masked language model that is trained with half of the budget.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from electra.base import config
from electra.base.errors import DivergedError, SettingsError
from electra.base.files import write_json
from electra.base.jobs import Signals, run_jobs
from electra.data.shards import read_manifest
from electra.inspector.probe import LabelledTexts, probe_accuracy
from electra.pretraining.load import load_network
from electra.pretraining.run import build_parts, pretrain, work
from electra.pretraining.settings import PretrainSettings, resolve
from electra.pretraining.trial import trial_seconds
from electra.train.device import choose_device
from electra.train.optimizers import build_optimizer

EVALUATIONS = 4


class Budget(NamedTuple):
    unit: Literal["seconds", "flops", "steps"]
    amount: float


def parse_budget(text: str) -> Budget:
    match = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*(s|m|h|steps|flops)?", text.strip())
    units: dict[str | None, tuple[Any, float]] = {
        "s": ("seconds", 1),
        "m": ("seconds", 60),
        "h": ("seconds", 3600),
        "steps": ("steps", 1),
        "flops": ("flops", 1),
    }
    if not match or not match[2] or float(match[1]) <= 0:
        raise SettingsError(
            f'budget {text!r} is not understood. Use "2m", "90s", "1h", "3e14 flops" or "500 steps".'
        )
    unit, factor = units[match[2]]
    return Budget(unit, float(match[1]) * factor)


class Variant(NamedTuple):
    name: str
    recipe: str
    words: tuple[str, ...]


def variants(recipes: Sequence[str], words: Sequence[str], vary: str) -> list[Variant]:
    """Each recipe, or each recipe with each of the values of `vary` ("generator.width=0.25,0.5,1")."""
    if len(set(recipes)) < len(recipes):
        raise SettingsError("a recipe is named twice. --seeds N trains each several times.")
    if not vary:
        return [Variant(recipe, recipe, tuple(words)) for recipe in recipes]
    key, equals, values = vary.partition("=")
    if not equals:
        raise SettingsError(f"--vary {vary!r} is not of the form key=value,value,…")
    return [
        Variant(f"{recipe} {key}={value}", recipe, (*words, f"{key}={value}"))
        for recipe in recipes
        for value in values.split(",")
    ]


@dataclass(frozen=True)
class Result:
    """What one run came to. Figures that an objective does not have are missing; a run that diverged has none."""

    variant: str
    seed: int
    steps: int
    flops: float
    seconds: float
    figures: dict[str, float]
    probe: float | None
    diverged: bool = False


@dataclass(frozen=True)
class Job:
    variant: Variant
    seed: int
    budget: Budget
    folder: Path
    table: LabelledTexts | None
    quiet: bool


def settings_of(job: Job, steps: int | None = None, more: Sequence[str] = ()) -> PretrainSettings:
    """Short runs look and save at fewer points; warm-up keeps its share of the run."""
    settings, _ = resolve(job.variant.recipe, [*job.variant.words, f"seed={job.seed}", *more])
    if steps is None:
        return settings
    warmup = round(settings.schedule.warmup * steps / settings.train.steps)
    often = max(1, -(-steps // EVALUATIONS))
    changed = {"steps": steps, "log_every": max(1, steps // 50), "evaluate_every": often, "save_every": often}
    return config.validate(
        PretrainSettings,
        config.dump(settings)
        | {"train": config.dump(settings.train) | changed}
        | {"schedule": config.dump(settings.schedule) | {"warmup": warmup}},
    )


def needs_first_stage(recipe: str, words: Sequence[str]) -> bool:
    given = config.flatten(config.read_recipe(recipe)) | config.parse_overrides(words)
    return given.get("generator.kind") == "frozen" and not given.get("generator.source")


def first_stage(job: Job) -> Job:
    """A masked language model of the size that the frozen generator is to have."""
    frozen, _ = resolve(job.variant.recipe, [*job.variant.words, "generator.source=to-come"])
    small = config.flatten(config.dump(frozen.encoder.scaled(frozen.generator.width, frozen.generator.depth)))
    words = [
        word for word in job.variant.words if not word.startswith(("generator.", "start=", "objective."))
    ]
    words += ["objective.kind=masked_lm", "generator.kind=transformer", "generator.sharing=tied"]
    words += [f"encoder.{key}={config.toml_value(value)}" for key, value in small.items()]
    base = "+".join(
        part for part in job.variant.recipe.split("+") if "two-stage" not in part and "frozen" not in part
    )
    variant = Variant(f"{job.variant.name}, first stage", base or "electra-small", tuple(words))
    half = Budget(job.budget.unit, job.budget.amount / 2)
    return Job(variant, job.seed, half, job.folder / "first-stage", None, job.quiet)


def run_job(job: Job) -> Result:
    """One run from nothing to its figures; a finished one is read back, an interrupted one goes on."""
    path = job.folder / "result.json"
    if path.is_file():
        return Result(**json.loads(path.read_text("utf-8")))
    job.folder.mkdir(parents=True, exist_ok=True)
    if not job.quiet:
        return measure(job, path)
    with (job.folder / "output.txt").open("a") as output, redirect_stdout(output), redirect_stderr(output):
        return measure(job, path)


def measure(job: Job, path: Path) -> Result:
    more: list[str] = []
    flops_before, budget = 0.0, job.budget
    if needs_first_stage(job.variant.recipe, job.variant.words):
        stage = first_stage(job)
        first = run_job(stage)
        if first.diverged:
            return Result(job.variant.name, job.seed, first.steps, first.flops, first.seconds, {}, None, True)
        flops_before = first.flops
        source = str(stage.folder / "run")
        more = [f'generator.source="{source}"']
        generator = settings_of(job, more=more).generator
        if (generator.width, generator.depth) == (1, 1):
            more.append(f'start="{source}"')
        budget = Budget(budget.unit, budget.amount / 2)
    more.append(f'run="{job.folder / "run"}"')
    settings = settings_of(job, more=more)
    vocab_size = read_manifest(Path(settings.data)).vocab_size
    flops_a_step = work(settings, vocab_size).per_token() * settings.train.batch * settings.rows.length
    settings = settings_of(job, plan_steps(job, budget, settings, flops_a_step), more)
    started = time.monotonic()
    figures, probe, diverged = {}, None, False
    try:
        figures = pretrain(settings, "the electra compare command again")
        if job.table is not None:
            probe = probe_run(Path(settings.run), job.table, settings.rows.length)
    except DivergedError:  # a result, and the others go on
        diverged = True
    result = Result(
        job.variant.name,
        job.seed,
        settings.train.steps,
        flops_before + flops_a_step * settings.train.steps,
        time.monotonic() - started,
        {key: value for key, value in figures.items() if isinstance(value, float)},
        probe,
        diverged,
    )
    write_json(path, asdict(result))
    return result


def plan_steps(job: Job, budget: Budget, settings: PretrainSettings, flops_a_step: float) -> int:
    """Kept with the run: a time that was measured again would be another, and the run could not go on."""
    path = job.folder / "plan.json"
    if not path.is_file():
        match budget.unit:
            case "steps":
                steps = budget.amount
            case "flops":
                steps = budget.amount / flops_a_step
            case "seconds":
                steps = budget.amount / seconds_a_step(settings)
        write_json(path, {"steps": max(1, round(steps))})
    return int(json.loads(path.read_text("utf-8"))["steps"])


def seconds_a_step(settings: PretrainSettings) -> float:
    parts = build_parts(settings, verify=False)
    objective = parts.objective.to(choose_device(settings.train)).train()
    optimizer = build_optimizer(settings.optimizer, objective)
    return trial_seconds(settings, parts, optimizer, say=lambda text: None)


def probe_run(run: Path, table: LabelledTexts, length: int) -> float:
    network = load_network(run, "encoder")
    network.encoder.to("cuda" if torch.cuda.is_available() else "cpu")
    return probe_accuracy(table, network, length)


def compare(
    chosen: Sequence[Variant],
    seeds: int,
    budget: Budget,
    out: Path,
    table: LabelledTexts | None,
    jobs: int,
) -> Iterator[Result]:
    """Results as they come. Every setting is checked before anything starts."""
    queue = [
        Job(variant, seed, budget, out / folder_name(variant.name) / f"seed-{seed}", table, quiet=jobs > 1)
        for seed in range(seeds)
        for variant in chosen
    ]
    plan = {"budget": list(budget), "table": "" if table is None else table.digest}
    for job in queue[: len(chosen)]:
        stand_in = needs_first_stage(job.variant.recipe, job.variant.words)
        settings = settings_of(job, more=["run=x", *(["generator.source=to-come"] if stand_in else [])])
        plan[job.variant.name] = hashlib.sha256(config.to_toml(settings).encode()).hexdigest()
    refuse_other_plan(out / "comparison.json", plan)
    if jobs == 1:
        yield from map(run_job, queue)
        return
    with Signals() as signals:
        yield from run_jobs(run_job, [(job,) for job in queue], jobs, signals)


def refuse_other_plan(path: Path, plan: dict[str, Any]) -> None:
    """A folder holds one comparison: more seeds and more variants may join it, another budget, table or setting may not."""
    before = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if clash := [name for name, value in plan.items() if before.get(name, value) != value]:
        raise SettingsError(
            f"{path.parent} holds another comparison (not the same: {', '.join(clash)}). Use another --out."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, before | plan)


def folder_name(variant: str) -> str:
    return re.sub(r"[^\w.+=-]+", "_", variant)
