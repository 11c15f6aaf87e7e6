"""The paper's comparisons, all in one place: the same FLOPs for every run, several seeds, fine-tuned scores.

    python bench/claim.py table5 --data SHARDS --glue GLUE --out FOLDER [--budget "5e16 flops"] [--seeds 2] [--jobs 2]
    python bench/claim.py compute --budget "1.2e16 flops, 2.5e16 flops, 5e16 flops, 1e17 flops" …
    python bench/claim.py table5 --rates …       which learning rate suits each side, in short runs: give it a smaller --budget

Families: the paper's Table 5 (with BERT at two masking shares), score against compute, generators, sharing of weights, ways to train, and
what came after ELECTRA. A side's own learning rate, found by `--rates`, stands in RATES. Finished runs are kept. Writes comparison.md and a plot
into FOLDER/FAMILY, and bench/results/claim.json with every family so far. 0.3 B tokens of modern-small by ELECTRA are about 2.4e16 FLOPs.
"""

import argparse
import json
import logging
from dataclasses import replace
from pathlib import Path

import machine
from electra.inspector.compare import ComparedRun, Tasks, Variant, Yardsticks, parse_budget, run_comparison, summary

BASE = "modern-small"
FULL = ("generator.width=1.0", "generator.depth=1.0")
FIVE = ("cola", "sst2", "mrpc", "stsb", "rte")
RATES: dict[str, str] = {}
"""Where a side wants another rate than the recipe's."""
TRIED = ("5e-4", "1e-3", "2e-3")
Family = dict[str, tuple[str, tuple[str, ...]]]
FAMILIES: dict[str, Family] = {
    "table5": {
        "ELECTRA": (BASE, ()),
        "All-Tokens MLM": (f"{BASE}+all-tokens", ()),
        "Replace MLM": (f"{BASE}+replace-mlm", ()),
        "ELECTRA 15 %": (f"{BASE}+electra-15", ()),
        "BERT": (f"{BASE}+masked-lm", ()),
        "BERT 30 %": (f"{BASE}+masked-lm", ("masking.share=0.3",)),
    },
    "compute": {"ELECTRA": (BASE, ()), "BERT": (f"{BASE}+masked-lm", ())},
    "generators": {
        **{
            f"{round(256 * width)} x {round(12 * depth)}": (
                BASE,
                (f"generator.width={width}", f"generator.depth={depth}"),
            )
            for width, depth in ((0.25, 1.0), (0.25, 0.25), (0.5, 0.25), (1.0, 0.25), (1.0, 0.5), (1.0, 1.0))
        },
        **{name: (f"{BASE}+generator-{name}", ()) for name in ("uniform", "unigram", "two-tower", "autoregressive")},
    },
    "sharing": {
        f"share {name}": (BASE, (*FULL, f"generator.sharing={name}")) for name in ("none", "tied", "gdes", "all")
    },
    "training": {
        "joint": (BASE, ()),
        "adversarial": (f"{BASE}+adversarial", ()),
        "two-stage": (f"{BASE}+two-stage", ()),
        "temperature 1.5 to 1": (BASE, ("sampling.start_temperature=1.5",)),
    },
    "after": {
        "ELECTRA": (BASE, ()),
        **{
            name: (f"{BASE}+{name}", ())
            for name in ("selection", "corrective", "replaced-span", "whole-word", "electric")
        },
    },
}


def with_rates(family: Family) -> Family:
    """Each side with each rate."""
    return {
        f"{name}, {rate}": (recipe, (*words, f"optimizer.lr={rate}"))
        for name, (recipe, words) in family.items()
        for rate in TRIED
    }


def two_stages(second: Variant, seeds: int, yardsticks: Yardsticks, jobs: int, out: Path) -> list[ComparedRun]:
    """Half of the budget for one masked language model of full size, half for discriminators that begin with it."""
    half = second.budget._replace(amount=second.budget.amount / 2)
    first = Variant("masked-lm", f"{BASE}+masked-lm", second.overrides, half, "masked-lm")
    (stage,) = run_comparison([first], 1, Yardsticks(), 1, out / "first-stage")
    source = out / "first-stage" / "masked-lm" / "seed-0" / "run"
    begun = second._replace(
        budget=half, overrides=(*second.overrides, f'generator.source="{source}"', f'start="{source}"')
    )
    results = run_comparison([begun], seeds, yardsticks, jobs, out / "second-stage")
    return [replace(result, flops=stage.flops + result.flops) for result in results]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("words", nargs="*", help="settings for all, such as train.batch=512")
    parser.add_argument("--data", required=True)
    parser.add_argument("--glue", required=True)
    parser.add_argument("--tasks", nargs="*", default=list(FIVE))
    parser.add_argument("--finetune", nargs="*", default=[], metavar="KEY=VALUE", help="settings of fine-tuning")
    parser.add_argument("--task-seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", default="2.4e16 flops", help="several with commas")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rates", action="store_true")
    given = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    method = {"data": given.glue, **dict(word.split("=", 1) for word in given.finetune)}
    yardsticks = Yardsticks(tasks=Tasks(tuple(given.tasks), method, given.task_seeds))
    family = with_rates(FAMILIES[given.family]) if given.rates else FAMILIES[given.family]
    out = given.out / (f"{given.family}-rates" if given.rates else given.family)
    budgets = [text.strip() for text in given.budget.split(",")]
    chosen = []
    for name, (recipe, words) in family.items():
        rate = [f"optimizer.lr={RATES[name]}"] if name in RATES else []
        overrides = (f"data={given.data}", *given.words, *rate, *words)
        for text in budgets:
            whole = name if len(budgets) == 1 else f"{name}, {text}"
            chosen.append(Variant(whole, recipe, overrides, parse_budget(text), name))
    joint = [variant for variant in chosen if variant.series != "two-stage"]
    results = run_comparison(joint, given.seeds, yardsticks, given.jobs, out)
    for variant in chosen:
        if variant.series == "two-stage":
            results += two_stages(variant, given.seeds, yardsticks, given.jobs, out)

    path = machine.RESULTS / "claim.json"
    before = json.loads(path.read_text("utf-8")).get("families", {}) if path.is_file() else {}
    machine.write("claim", {"families": before | {out.name: {"budget": given.budget, "variants": summary(results)}}})


if __name__ == "__main__":
    main()
