"""electra doctor: find out in a minute what would otherwise be found out after hours."""

from typing import TYPE_CHECKING, Annotated

import typer

from electra.commands.console import Overrides

if TYPE_CHECKING:
    import torch

    from electra.pretraining.run import Parts
    from electra.pretraining.settings import PretrainSettings


def doctor_command(
    recipe: Annotated[str | None, typer.Argument(help="a recipe to try")] = None, overrides: Overrides = None
) -> None:
    """Check the machine, the shards and the settings before hours are spent."""
    raise typer.Exit(examine(recipe, overrides or []))


def examine(recipe: str | None, overrides: list[str]) -> int:
    """One line per check, each resting on those before it. Returns the exit code of the one that failed, 0 if none did."""
    from pathlib import Path

    from rich.console import Console
    from rich.markup import escape

    from electra.base.errors import ElectraError
    from electra.base.progress import duration
    from electra.pretraining.settings import resolve
    from electra.pretraining.trial import try_checkpoint, try_step
    from electra.train.device import choose_device, explain_device, explain_memory
    from electra.train.loop import checkpoint_groups
    from electra.train.settings import memory_remedy
    from electra.train.step import Execution, build_step

    console = Console(highlight=False)
    name = ""

    def fine(text: str) -> None:
        console.print(f"[green]ok[/]    {name}: {escape(text)}", soft_wrap=True)

    try:
        name = "machine"
        fine(machine())
        if recipe is None:
            return 0
        name = "settings"
        settings, _ = resolve(recipe, overrides)
        train = settings.train
        device = choose_device(train)
        fine(f"{recipe}, {train.steps:,} steps of {train.batch} rows of {settings.rows.length} tokens")
        name = "shards"
        parts, text = check_shards(settings, device)
        fine(text)
        name = "one step at full length"
        remedy = memory_remedy(train.batch, train.accumulate)
        with explain_memory(remedy), explain_device("Training would fail too."):
            objective, execution = parts.objective.to(device).train(), Execution.of(train, device)
            step = build_step(objective, settings.optimizer, execution, settings.seed)
            trial = try_step(step, parts.loader.batch_at(0))
        memory, total = trial.memory / 2**30, duration(trial.seconds * train.steps)
        fine(
            f"{trial.seconds:.2f} s on {device}, peak memory {memory:.1f} GiB; the whole run takes about {total}"
        )
        name = "one checkpoint"
        fine(try_checkpoint(checkpoint_groups(objective, step.optimizer), Path(settings.run)))
        return 0
    except ElectraError as error:
        console.print(f"[red]wrong[/] {name}: {escape(str(error))}", soft_wrap=True)
        return error.exit_code


def machine() -> str:
    import os
    import platform

    import torch

    from electra.base.jobs import cpu_count

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU (training runs on the CPU)"
    python = platform.python_version()
    return f"python {python}, torch {torch.__version__}, {cpu_count()} cores, {memory:.0f} GiB memory, {gpu}"


def check_shards(settings: "PretrainSettings", device: "torch.device") -> "tuple[Parts, str]":
    from pathlib import Path

    from electra.base.errors import CorruptError
    from electra.data.shards import verify_shards
    from electra.pretraining.run import build_parts

    if problems := verify_shards(Path(settings.data)):
        raise CorruptError(" ".join(problems))
    parts = build_parts(settings, device, verify=False)
    rows, tokens = len(parts.loader.rows), parts.manifest.splits["train"].tokens
    passes = settings.train.steps * settings.train.batch / rows
    held = "" if len(parts.heldout) else " Nothing is held out: there will be no held-out figures."
    return (
        parts,
        f"{tokens:,} tokens, {rows:,} rows, every hash right; the run passes over them {passes:.2g} times.{held}",
    )
