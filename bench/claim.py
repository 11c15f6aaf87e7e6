"""The paper's comparisons, all in one place: the same FLOPs for every run, several seeds, fine-tuned scores.

    python bench/claim.py table5 --data SHARDS --glue GLUE --out FOLDER [--budget "2.13e16 flops"] [--seeds 2] [--jobs 3] [--seconds 1500]
    python bench/claim.py table5 --plan …                              what is missing, and for how long an H200 would be at it
    python bench/claim.py table5 --rates --budget "2e15 flops" …       each side at three rates (or at those that are named: --rates 1e-3 2e-3)
    python bench/claim.py compute --budget "5.325e15 flops" …           score against compute, one budget or several at a time
    python bench/claim.py table5,generators,after …                     several families as one queue, each as it is usually measured
    python bench/claim.py paper …                                      electra-small as it is shipped, 62,500 steps
    python bench/claim.py merge FILE…                                  results of another machine into these

Families: the paper's Table 5 (with BERT at two masking shares), score against compute, generators, sharing of weights, ways to train,
what came after ELECTRA, and the paper's own row. `--only` takes some sides of a family, `--base modern-tiny` is small enough for a CPU.

Everything measured is in bench/results/claim.json (bench/claim_rows.py says how), at once when a run is finished: another call, on another
machine too, takes from there what it needs and trains the rest. A run is known by its settings, budget, data, fine-tuning and seed, so that the ELECTRA of
one family is not trained again for the next. Stopped by `--seconds` or by kill, the same command goes on in the same FOLDER.
`--jobs` runs share the device (start CUDA's MPS first).

The learning rate of a side is what `--rate SIDE=RATE` says, or the best of its own screen, or that of ELECTRA's (BERT's, for a masked language model),
or the recipe's; rows say which. The weight decay follows the steps, so that rate x decay x steps is the recipe's whatever the
budget: without, short runs of modern-small lose points in fine-tuning. Two-stage training has half of the budget for a masked
language model, one for each seed, and half for the discriminator. 0.3 B tokens of modern-small by ELECTRA are 2.13e16 FLOPs.

Every run is also asked to rank CoLA's sentences without labels (bench/cola_ranking.py), and with `--yardstick RUN` how well it detects what
RUN's generator makes of held-out text, which compares where AUCs against a run's own generator do not. It must be the same RUN throughout; any
small one with the same vocabulary will do.

Not equal, and not to be had for nothing: the protocol of fine-tuning and the settings of Muon (betas, warm-up, decay) were tuned on
ELECTRA, and all sides take them as they are.
"""

import argparse
import fcntl
import hashlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import claim_rows
import machine
from claim_families import DEFAULTS, FIRST_STAGE, TWO_STAGE, families
from claim_rows import FIVE, SCREEN, Record, Row
from cola_ranking import ranking
from electra.base import config
from electra.base.errors import DataError, ElectraError, MemoryExhaustedError
from electra.base.files import read_object, write_atomically
from electra.base.jobs import Signals, run_jobs
from electra.base.progress import Table, duration
from electra.data.shards import read_manifest
from electra.finetuning.plan import make_plan
from electra.finetuning.run import finetune
from electra.inspector.compare import (
    Budget,
    ComparedRun,
    Job,
    Tasks,
    Variant,
    Yardsticks,
    comparison_table,
    folder_names,
    parse_budget,
    plot_comparison,
    run_job_if_it_fits,
    with_steps,
)
from electra.pretraining.evaluate import evaluate_run
from electra.pretraining.settings import PretrainSettings, resolve
from electra.pretraining.trial import paper_flops, step_flops
from electra.train.device import thread_share

log = logging.getLogger(__name__)
PAPER_SHARE = 0.15
FACTORS = (0.5, 1.0, 2.0)
"""Of the recipe's learning rate, for `--rates`."""
UNSAID = (
    "seed",
    "run",
    "data",
    "start",
    "generator.source",
    "train.log_every",
    "train.evaluate_every",
    "train.save_every",
)
COSTS = ("steps", "tokens", "flops", "paper_flops", "seconds")
OF_RATES = ("optimizer.lr", "optimizer.weight_decay", "optimizer.total_decay")
COUNTED: dict[str, float] = {}

# What an H200 does, for --plan. Measured: tokens a second of modern-small's ELECTRA alone. Guessed from the speed-run: the others.
SPEED, FINETUNING_STEPS, START = 3.5e6, 100, 45
SHARED_PRETRAINING, SHARED_OTHER = 1.3, 0.7
"""What several at a time gain: all of them together, and each."""


def decay_of(settings: PretrainSettings, steps: int) -> float | str:
    return with_steps(settings, steps).optimizer_of_run().weight_decay


def cost(settings: PretrainSettings, budget: Budget) -> float:
    """Of one step."""
    match budget.unit:
        case "flops":
            return counted(settings)
        case "paper flops":
            return paper_flops(with_steps(settings, 1), read_manifest(Path(settings.data)).vocab_size)
        case _:
            return 1.0


def counted(settings: PretrainSettings) -> float:
    key = digest(described(settings, OF_RATES) | {"data": settings.data})
    if key not in COUNTED:
        COUNTED[key] = step_flops(settings, read_manifest(Path(settings.data)).vocab_size)
    return COUNTED[key]


def described(settings: PretrainSettings, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """What differs from the defaults, so that a setting that is new in a later version changes nothing."""
    lean = config.flatten(settings.model_dump(mode="json", exclude_defaults=True))
    whole = config.flatten(settings.model_dump(mode="json"))
    shown = {key: value for key, value in whole.items() if key in lean or key.endswith(".kind")}
    return {key: value for key, value in shown.items() if key not in (*UNSAID, *without)}


def digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def named(budget: Budget) -> str:
    """One name for each, however it was typed."""
    short = re.sub(r"e\+0*", "e", f"{budget.amount:g}")
    return f"{short if float(short) == budget.amount else budget.amount} {budget.unit}"


@dataclass(frozen=True)
class Arm:
    """A side with a budget and a rate: a row of the table, and a run for each seed."""

    side: str
    base: str
    budget: str
    rate: float
    rate_from: str
    identity: str
    """Of its settings but for the rate: whose screen it is."""
    key: str
    steps: int
    tokens: int
    flops: float
    stages: tuple[Variant, ...]
    """One, or two of which the second begins with the first."""
    words: tuple[str, ...]
    """Settings that the command gave to all sides."""

    def for_row(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("side", "base", "budget", "words", "rate", "rate_from", "key")}


@dataclass(frozen=True)
class Claim:
    """What is asked for. `rates` are given for some sides, `screened` for all of them."""

    family: str
    base: str
    words: tuple[str, ...]
    method: Mapping[str, str]
    runs: Mapping[str, Record]
    rates: Mapping[str, float]
    screened: Sequence[float] | None

    def settings(self, recipe: str, words: Sequence[str] = ()) -> PretrainSettings:
        return resolve(recipe, [*self.words, *words, "run=x"])[0]

    def identity(self, recipe: str, words: Sequence[str] = (), without: tuple[str, ...] = OF_RATES) -> str:
        settings = self.settings(recipe, words)
        manifest = read_manifest(Path(settings.data))
        shards = [manifest.tokenizer_sha256, *(shard.sha256 for shard in manifest.splits["train"].shards)]
        method = {key: value for key, value in self.method.items() if key != "data"}
        return digest({"settings": described(settings, without), "shards": shards, "finetune": method})

    def arms(self, side: str, budget: str) -> list[Arm]:
        recipe, words = families(self.base)[self.family][side]
        if side == TWO_STAGE:
            words = (*words, *FIRST_STAGE)
        rates = [(rate, "screen") for rate in self.screened or ()] or [self.rate(side, recipe, words)]
        return [self.arm(side, recipe, words, budget, *rated) for rated in rates]

    def rate(self, side: str, recipe: str, words: Sequence[str] = ()) -> tuple[float, str]:
        """And where it is from."""
        settings = self.settings(recipe, words)
        if side in self.rates:
            return self.rates[side], "given"
        if any(word.startswith("optimizer.lr=") for word in (*self.words, *words)):
            return settings.optimizer.lr, "given"
        if self.family == "paper":
            return settings.optimizer.lr, "recipe"
        if screen := claim_rows.screen_of(self.runs, self.identity(recipe, words)):
            return screen.best, screen.said()
        other, addition = ("BERT", "+masked-lm") if settings.objective.kind == "masked_lm" else ("ELECTRA", "")
        if screen := claim_rows.screen_of(self.runs, self.identity(f"{self.base}{addition}")):
            return screen.best, f"{other}'s {screen.said()}"
        return settings.optimizer.lr, "recipe"

    def arm(self, side: str, recipe: str, words: Sequence[str], budget: str, rate: float, rate_from: str) -> Arm:
        whole = parse_budget(budget)
        stages = [(recipe, (*words, f"optimizer.lr={rate:g}"), self.identity(recipe, words))]
        if side == TWO_STAGE:
            first = f"{self.base}+masked-lm"
            lr, _ = self.rate("BERT", first)
            stages.insert(0, (first, (f"optimizer.lr={lr:g}",), self.identity(first)))
        part = whole._replace(amount=whole.amount / len(stages))
        variants, counts, keys = [], [], []
        for stage, own, _ in stages:
            variant = Variant(stage, stage, (*self.words, *own), part, stage)
            if self.family == "paper":  # as shipped: no step of its schedule moves with the budget
                variant = variant._replace(overrides=(*variant.overrides, f"train.steps={round(whole.amount)}"))
            settings = resolve(stage, [*variant.overrides, "run=x"])[0]
            steps = max(1, round(part.amount / cost(settings, part)))
            if len(stages) > 1:  # all of it in the second too, where a start would have a tenth
                decay = decay_of(settings.model_copy(update={"start": ""}), steps)
                variant = variant._replace(overrides=(*variant.overrides, f"optimizer.weight_decay={decay:.4g}"))
            counts.append((steps, steps * settings.train.batch * settings.rows.length, steps * counted(settings)))
            rated = self.identity(stage, variant.overrides, ())
            keys.append(digest({"settings": rated, "budget": list(part)}))
            variants.append(variant)
        key = keys[0] if len(keys) == 1 else digest({"stages": keys})
        last = *keys[:-1], key
        named = [it._replace(name=f"{it.recipe}, {budget}, {own}") for it, own in zip(variants, last, strict=True)]
        identity = digest({"stages": [it for _, _, it in stages]}) if len(stages) > 1 else stages[0][2]
        steps, tokens, flops = (sum(column) for column in zip(*counts, strict=True))
        return Arm(
            side, self.base, budget, rate, rate_from, identity, key, steps, tokens, flops, tuple(named), self.words[1:]
        )


@dataclass(frozen=True)
class Work:
    """A run, and what it is measured by. `more` are tasks that do not count for the mean, with one seed."""

    arm: Arm
    seed: int
    out: Path
    tasks: Tasks | None
    more: Tasks | None
    yardstick: Path | None

    @property
    def key(self) -> str:
        return f"{self.arm.key}-{self.seed}"

    @property
    def finetunings(self) -> dict[str, int]:
        """How many seeds each task is asked for."""
        return {task: tasks.seeds for tasks in (self.more, self.tasks) if tasks for task in tasks.names}

    def covers(self, other: "Work") -> bool:
        return all(self.finetunings.get(task, 0) >= seeds for task, seeds in other.finetunings.items())

    def is_measured(self, runs: Mapping[str, Record]) -> bool:
        if self.key not in runs:
            return False
        run = claim_rows.stored_run(runs[self.key])
        return run.diverged or all(len(run.tasks.get(task, ())) >= seeds for task, seeds in self.finetunings.items())


def measure(work: Work) -> Record | str:
    """What is said meanwhile is in output.txt of the run's folder. A string says why there is no result."""
    folder = folder_of(work.out / "runs", work.arm.stages[-1], work.seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("a") as output, redirect_stdout(output), redirect_stderr(output):
        logging.basicConfig(stream=output, level=logging.INFO, format="%(message)s", force=True)
        return measured(work, folder)


def folder_of(out: Path, variant: Variant, seed: int) -> Path:
    return out / folder_names([variant.name])[variant.name] / f"seed-{seed}"


def measured(work: Work, folder: Path) -> Record | str:
    *before, variant = work.arm.stages
    first = None
    for stage in before:
        first = first_stage(stage, work)
        if isinstance(first, str):
            return first
        source = config.toml_value(str(folder_of(work.out / "first-stage", stage, work.seed) / "run"))
        words = [word for word in variant.overrides if word not in FIRST_STAGE]
        variant = variant._replace(overrides=(*words, f"generator.source={source}", f"start={source}"))
    result = run_job_if_it_fits(job_of(variant, work.seed, folder, work.tasks))
    if isinstance(result, str):
        return result
    settings = resolve(variant.recipe, [*variant.overrides, "run=x"])[0]
    if settings.masking.share != PAPER_SHARE:  # the paper's count has 15 % of the positions for all
        vocabulary = read_manifest(Path(settings.data)).vocab_size
        paper = paper_flops(with_steps(settings, result.steps), vocabulary, corrected=True)
        result = replace(result, paper_flops=paper)
    record: Record = {
        "arm": work.arm.key,
        **{key: getattr(work.arm, key) for key in ("side", "budget", "rate", "rate_from", "identity", "tokens")},
        "objective": settings.objective.kind,
        "mean_of": list(work.tasks.names) if work.tasks else [],
        "weight_decay": decay_of(settings, result.steps),
        "finetune": {
            key: value for key, value in (work.tasks.overrides if work.tasks else {}).items() if key != "data"
        },
        **{key: value for key, value in machine.description().items() if key in ("date", "gpu", "torch")},
    }
    run = folder / "run"
    if not result.diverged:
        if work.more:
            result = replace(result, tasks=result.tasks | scores(run, work.more, folder / "finetune-more"))
        if work.tasks and "cola" in work.tasks.names and (ranked := ranking(run, str(work.tasks.overrides["data"]))):
            record["ranking"] = ranked
        if work.yardstick and (seen := judged(run, work.yardstick, Path(settings.data))):
            record["yardstick"] = seen
    return record | {"run": asdict(together(first, result) if first else result)}


def scores(run: Path, tasks: Tasks, out: Path) -> dict[str, list[float]]:
    """Of tasks that do not count for the mean, seed by seed."""
    found = finetune(run, list(tasks.names), tasks.overrides, out, tasks.seeds, tasks.jobs)["tasks"]
    by_seed = {name: task["scores"]["dev"].items() for name, task in found.items()}
    return {
        name: [100 * it[found[name]["metric"]] for seed, it in pairs if seed.startswith("seed")]
        for name, pairs in by_seed.items()
    }


def job_of(variant: Variant, seed: int, folder: Path, tasks: Tasks | None) -> Job:
    names = {name: make_plan(name, dict(tasks.overrides), {}).name for name in tasks.names} if tasks else {}
    return Job(variant, seed, folder, Yardsticks(tasks=tasks), names)


def first_stage(variant: Variant, work: Work) -> ComparedRun | str:
    """Two rates of a screen begin with the same network: whoever comes second waits for it."""
    folder = folder_of(work.out / "first-stage", variant, work.seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "waiting").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return run_job_if_it_fits(job_of(variant, work.seed, folder, None))


def together(first: ComparedRun, second: ComparedRun) -> ComparedRun:
    """What both stages cost."""
    costs = {name: (getattr(first, name), getattr(second, name)) for name in COSTS}
    return replace(second, **{name: sum(both) for name, both in costs.items() if None not in both})


def judged(run: Path, generator: Path, data: Path) -> dict[str, Any] | None:
    try:
        trained, _ = evaluate_run(run, data, generator=generator)
    except DataError as error:  # a masked language model detects nothing
        log.info("no yardstick: %s", error)
        return None
    config_file = (generator / "config.toml").read_bytes()
    return {"auc": trained["auc"], "by": hashlib.sha256(config_file).hexdigest()[:12]}


def publish(
    name: str, family: str, arms: Sequence[Arm], fresh: Mapping[str, Record]
) -> tuple[list[Row], dict[str, Any]]:
    """What was measured and the rows that follow, beside all that is there already, whoever wrote it meanwhile."""
    with machine.alone():
        before = machine.read(name)
        runs = before.get("runs", {}) | dict(fresh)
        made = [row for arm in arms if (row := claim_rows.row(arm.for_row(), runs))]
        whole = written(name, before, runs, {family: made})
    return whole["families"].get(family, []), whole


def written(
    name: str, before: Mapping[str, Any], runs: Mapping[str, Record], made: Mapping[str, Sequence[Row]]
) -> dict[str, Any]:
    stored = dict(before.get("families", {}))
    for it in (it for rows in (*stored.values(), *made.values()) for it in rows):
        if it["runs"][0] in runs:  # earlier versions did not say it
            it.setdefault("finetune", runs[it["runs"][0]]["finetune"])
    for family, rows in made.items():
        order = list(families("")[family.removesuffix(SCREEN)])
        if joined := claim_rows.joined(family, stored.get(family, ()), rows, order):
            stored[family] = joined
    whole = {"runs": dict(runs), "families": stored, "screens": claim_rows.screens(runs)}
    if saved := claim_rows.saving(stored.get("compute", ())):
        whole["saving"] = saved
    if runs:
        machine.write(name, whole)
    return whole


def merge(name: str, files: Sequence[str]) -> None:
    for file in files:
        other = read_object(Path(file))
        with machine.alone():
            before = machine.read(name)
            runs = before.get("runs", {}) | other.get("runs", {})
            written(name, before, runs, other.get("families", {}))
        print(f"{file}: {len(other.get('runs', {}))} runs; {len(runs)} in all")


def report(out: Path, rows: Sequence[Row], whole: Mapping[str, Any]) -> None:
    results = claim_rows.runs_of(rows, whole["runs"])
    if not results:
        return
    text = f"{comparison_table(results).markdown()}\n\n{claim_rows.table(rows).markdown()}\n"
    if out.name == "compute" and "saving" in whole:
        text += "\n" + claim_rows.saving_text(whole["saving"]) + "\n"
    edges = [it for it in whole["screens"] if it["edge"] and it["side"] in {row["side"] for row in rows}]
    for it in edges:
        beyond = it["best"] * (2 if it["edge"] == "highest" else 0.5)
        text += f'\n{it["side"]}: {it["best"]:g} is the {it["edge"]} rate tried. Go further: --only "{it["side"]}" --rates {beyond:g}\n'
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "comparison.md", text.encode())
    plot_comparison(out / "comparison.png", results)
    print(text)


def plan_table(works: Sequence[Work], electra: PretrainSettings, given: argparse.Namespace) -> Table:
    """Every run that is missing, and what it might take."""
    device = given.speed * counted(electra) / (electra.train.batch * electra.rows.length)
    lines, alone, beside = [], 0.0, 0.0
    for work in works:
        finetuning = sum(finetuning_steps(tasks) for tasks in (work.tasks, work.more) if tasks)
        training, other = work.arm.flops / device, finetuning / given.finetuning_speed + START * len(work.arm.stages)
        alone, beside = alone + training, beside + other
        arm = work.arm
        cells = f"{arm.steps:,}", f"{arm.tokens:,}", f"{arm.flops:.3g}", f"{arm.rate:g} ({arm.rate_from})"
        lines.append((arm.side, arm.budget, str(work.seed), *cells, f"{training:,.0f} + {other:,.0f}"))
    jobs = given.jobs
    estimate = alone + beside if jobs == 1 else alone / SHARED_PRETRAINING + beside / (jobs * SHARED_OTHER)
    title = f"{given.family}: {len(lines)} runs are missing, about {estimate:,.0f} s of an H200 with {jobs} at a time"
    return Table(("side", "budget", "seed", "steps", "tokens", "FLOPs", "rate", "s: training + rest"), lines, title)


def finetuning_steps(tasks: Tasks) -> float:
    steps = 0.0
    for name in tasks.names:
        plan = make_plan(name, dict(tasks.overrides), {})
        steps += tasks.seeds * len(plan.splits["train"]) * plan.task.epochs / plan.method.batch
    return steps


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", help=f"{', '.join(families(''))}, several with commas; or merge")
    parser.add_argument("words", nargs="*", help="settings for all, such as train.batch=512; of merge, files")
    parser.add_argument("--data", help="prepared shards")
    parser.add_argument("--glue")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--base", help="recipe that all sides begin with")
    parser.add_argument("--only", nargs="*", default=[], metavar="SIDE")
    parser.add_argument("--tasks", nargs="*", default=list(FIVE), metavar="TASK", help="whose mean counts")
    parser.add_argument("--more-tasks", nargs="*", metavar="TASK", help="beside them, with one seed, in no mean")
    parser.add_argument("--finetune", nargs="*", default=[], metavar="KEY=VALUE", help="settings of fine-tuning")
    parser.add_argument("--task-seeds", type=int)
    parser.add_argument("--task-jobs", type=int, default=1, help="fine-tuning runs at the same time, of each run")
    parser.add_argument("--budget", help="in flops, paper flops or steps; several with commas")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0, help="stop by then, at a point that can be gone on from")
    parser.add_argument("--rates", nargs="*", type=float, metavar="RATE", help="a screen: all sides at these rates")
    parser.add_argument("--rate", nargs="*", default=[], metavar="SIDE=RATE")
    parser.add_argument("--yardstick", type=Path, metavar="RUN", help="whose generator corrupts text for all")
    parser.add_argument("--plan", action="store_true", help="say what is missing, train nothing")
    parser.add_argument("--speed", type=float, default=SPEED, help="of --plan: tokens a second of ELECTRA, alone")
    parser.add_argument("--finetuning-speed", type=float, default=FINETUNING_STEPS, help="of --plan: steps a second")
    parser.add_argument("--name", default="claim", help="of the file under bench/results")
    given = parser.parse_intermixed_args()
    is_merge = given.family == "merge"
    if not is_merge and (unknown := [name for name in given.family.split(",") if name not in families("")]):
        parser.error(f"there is no family {', '.join(unknown)}; there are {', '.join(families(''))}")
    needed = () if is_merge else ("data", "glue", "out")
    if missing := [f"--{name}" for name in needed if not (getattr(given, name) or (name == "out" and given.plan))]:
        parser.error(f"give {' and '.join(missing)}")
    if is_merge and not given.words:
        parser.error("merge what? Name files that another machine has written")
    return given


def one_by_one(given: argparse.Namespace) -> list[argparse.Namespace]:
    """What is asked of each family, with what it usually has where nothing is said."""
    questions = []
    for family in given.family.split(","):
        usual = DEFAULTS[family]
        if given.rates is not None:
            usual = usual._replace(seeds=1, task_seeds=1, more=())
        filled = {"more_tasks" if name == "more" else name: value for name, value in usual._asdict().items()}
        said = {name: value for name, value in vars(given).items() if value is not None}
        questions.append(argparse.Namespace(**{**vars(given), **filled, **said, "family": family}))
    sides = {side for it in questions for side in families("")[it.family]}
    if unknown := {*given.only, *(word.rsplit("=", 1)[0] for word in given.rate)} - sides:
        sys.exit(f"{given.family} has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(sides))}.")
    return questions


def asked(given: argparse.Namespace) -> tuple[Claim, list[Arm], list[Work]]:
    """What the command asks for, the arms of it in the order of the table, the runs with all arms of a seed before the next seed."""
    method = {"evaluations": "1", **dict(word.split("=", 1) for word in given.finetune), "data": given.glue}
    family = families(given.base)[given.family]
    rates = {side: float(rate) for side, rate in (word.rsplit("=", 1) for word in given.rate)}
    parsed = [parse_budget(text) for text in given.budget.split(",")]
    budgets = [named(it) for it in parsed]
    if "seconds" in {it.unit for it in parsed}:
        sys.exit(f"--budget {given.budget}: in flops, paper flops or steps, from which the weight decay follows.")
    words = (f"data={config.toml_value(given.data)}", *given.words)
    base = resolve(given.base, [*words, "run=x"])[0]
    screened = given.rates
    if screened == []:
        screened = [factor * base.optimizer.lr for factor in FACTORS]
    runs = machine.read(given.name).get("runs", {})
    claim = Claim(given.family, given.base, words, method, runs, rates, screened)
    sides = [side for side in family if not given.only or side in given.only]
    arms = [arm for side in sides for budget in budgets for arm in claim.arms(side, budget)]
    tasks = Tasks(tuple(given.tasks), method, given.task_seeds, given.task_jobs) if given.tasks else None
    more = Tasks(tuple(given.more_tasks), method, 1, given.task_jobs) if given.more_tasks else None
    for name in (*given.tasks, *given.more_tasks):
        make_plan(name, method, {})  # reads its tables: what is wrong is said now
    longest_first = sorted(arms, key=lambda arm: -len(arm.stages))
    out = given.out.absolute() if given.out else Path()
    return (
        claim,
        arms,
        [Work(arm, seed, out, tasks, more, given.yardstick) for seed in range(given.seeds) for arm in longest_first],
    )


def run(given: argparse.Namespace) -> None:
    questions = {f"{it.family}{SCREEN}" if it.rates is not None else it.family: it for it in one_by_one(given)}
    answers = {label: asked(question) for label, question in questions.items()}
    missing: dict[str, Work] = {}
    for claim, _, works in answers.values():
        for work in works:
            if not work.is_measured(claim.runs) and (work.key not in missing or work.covers(missing[work.key])):
                missing[work.key] = work
    if given.plan:
        (label, (claim, _, _)), *_ = answers.items()
        table = plan_table(list(missing.values()), claim.settings(questions[label].base), given)
        print(f"{table.title}\n{table.markdown() if missing else ''}")
        return
    wanted = {work.key for _, _, works in answers.values() for work in works}
    log.info("%d of %d runs are in %s.json already.", len(wanted) - len(missing), len(wanted), given.name)
    published = {label: publish(given.name, label, arms, {}) for label, (_, arms, _) in answers.items()}
    jobs = [(work,) for work in missing.values()]
    problems, done, began = [], 0, time.monotonic()
    try:
        with Signals() as signals:
            for key, result in run_jobs(measure_one, jobs, given.jobs, signals, thread_share(given.jobs)):
                if isinstance(result, str):
                    log.warning(result)
                    problems.append(result)
                    continue
                done += 1
                log.info("%s", finished_line(result, done, len(missing), time.monotonic() - began))
                for label, (_, arms, _) in answers.items():
                    if any(arm.key == result["arm"] for arm in arms):
                        published[label] = publish(given.name, label, arms, {key: result})
    finally:
        for label, (rows, whole) in published.items():
            report(given.out / label, rows, whole)
    if problems:
        raise MemoryExhaustedError(
            f"{len(problems)} of {len(missing)} runs did not fit, the others are kept. {problems[0]}"
        )


def measure_one(work: Work) -> tuple[str, Record | str]:
    return work.key, measure(work)


def finished_line(record: Record, done: int, count: int, seconds: float) -> str:
    run = claim_rows.stored_run(record)
    mean = claim_rows.mean(record)
    end = (
        "diverged"
        if run.diverged
        else f"{run.steps:,} steps" + (f", mean of tasks {mean:.1f}" if mean is not None else "")
    )
    left = f"; {done} of {count} done, ETA {duration(seconds / done * (count - done))}"
    return f"{record['side']}, {record['budget']}, rate {record['rate']:g}, seed {run.seed}: {end}{left}"


def main() -> None:
    given = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if given.seconds:
        timer = threading.Timer(given.seconds, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()
    try:
        merge(given.name, given.words) if given.family == "merge" else run(given)
    except ElectraError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
