"""The paper's comparisons at a small scale: the same FLOPs for every run, several seeds, held-out AUC and a probe.

    python bench/objectives.py --data SHARDS --table sst2/train.jsonl.zst --text sentence --label label --out DIR

Four families: the paper's Table 5, generator sizes, sharing of weights, and ways to train the generator. Writes a table and
a plot for each, and results.json with every run. Figures: docs/evidence.md.
"""

import argparse
import json
import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import machine
from electra.data.tokenizer import load_tokenizer
from electra.inspector.compare import (
    Budget,
    ComparedRun,
    LabelledTexts,
    Variant,
    comparison_table,
    parse_budget,
    plot_comparison,
    probe_accuracy,
    read_labelled,
    run_comparison,
    summary,
)
from electra.interop.read import Pretrained
from electra.pretraining.settings import build_objective, resolve

BASE = str(Path(__file__).with_name("objectives.toml"))
FULL = ("generator.width=1.0", "generator.depth=1.0")
FAMILIES: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "table5": {
        "ELECTRA": (BASE, ()),
        "All-Tokens MLM": (f"{BASE}+all-tokens", ()),
        "Replace MLM": (f"{BASE}+replace-mlm", ()),
        "ELECTRA 15 %": (f"{BASE}+electra-15", ()),
        "BERT": (f"{BASE}+masked-lm", ()),
    },
    "sizes": {
        "generator 1/8": (BASE, ("generator.width=0.125",)),
        "ELECTRA": (BASE, ()),
        "generator 1/2": (BASE, ("generator.width=0.5",)),
        "generator 1": (BASE, ("generator.width=1.0",)),
    },
    "sharing": {
        "share none": (BASE, (*FULL, "generator.sharing=none")),
        "share embeddings": (BASE, (*FULL, "generator.sharing=tied")),
        "share disentangled": (BASE, (*FULL, "generator.sharing=gdes")),
        "share all": (BASE, (*FULL, "generator.sharing=all")),
    },
    "training": {
        "ELECTRA": (BASE, ()),
        "adversarial": (f"{BASE}+adversarial", ()),
        "two-stage": (f"{BASE}+two-stage", ()),
    },
}


def two_stages(second: Variant, given: argparse.Namespace, budget: Budget, table: LabelledTexts) -> list[ComparedRun]:
    """Half of the budget for one masked language model of full size, half for discriminators that begin with it."""
    half = Budget(budget.unit, budget.amount / 2)
    first = Variant("masked-lm", f"{BASE}+masked-lm", second.overrides)
    (stage,) = run_comparison([first], 1, half, None, 1, given.out / "first-stage")
    source = given.out / "first-stage" / "masked-lm" / "seed-0" / "run"
    sources = (f'generator.source="{source}"', f'start="{source}"')
    second = second._replace(overrides=(*second.overrides, *sources))
    results = run_comparison([second], given.seeds, half, table, given.jobs, given.out / "second-stage")
    return [replace(result, flops=stage.flops + result.flops) for result in results]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="settings for all, such as encoder.layers=4")
    parser.add_argument("--data", required=True)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--text", default="sentence")
    parser.add_argument("--label", default="label")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", default="1.2e14 flops")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    given = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    table = read_labelled(given.table, given.text, given.label, 8000)
    chosen = {
        name: Variant(name, recipe, (f"data={given.data}", *given.words, *words))
        for family in given.families
        for name, (recipe, words) in FAMILIES[family].items()
    }
    budget = parse_budget(given.budget)
    joint = [variant for name, variant in chosen.items() if name != "two-stage"]
    results = run_comparison(joint, given.seeds, budget, table, given.jobs, given.out)
    if "two-stage" in chosen:
        results += two_stages(chosen["two-stage"], given, budget, table)

    tokenizer = load_tokenizer(Path(given.data))
    untrained = []
    for seed in range(given.seeds):
        settings, _ = resolve(BASE, [f"data={given.data}", f"seed={seed}", *given.words])
        encoder = build_objective(settings, tokenizer).networks()["discriminator"].encoder
        network = Pretrained(encoder.eval(), None, "encoder", tokenizer)
        untrained.append(probe_accuracy(table, network, settings.rows.length))
    print("untrained probe:", untrained)

    report = {"machine": machine.description(), "budget": given.budget, "untrained_probe": untrained, "families": {}}
    for family in given.families:
        mine = [result for name in FAMILIES[family] for result in results if result.variant == name]
        report["families"][family] = summary(mine)
        print(f"\n{family}\n{comparison_table(mine).markdown()}", flush=True)
        if find_spec("matplotlib"):
            plot_comparison(given.out / f"{family}.png", mine)
    (given.out / "results.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
