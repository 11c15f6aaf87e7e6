"""Does the fast step learn what the plain one does? The same network on the same real text, both ways, with two seeds.

Part of throughput.py (--loss-curves SHARDS). Rows, their order and the chosen positions are the same in all runs; a seed is
the first weights and the dropout. So the two seeds show how far apart runs are that differ in nothing that matters, and the
fast and the plain run of a seed must not be further apart than that. Their dropout differs too (compiled code draws other
numbers), so the first steps are also compared without dropout, where only rounding is left.
"""

import gc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

import machine
from electra.data.rows import RowsSettings
from electra.data.shards import read_manifest
from electra.objectives import Trainable
from electra.objectives.corruption import MaskingSettings
from electra.objectives.metrics import summarise
from electra.pretraining.run import build_parts
from electra.pretraining.settings import PretrainSettings
from electra.train.device import choose_device
from electra.train.optimizers import OptimizerSettings
from electra.train.settings import ScheduleSettings, TrainSettings, rate_fraction
from electra.train.step import Execution, build_step
from pretraining_steps import SIZES, Case

SEEDS = (0, 1)
WAYS = {"fast": "auto", "plain": "off"}
LOSSES = ("mlm_loss", "rtd_loss")
EVERY, FIRST = 10, 5
Curve = dict[str, list[float]]


def settings_of(shards: str, case: Case, steps: int, seed: int, fast: str) -> PretrainSettings:
    size = SIZES[case.size]
    return PretrainSettings(
        data=shards,
        run="unused",
        seed=seed,
        encoder=case.encoder,
        generator=size.generator,
        masking=MaskingSettings(share=size.share),
        rows=RowsSettings(length=case.length),
        train=TrainSettings.model_validate({"steps": steps, "batch": case.rows, "fast": fast}),
        optimizer=OptimizerSettings(),
        schedule=ScheduleSettings(kind="linear", warmup=max(1, steps // 10)),
    )


def curve(
    settings: PretrainSettings,
    loader: Any,
    stop: int,
    every: int,
    objective: Trainable | None = None,
    keep: Callable[[Curve], object] = lambda found: None,
) -> Curve:
    """The losses over each `every` steps, up to step `stop`. `objective`: where it is not that of the settings. `keep` is given
    what there is after each `every` steps."""
    torch.compiler.reset()
    gc.collect()
    device = choose_device(settings.train)
    objective = (objective or build_parts(settings, device, verify=False).objective).to(device).train()
    step = build_step(objective, settings.optimizer_of_run(), Execution.of(settings.train, device), settings.seed)
    found: Curve = {name: [] for name in LOSSES}
    totals: dict[str, torch.Tensor] = {}
    for number in range(stop):
        share = rate_fraction(settings.schedule, number, settings.train.steps)
        sums, _ = step(loader.batch_at(number), number, share)
        totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
        if (number + 1) % every == 0:
            metrics = summarise(totals)
            for name in LOSSES:
                found[name].append(metrics[name])
            totals = {}
            keep(found)
    return found


def difference(one: Curve, other: Curve) -> dict[str, float]:
    pairs = {name: list(zip(one[name], other[name], strict=True)) for name in LOSSES}
    return {name: sum(abs(a - b) for a, b in both) / len(both) for name, both in pairs.items()}


def loss_curves(shards: str, case: Case, steps: int, out: str) -> None:
    plain = settings_of(shards, case, steps, 0, "off")
    loader = build_parts(plain, choose_device(plain.train)).loader
    curves = {
        (way, seed): curve(settings_of(shards, case, steps, seed, fast), loader, steps, EVERY)
        for seed, (way, fast) in product(SEEDS, WAYS.items())
    }
    quiet = Case(case.size, case.rows, case.length, 0.0)
    first = {way: curve(settings_of(shards, quiet, steps, 0, fast), loader, FIRST, 1) for way, fast in WAYS.items()}
    runs = list(curves)
    print("step " + "".join(f"{f'{way} {seed}: mlm, rtd':>22}" for way, seed in runs))
    for place in range(steps // EVERY):
        values = "".join(
            f"{curves[run]['mlm_loss'][place]:12.4f}{curves[run]['rtd_loss'][place]:10.4f}" for run in runs
        )
        print(f"{(place + 1) * EVERY:4} {values}")
    by_way = {seed: difference(curves["fast", seed], curves["plain", seed]) for seed in SEEDS}
    by_seed = {way: difference(*(curves[way, seed] for seed in SEEDS)) for way in WAYS}
    print("mean absolute differences:")
    for title, found in [(f"fast and plain, seed {seed}", by_way[seed]) for seed in SEEDS] + [
        (f"the two seeds, {way}", by_seed[way]) for way in WAYS
    ]:
        print(f"  {title:24}" + "".join(f"{name:>10} {value:.2e}" for name, value in found.items()))
    print(f"the first {FIRST} steps without dropout, plain, and fast less plain:")
    for name in LOSSES:
        gaps = [f"{b:.5f} {a - b:+.1e}" for a, b in zip(first["fast"][name], first["plain"][name], strict=True)]
        print(f"  {name:10}" + "   ".join(gaps))
    picture = draw(curves, machine.RESULTS / f"{out}.png")
    text = {
        "tokens": read_manifest(Path(shards)).splits["train"].tokens,
        "vocabulary": read_manifest(Path(shards)).vocab_size,
    }
    shape = {"size": case.size, "rows": case.rows, "length": case.length, "dropout": case.dropout}
    machine.write(
        out,
        {
            "shape": shape | {"steps": steps, "every": EVERY},
            "text": text,
            "curves": {f"{way}, seed {seed}": found for (way, seed), found in curves.items()},
            "fast_and_plain": {f"seed {seed}": found for seed, found in by_way.items()},
            "two_seeds": by_seed,
            "first_steps_without_dropout": first,
            "picture": picture,
        },
    )


def draw(curves: dict[tuple[str, int], Curve], path: Path) -> str | None:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no picture")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(LOSSES), figsize=(11, 4))
    for axis, name in zip(axes, LOSSES, strict=True):
        for (way, seed), found in curves.items():
            steps = [EVERY * (place + 1) for place in range(len(found[name]))]
            style = "-" if way == "plain" else "--"
            axis.plot(steps, found[name], style, color=f"C{seed}", label=f"{way}, seed {seed}")
        axis.set(xlabel="step", ylabel=name)
        axis.legend()
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path.name
