"""electra flops: what a run costs, and how long a device takes for it."""

import json
from typing import Annotated, Any

import typer

from electra.commands.console import OverrideWords, Recipe, print_table, resolve_for_looking

SHOWN_DEVICES = ("h200", "a100", "rtx 4090", "v100")


def flops(
    recipe: Recipe,
    overrides: OverrideWords = None,
    device: Annotated[
        str | None, typer.Option(help="h200, a100, v100, …; cpu is measured", show_default="a few")
    ] = None,
    tflops: Annotated[float | None, typer.Option(help="peak TFLOP/s of the device, instead of ours", min=1e-6)] = None,
    utilisation: Annotated[float, typer.Option(help="fraction of the peak that is reached", max=1)] = 0.4,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="tokens", show_default="that of data=…, else the paper's 30522", min=1, max=1 << 24),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the numbers as JSON")] = False,
) -> None:
    """Floating-point operations of a recipe, as the paper counts and as they are, and the time they take."""
    from electra.base.errors import SettingsError

    if utilisation <= 0:
        raise SettingsError(f"--utilisation {utilisation} must be above 0 and at most 1.")
    peaks = devices(device, tflops)
    result = recipe_counts(recipe, overrides or [], vocab_size) | {"utilisation": utilisation, "devices": peaks}
    for entry in peaks.values():
        steps_per_second = entry["tflops"] * 1e12 * utilisation / result["step"]
        if "minutes" in result:
            entry["steps"] = result["minutes"] * 60 * steps_per_second
        else:
            entry["hours"] = result["steps"] / steps_per_second / 3600
    print(json.dumps(result)) if as_json else show(recipe, result)


def recipe_counts(recipe: str, overrides: list[str], vocab_size: int | None) -> dict[str, Any]:
    from pathlib import Path

    from electra.data.shards import read_manifest
    from electra.pretraining.trial import PAPER_VOCABULARY, count_flops, paper_flops

    settings, _ = resolve_for_looking(recipe, overrides)
    if vocab_size is None:
        vocab_size = read_manifest(Path(settings.data)).vocab_size if settings.data else PAPER_VOCABULARY
    parts, train = count_flops(settings, vocab_size), settings.train
    step_tokens, per_token = train.batch * settings.rows.length, sum(parts.values())
    sizes = {"length": settings.rows.length, "batch": train.batch}
    flops = {"token": per_token, "step": per_token * step_tokens}
    counts: dict[str, Any] = {"vocabulary": vocab_size, **sizes, "parts": parts, **flops}
    if train.minutes:  # the number of steps depends on the device
        return counts | {"minutes": train.minutes}
    tokens = step_tokens * train.steps
    counts |= {"steps": train.steps, "tokens": tokens, "run": per_token * tokens}
    for key, corrected in (("paper_run", False), ("paper_run_corrected", True)):
        counts[key] = paper_flops(settings, vocab_size, corrected)
    return counts


def devices(name: str | None, tflops: float | None) -> dict[str, dict[str, float]]:
    from electra.base.errors import SettingsError
    from electra.pretraining.trial import MEASURED, PEAKS, known_device, measured_cpu

    if tflops is not None:
        return {name or "device": {"tflops": tflops}}
    if name == "cpu":
        return {"this processor": {"tflops": measured_cpu() / 1e12}}
    if name is not None and not known_device(name):
        known = ", ".join((*PEAKS, "cpu"))
        raise SettingsError(f"no device {name!r} in the table ({known}). Give its peak with --tflops.")
    chosen = SHOWN_DEVICES if name is None else (known_device(name),)
    return {
        key: {"tflops": PEAKS[key]} | ({"measured_tflops": MEASURED[key]} if key in MEASURED else {}) for key in chosen
    }


def show(recipe: str, result: dict[str, Any]) -> None:
    from electra.base.progress import Table
    from electra.pretraining.trial import PAPER_BERT_BASE

    step_tokens, timed = result["batch"] * result["length"], "minutes" in result

    def cells(name: str, per_token: float) -> tuple[str, ...]:
        run = () if timed else (f"{per_token * result['tokens']:.4g}",)
        return name, f"{per_token / 1e6:.2f} M", f"{per_token * step_tokens:.3g}", *run

    rows = [cells(name, value) for name, value in result["parts"].items()]
    rows += [(), cells("total", result["token"]), ()]
    names = {"paper_run": "as the paper counts", "paper_run_corrected": "   its slips corrected"}
    rows += [cells(name, result[key] / result["tokens"]) for key, name in names.items() if key in result]
    columns = ("training FLOPs, matrix products", "per token", "per step", *(() if timed else ("the run",)))
    length = f"{result['minutes']:g} minutes" if timed else f"{result['steps']:,} steps"
    size = f"{length} of {result['batch']:,} rows of {result['length']} tokens"
    print_table(Table(columns, rows, f"{recipe}: {size}, vocabulary {result['vocabulary']:,}"))
    if "paper_run" in result:
        print(f"as the paper counts: {result['paper_run'] / PAPER_BERT_BASE:.3g} times its BERT-Base")

    rows = []
    for name, entry in result["devices"].items():
        rate = entry["tflops"] * 1e12 * result["utilisation"] / result["token"]
        measured = f" ({entry['measured_tflops']:.0f} measured)" if "measured_tflops" in entry else ""
        whole = f"{entry['steps']:,.0f} steps" if timed else readable_hours(entry["hours"])
        rows.append((name, f"{entry['tflops']:.3g}{measured}", f"{rate:,.0f}", whole))
    columns = ("device", "peak TFLOP/s", "tokens/s", "the run")
    print_table(Table(columns, rows, f"time at {result['utilisation']:.0%} of the peak"))


def readable_hours(hours: float) -> str:
    units = ((48, 24, "days"), (2, 1, "hours"), (0, 1 / 60, "minutes"))
    return next(f"{hours / size:.1f} {unit}" for least, size, unit in units if hours >= least)
