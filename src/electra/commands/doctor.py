"""electra doctor: find out in a minute what would otherwise be found out after hours."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from electra.base.errors import CorruptError, ElectraError
from electra.commands.console import OverrideWords, say


def doctor_command(
    recipe: Annotated[str | None, typer.Argument(help="a recipe to try")] = None, overrides: OverrideWords = None
) -> None:
    """Check the machine, the shards and the settings before hours are spent."""
    import torch

    from electra.base.jobs import cpu_count
    from electra.base.progress import duration
    from electra.data.shards import verify_shards
    from electra.pretraining.run import build_parts
    from electra.pretraining.settings import resolve
    from electra.pretraining.trial import try_checkpoint, try_step
    from electra.train.device import choose_device, explain_machine
    from electra.train.loop import checkpoint_groups
    from electra.train.settings import memory_remedy, schedule_warning
    from electra.train.step import Execution, build_step

    with check("machine") as notes:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        has_gpu = torch.cuda.is_available()
        gpu = torch.cuda.get_device_name() if has_gpu else "no GPU (training runs on the CPU)"
        versions = f"python {platform.python_version()}, torch {torch.__version__}"
        notes.append(f"{versions}, {cpu_count()} cores, {memory:.0f} GiB memory, {gpu}")
    if recipe is None:
        return

    with check("settings") as notes:
        settings, _ = resolve(recipe, overrides or [])
        train, device = settings.train, choose_device(settings.train)
        length = f"{train.minutes:g} minutes" if train.minutes else f"{train.steps:,} steps"
        notes.append(f"{recipe}, {length} of {train.batch} rows of {settings.rows.length} tokens")
        if not train.minutes and (warning := schedule_warning(settings.schedule, train.steps)):
            notes.append(f"WARNING: {warning}")

    with check("shards") as notes:
        if problems := verify_shards(Path(settings.data)):
            raise CorruptError(" ".join(problems))
        parts = build_parts(settings, device, verify=False)
        rows, tokens = len(parts.loader.rows), parts.manifest.splits["train"].tokens
        passes = (
            f"; the run passes over them {train.steps * train.batch / rows:,.1f} times" if not train.minutes else ""
        )
        notes.append(f"{tokens:,} tokens, {rows:,} rows, every hash right{passes}")
        if not len(parts.heldout):
            notes.append("Nothing is held out: there will be no held-out metrics.")

    with check("one step at full length") as notes:
        remedy = memory_remedy(train.batch, train.accumulate)
        with explain_machine(remedy, "Training would fail too."):
            objective, execution = parts.objective.to(device).train(), Execution.of(train, device)
            step = build_step(objective, settings.optimizer, execution, settings.seed)
            seconds, peak = try_step(step, parts.loader.batch_at(0))
        costs = f"{seconds:.2f} s on {device}, peak memory {peak / 2**30:.1f} GiB"
        whole = f"takes about {duration(seconds * train.steps)}"
        whole = f"has about {60 * train.minutes / seconds:,.0f} steps" if train.minutes else whole
        notes.append(f"{costs}; the whole run {whole}")

    with check("one checkpoint") as notes:
        notes.append(try_checkpoint(checkpoint_groups(objective, step.optimizer), Path(settings.run)))


@contextmanager
def check(name: str) -> Iterator[list[str]]:
    """One line, and one more for each further note. Every check rests on those before it: the first that fails ends the
    command, with the exit code that its error has."""
    notes: list[str] = []
    try:
        yield notes
    except ElectraError as error:
        typer.secho("wrong", fg="red", nl=False)
        say(f" {name}: {error}")
        raise typer.Exit(error.exit_code) from None
    typer.secho("ok", fg="green", nl=False)
    say(f"    {name}: " + "\n      ".join(notes))
