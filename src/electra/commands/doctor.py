"""electra doctor: find out in a minute what would otherwise be found out after hours."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from electra.base.errors import (
    CorruptError,
    ElectraError,
    SettingsError,
    already_said,
    common,
    counted,
    is_first_process,
    is_said,
)
from electra.commands.console import OverrideWords, say

if TYPE_CHECKING:
    from electra.base.ranks import Ranks
    from electra.pretraining.settings import PretrainSettings


def doctor_command(
    recipe: Annotated[str | None, typer.Argument(help="recipe to check")] = None, overrides: OverrideWords = None
) -> None:
    """Check the machine, the shards and the settings before a long run; under torchrun the processes too."""
    from electra.base.ranks import PATIENCE, join
    from electra.pretraining.settings import resolve

    with join(lambda: resolve(recipe, overrides or [])[0].train.timeout if recipe else PATIENCE) as ranks:
        examine(recipe, overrides, ranks)


def examine(recipe: str | None, overrides: list[str] | None, ranks: "Ranks") -> None:
    import torch

    from electra.base.jobs import cpu_count
    from electra.base.progress import duration
    from electra.data.shards import read_manifest, verify_shards
    from electra.pretraining.run import (
        FSDP_ALONE,
        build_parts,
        data_warnings,
        fingerprint_of,
        refuse_others,
        refuse_uneven,
    )
    from electra.pretraining.settings import resolve
    from electra.pretraining.trial import try_checkpoint, try_group, try_step
    from electra.train.checkpoint import checkpoint_folders
    from electra.train.device import choose_device, explain_machine
    from electra.train.distributed import shard, whole_groups
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
        settings, _ = ranks.everyone(lambda: resolve(recipe, overrides or []))
        train = settings.train
        device = ranks.everyone(lambda: ranks.device(choose_device(train)))
        processes = ranks.world if ranks.together else train.processes
        ranks.everyone(lambda: refuse_uneven(train.batch, train.accumulate, processes))
        if train.parallel == "fsdp" and processes == 1 and not ranks.together:
            raise SettingsError(FSDP_ALONE)
        length = f"{train.minutes:g} minutes" if train.minutes else counted(train.steps, "step")
        notes.append(f"{recipe}, {length} of {counted(train.batch, 'row')} of {settings.rows.length} tokens")
        if processes > 1 and not ranks.together:
            how = f"torchrun --standalone --nproc-per-node {processes} -m electra doctor"
            notes.append(f"the checks below run one process with all rows, not {processes}: {how} … checks those")
        if not train.minutes and (warning := schedule_warning(settings.schedule, train.steps)):
            notes.append(f"WARNING: {warning}")

    with check("shards") as notes:
        ranks.everyone(lambda: read_manifest(Path(settings.data)))
        if problems := ranks.first(lambda: verify_shards(Path(settings.data))):
            raise common(CorruptError(" ".join(problems)))
        fresh = not checkpoint_folders(Path(settings.run) / "checkpoints")
        parts = ranks.everyone(lambda: build_parts(settings, device, verify=False, fresh=fresh, ranks=ranks))
        rows, tokens = len(parts.loader.rows), parts.manifest.splits["train"].tokens
        passes = (
            f"; the run passes over them {train.steps * train.batch / rows:,.1f} times" if not train.minutes else ""
        )
        notes.append(f"{counted(tokens, 'token')}, {counted(rows, 'row')}, all hashes match{passes}")
        if not len(parts.heldout):
            notes.append("Nothing is held out: there will be no held-out metrics.")
        notes += data_warnings(settings, parts)

    with check("one step at full length") as notes:
        remedy = memory_remedy(train.batch, train.accumulate)
        with explain_machine(remedy, "Training would fail too."):
            objective, execution = parts.objective.to(device).train(), Execution.of(train, device, ranks)
            if train.parallel == "fsdp" and ranks.together:
                shard(objective, ranks, device, execution.reduce)
            step = build_step(objective, settings.optimizer_of_run(), execution, settings.seed)
            seconds, peak = try_step(step, parts.loader.batch_at(0))
        peaks = ", ".join(f"{most / 2**30:.1f}" for most in ranks.gather(peak))
        costs = f"{seconds:.2f} s on {device}, peak memory {peaks} GiB"
        whole = f"takes about {duration(seconds * train.steps)}"
        whole = f"has about {60 * train.minutes / seconds:,.0f} steps" if train.minutes else whole
        notes.append(f"{costs}; the whole run {whole}")

    if ranks.together:
        with check(f"{ranks.world} processes") as notes:
            refuse_others(ranks, settings, device, ranks.everyone(lambda: fingerprint_of(Path(settings.data))))
            size = sum(parameter.nbytes for parameter in objective.parameters() if parameter.requires_grad)
            notes += try_group(ranks, size, device, Path(settings.run))

    with check("run folder") as notes:
        notes.append(ranks.first(lambda: look_at_folder(settings)))

    with check("one checkpoint") as notes:
        groups = whole_groups(checkpoint_groups(objective, step.optimizer), ranks)
        notes.append(ranks.first(lambda: try_checkpoint(groups, Path(settings.run))))


def look_at_folder(settings: "PretrainSettings") -> str:
    """Checks that pre-training would accept the run folder, and says what it has."""
    from electra.base.files import refuse_other_kind
    from electra.pretraining.load import CONFIG
    from electra.pretraining.run import fingerprint_of, settings_to_resume
    from electra.train.checkpoint import checkpoint_folders, newest_state

    folder = Path(settings.run)
    if not checkpoint_folders(folder / "checkpoints"):
        refuse_other_kind(folder, CONFIG)
        return f"{folder} is new"
    settings_to_resume(folder, settings, fingerprint_of(Path(settings.data)))
    return f"{folder} has step {newest_state(folder / 'checkpoints').get('step')} of this run, which resumes from there"


@contextmanager
def check(name: str) -> Iterator[list[str]]:
    """Prints one line per check, and one more for each further note. Every check builds on those before it: the first that fails ends
    the command with the exit code of its error."""
    notes: list[str] = []
    try:
        yield notes
    except ElectraError as error:
        if is_said(error):
            raise
        typer.secho("wrong", fg="red", nl=False)
        say(f" {name}: {error}")
        raise already_said(error) from None
    if not is_first_process():
        return
    typer.secho("ok", fg="green", nl=False)
    say(f"    {name}: " + "\n      ".join(notes))
