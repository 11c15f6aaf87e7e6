"""The verb that counts what a run costs."""

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from electra.commands.console import Overrides

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_DEVICES = ("h200", "a100", "rtx 4090", "v100")


def flops(
    recipe: Annotated[
        str | None, typer.Argument(help="a recipe; without one, the paper's figures for published models")
    ] = None,
    overrides: Overrides = None,
    device: Annotated[
        str | None, typer.Option(help="h200, a100, v100, …; cpu is measured", show_default="a few")
    ] = None,
    tflops: Annotated[
        float | None, typer.Option(help="peak of a device in TFLOP/s, instead of ours", min=1e-6)
    ] = None,
    utilisation: Annotated[float, typer.Option(help="share of the peak that is reached", max=1)] = 0.4,
    vocab_size: Annotated[
        int | None, typer.Option(help="tokens", show_default="that of data=…, else the paper's 30522", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="figures for machines")] = False,
) -> None:
    """Floating-point operations of a recipe, as the paper counts and as they are, and the time they take."""
    from rich.console import Console

    from electra.base.errors import SettingsError
    from electra.pretraining.flops import published

    if utilisation <= 0:
        raise SettingsError(f"--utilisation {utilisation} must be above 0 and at most 1.")
    if recipe is None:
        models = {"printed": published(), "corrected": published(corrected=True)}
        print(json.dumps(models)) if as_json else Console().print(published_table(models))
        return
    result = count(recipe, overrides or [], vocab_size) | {
        "utilisation": utilisation,
        "devices": devices(device, tflops),
    }
    for entry in result["devices"].values():
        entry["hours"] = result["run"] / (entry["tflops"] * 1e12 * utilisation) / 3600
    print(json.dumps(result)) if as_json else Console().print(*recipe_tables(recipe, result))


def count(recipe: str, words: list[str], vocab_size: int | None) -> dict[str, Any]:
    from pathlib import Path

    from electra.base import config
    from electra.base.errors import SettingsError
    from electra.data.shards import read_manifest
    from electra.pretraining.flops import PAPER_VOCABULARY
    from electra.pretraining.run import work
    from electra.pretraining.settings import resolve

    has_data = "data" in config.parse_overrides(words).keys() | config.read_recipe(recipe).keys()
    settings, _ = resolve(recipe, words if has_data else [*words, 'data=""'])
    if vocab_size is None:
        vocab_size = read_manifest(Path(settings.data)).vocab_size if has_data else PAPER_VOCABULARY
    task = work(settings, vocab_size)
    per_token = task.per_token()
    counts = {
        "vocabulary": vocab_size,
        "length": task.length,
        "batch": task.batch,
        "steps": task.steps,
        "tokens": task.tokens,
        "parts": task.parts(),
        "token": per_token,
        "step": per_token * task.batch * task.length,
        "run": per_token * task.tokens,
    }
    with suppress(SettingsError):  # the paper's accounting does not know every network
        counts |= {"paper_run": task.paper(), "paper_run_corrected": task.paper(corrected=True)}
    return counts


def devices(name: str | None, tflops: float | None) -> dict[str, dict[str, float]]:
    from electra.base.errors import SettingsError
    from electra.pretraining.flops import MEASURED, PEAKS, known_device, measured_cpu

    if tflops is not None:
        return {name or "device": {"tflops": tflops}}
    if name == "cpu":
        return {"this processor": {"tflops": measured_cpu() / 1e12}}
    if name is not None and not known_device(name):
        known = ", ".join((*PEAKS, "cpu"))
        raise SettingsError(f"no device {name!r} in the table ({known}). Give its peak with --tflops.")
    chosen = SHOWN_DEVICES if name is None else (known_device(name),)
    return {
        key: {"tflops": PEAKS[key]} | ({"measured_tflops": MEASURED[key]} if key in MEASURED else {})
        for key in chosen
    }


def recipe_tables(recipe: str, result: dict[str, Any]) -> "tuple[Table, Table]":
    from rich.markup import escape
    from rich.table import Table

    from electra.pretraining.flops import published

    size = f"{result['steps']:,} steps of {result['batch']:,} rows of {result['length']} tokens"
    costs = Table(title=f"{escape(recipe)}: {size}")
    costs.add_column("training FLOPs, matrix products", no_wrap=True)
    for column in ("a token", "a step", "the run"):
        costs.add_column(column, justify="right", no_wrap=True)
    tokens_a_step = result["batch"] * result["length"]
    for name, value in (result["parts"] | {"total": result["token"]}).items():
        last = name == list(result["parts"])[-1]
        row = (f"{value / 1e6:.2f} M", f"{value * tokens_a_step:.3g}", f"{value * result['tokens']:.4g}")
        costs.add_row(name, *row, end_section=last, style="bold" if name == "total" else "")
    costs.add_section()
    costs.caption = f"vocabulary {result['vocabulary']:,}"
    names = {"paper_run": "as the paper counts", "paper_run_corrected": "   its slips corrected"}
    for key, name in names.items():
        if value := result.get(key):
            row = (
                f"{value / result['tokens'] / 1e6:.2f} M",
                f"{value / result['steps']:.3g}",
                f"{value:.4g}",
            )
            costs.add_row(name, *row)
    if "paper_run" in result:
        times = result["paper_run"] / published()["bert_base"]
        costs.caption += f" · as the paper counts: {times:.3g} times its BERT-Base"

    hours = Table(title=f"time at {result['utilisation']:.0%} of the peak")
    hours.add_column("device")
    for column in ("peak TFLOP/s", "tokens/s", "the run"):
        hours.add_column(column, justify="right")
    for name, entry in result["devices"].items():
        rate = result["tokens"] / (entry["hours"] * 3600)
        measured = f" ({entry['measured_tflops']:.0f} measured)" if "measured_tflops" in entry else ""
        hours.add_row(
            name, f"{entry['tflops']:.3g}{measured}", f"{rate:,.0f}", readable_hours(entry["hours"])
        )
    return costs, hours


def readable_hours(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours:.1f} hours" if hours >= 2 else f"{hours * 60:.1f} minutes"


def published_table(models: dict[str, dict[str, float]]) -> "Table":
    from rich.table import Table

    table = Table(title="training FLOPs of published models, as the paper counts")
    table.add_column("model")
    table.add_column("printed by the original", justify="right")
    table.add_column("slips corrected", justify="right")
    for name, value in models["printed"].items():
        table.add_row(name, f"{value:.4g}", f"{models['corrected'][name]:.4g}")
    return table
