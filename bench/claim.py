"""The paper's comparisons, all in one place: the same FLOPs for every run, several seeds, fine-tuned scores.

    python bench/claim.py table5 --data SHARDS --glue GLUE --out FOLDER [--budget "1.6e16 flops"] [--seeds 2] [--jobs 3] [--seconds 540]
    python bench/claim.py compute --budget "4e15 flops, 8e15 flops, 1.6e16 flops, 3.2e16 flops" …
    python bench/claim.py table5 --rates …       three learning rates for each side, in short runs: give it a smaller --budget
    python bench/claim.py table5 --rate BERT=1.5e-3 …       what a side wants instead of the recipe's

Families: the paper's Table 5 (with BERT at two masking shares), score against compute, generators, sharing of weights, ways to train, and
what came after ELECTRA. `--only` takes some sides of a family, `--base modern-tiny` is small enough for a CPU.

The weight decay follows the steps, so that rate x decay x steps is the recipe's whatever the budget: without, short runs of modern-small
lose points in fine-tuning. Stopped at any moment, by `--seconds` or by kill, the same command goes on; finished runs are kept. After each
stop FOLDER/FAMILY/comparison.md and bench/results/claim.json hold what is finished, of all families so far. `--jobs` sides share the
device (start CUDA's MPS first). 0.3 B tokens of modern-small by ELECTRA are 2.1e16 FLOPs.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import machine
from electra.base.errors import ElectraError
from electra.base.jobs import ending_at_signals, preempted
from electra.data.shards import read_manifest
from electra.inspector.compare import (
    STORED_RUN,
    ComparedRun,
    Tasks,
    Variant,
    Yardsticks,
    comparison_table,
    parse_budget,
    plot_comparison,
    run_comparison,
    summary,
)
from electra.pretraining.settings import PretrainSettings, resolve
from electra.pretraining.trial import step_flops

FULL = ("generator.width=1.0", "generator.depth=1.0")
SLOW = ("optimizer.decoupled=true", "optimizer.generator.lr=3e-4")
FIVE = ("cola", "sst2", "mrpc", "stsb", "rte")
SIZES = ((0.25, 1.0), (0.25, 0.25), (0.5, 0.25), (1.0, 0.25), (1.0, 0.5), (1.0, 1.0))
FACTORS = (0.5, 1.0, 2.0)
"""Of the recipe's learning rate, for `--rates`."""
TWO_STAGE = "two-stage"
Family = dict[str, tuple[str, tuple[str, ...]]]
"""A recipe and settings for each side, by its name."""


def families(base: str) -> dict[str, Family]:
    electra, bert = (base, ()), (f"{base}+masked-lm", ())
    kinds = ("uniform", "unigram", "two-tower", "autoregressive")
    after = ("selection", "corrective", "replaced-span", "whole-word", "electric")
    return {
        "table5": {
            "ELECTRA": electra,
            "All-Tokens MLM": (f"{base}+all-tokens", ()),
            "Replace MLM": (f"{base}+replace-mlm", ()),
            "ELECTRA 15 %": (f"{base}+electra-15", ()),
            "BERT": bert,
            "BERT 30 %": (f"{base}+masked-lm", ("masking.share=0.3",)),
        },
        "compute": {"ELECTRA": electra, "BERT": bert},
        "generators": {
            **{
                f"width {width:g}, depth {depth:g}": (base, (f"generator.width={width}", f"generator.depth={depth}"))
                for width, depth in SIZES
            },
            **{name: (f"{base}+generator-{name}", ()) for name in kinds},
        },
        "sharing": {
            f"share {name}": (base, (*FULL, f"generator.sharing={name}")) for name in ("none", "tied", "gdes", "all")
        },
        "training": {
            "joint": electra,
            "adversarial": (f"{base}+adversarial", ()),
            "adversarial with likelihood": (f"{base}+adversarial", ("objective.likelihood_weight=1",)),
            "adversarial, slow generator": (f"{base}+adversarial", SLOW),
            TWO_STAGE: (f"{base}+two-stage", ()),
            "temperature 1.5 to 1": (base, ("sampling.start_temperature=1.5",)),
        },
        "after": {"ELECTRA": electra, **{name: (f"{base}+{name}", ()) for name in after}},
    }


def with_rates(family: Family, lr: float) -> Family:
    return {
        f"{name}, {factor * lr:g}": (recipe, (*words, f"optimizer.lr={factor * lr:g}"))
        for name, (recipe, words) in family.items()
        for factor in FACTORS
    }


def with_decay(variant: Variant, base: PretrainSettings) -> Variant:
    """Rate x decay x steps as in the base recipe, unless a decay is given."""
    if any(word.startswith("optimizer.weight_decay=") for word in variant.overrides):
        return variant
    is_second = variant.series == TWO_STAGE
    settings, _ = resolve(variant.recipe, [*variant.overrides, "run=x", *(["generator.source=x"] if is_second else [])])
    cost = step_flops(settings, read_manifest(Path(settings.data)).vocab_size) if variant.budget.unit == "flops" else 1
    steps = variant.budget.amount / cost / (2 if is_second else 1)
    decay = base.optimizer.lr * base.optimizer.weight_decay * base.train.steps / (settings.optimizer.lr * steps)
    return variant._replace(overrides=(f"optimizer.weight_decay={decay:.3g}", *variant.overrides))


def two_stages(second: Variant, base: str, seeds: int, yardsticks: Yardsticks, jobs: int, out: Path) -> None:
    """Half of the budget for one masked language model of full size, half for discriminators that begin with it."""
    half = second.budget._replace(amount=second.budget.amount / 2)
    first = Variant("masked-lm", f"{base}+masked-lm", second.overrides, half, "masked-lm")
    run_comparison([first], 1, Yardsticks(), 1, out / "first-stage")
    source = out / "first-stage" / "masked-lm" / "seed-0" / "run"
    words = f'generator.source="{source}"', f'start="{source}"'
    begun = second._replace(budget=half, overrides=(*second.overrides, *words))
    run_comparison([begun], seeds, yardsticks, jobs, out / "second-stage")


def publish(out: Path, order: list[str], budget: str, name: str) -> None:
    """What is finished, whoever finished it and whenever."""
    results: list[ComparedRun] = []
    stages = [stored(path) for path in out.glob("first-stage/*/*/result.json")]
    for path in (*out.glob("*/seed-*/result.json"), *out.glob("second-stage/*/seed-*/result.json")):
        run = stored(path)
        results.append(replace(run, flops=run.flops + stages[0].flops) if run.series == TWO_STAGE else run)
    results.sort(key=lambda run: (order.index(run.series), run.flops, run.seed))
    if not results:
        return
    table = comparison_table(results).markdown()
    (out / "comparison.md").write_text(table, "utf-8")
    plot_comparison(out / "comparison.png", results)
    path = machine.RESULTS / f"{name}.json"
    before = json.loads(path.read_text("utf-8")).get("families", {}) if path.is_file() else {}
    machine.write(name, {"families": before | {out.name: {"budget": budget, "variants": summary(results)}}})
    print(table)


def stored(path: Path) -> ComparedRun:
    return STORED_RUN.validate_python(json.loads(path.read_text("utf-8")))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=families(""))
    parser.add_argument("words", nargs="*", help="settings for all, such as train.batch=512")
    parser.add_argument("--data", required=True)
    parser.add_argument("--glue", required=True)
    parser.add_argument("--base", default="modern-small", help="recipe that all sides begin with")
    parser.add_argument("--only", nargs="*", default=[], metavar="SIDE")
    parser.add_argument("--tasks", nargs="*", default=list(FIVE))
    parser.add_argument("--finetune", nargs="*", default=[], metavar="KEY=VALUE", help="settings of fine-tuning")
    parser.add_argument("--task-seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", default="1.6e16 flops", help="several with commas")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0, help="stop by then, at a point that can be gone on from")
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--rate", nargs="*", default=[], metavar="SIDE=RATE")
    parser.add_argument("--name", default="claim", help="of the file under bench/results")
    return parser.parse_intermixed_args()


def main() -> None:
    given = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if given.seconds:
        timer = threading.Timer(given.seconds, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()

    method = {"data": given.glue, **dict(word.split("=", 1) for word in given.finetune)}
    yardsticks = Yardsticks(tasks=Tasks(tuple(given.tasks), method, given.task_seeds))
    base, _ = resolve(given.base, [f"data={given.data}", "run=x"])
    family = families(given.base)[given.family]
    rates = dict(word.rsplit("=", 1) for word in given.rate)
    if unknown := {*given.only, *rates} - family.keys():
        sys.exit(f"{given.family} has no {', '.join(sorted(unknown))}; it has {', '.join(family)}.")
    sides = {name: side for name, side in family.items() if not given.only or name in given.only}
    if given.rates:
        family, sides = (with_rates(it, base.optimizer.lr) for it in (family, sides))
    budgets = {text.strip(): parse_budget(text) for text in given.budget.split(",")}
    if not {budget.unit for budget in budgets.values()} <= {"flops", "steps"}:
        sys.exit(f"--budget {given.budget}: in flops or steps, from which the weight decay follows.")
    chosen = []
    for name, (recipe, words) in sides.items():
        rate = [f"optimizer.lr={rates[name]}"] if name in rates else []
        overrides = (f"data={given.data}", *given.words, *rate, *words)
        for text, budget in budgets.items():
            whole = name if len(budgets) == 1 else f"{name}, {text}"
            chosen.append(with_decay(Variant(whole, recipe, overrides, budget, name), base))

    out = given.out / (f"{given.family}-rates" if given.rates else given.family)
    joint = [variant for variant in chosen if variant.series != TWO_STAGE]
    try:
        with ending_at_signals(preempted):
            run_comparison(joint, given.seeds, yardsticks, given.jobs, out)
            for variant in chosen:
                if variant.series == TWO_STAGE:
                    two_stages(variant, given.base, given.seeds, yardsticks, given.jobs, out)
    except ElectraError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    finally:
        publish(out, list(family), given.budget, given.name)


if __name__ == "__main__":
    main()
