"""Find out in a minute what would else be found out after hours: one trial step at full length, one trial checkpoint."""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from electra.base.errors import CorruptError, ElectraError, MachineError
from electra.base.jobs import cpu_count, peak_memory
from electra.base.progress import duration
from electra.data.shards import verify_shards
from electra.pretraining.run import Parts, build_parts
from electra.pretraining.settings import PretrainSettings, resolve
from electra.train.checkpoint import save_checkpoint
from electra.train.device import check_space, choose_device, explain_device, explain_memory
from electra.train.loop import checkpoint_groups
from electra.train.optimizers import build_optimizer, split_parameters
from electra.train.settings import memory_remedy
from electra.train.step import Step

TRIAL_STEPS = 3


def examine(recipe: str | None, words: list[str]) -> int:
    """One line a check, each resting on those before it. Returns the exit code of the one that failed, 0 if none did."""
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
        settings, _ = resolve(recipe, words)
        train = settings.train
        device = choose_device(train)
        fine(f"{recipe}, {train.steps:,} steps of {train.batch} rows of {settings.rows.length} tokens")
        name = "shards"
        parts, text = check_shards(settings)
        fine(text)
        name = "one step at full length"
        remedy = memory_remedy(train.batch, train.accumulate)
        with explain_memory(remedy), explain_device("Training would fail too."):
            objective = parts.objective.to(device).train()
            optimizer = build_optimizer(settings.optimizer, objective)
            fine(trial_step(settings, parts, optimizer, lambda text: console.print(f"      {escape(text)}")))
        name = "one checkpoint"
        fine(trial_checkpoint(checkpoint_groups(objective, optimizer), existing_parent(Path(settings.run))))
        return 0
    except ElectraError as error:
        console.print(f"[red]wrong[/] {name}: {escape(str(error))}", soft_wrap=True)
        return error.exit_code


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU (training runs on the CPU)"
    python = platform.python_version()
    return f"python {python}, torch {torch.__version__}, {cpu_count()} cores, {memory:.0f} GiB memory, {gpu}"


def check_shards(settings: PretrainSettings) -> tuple[Parts, str]:
    if problems := verify_shards(Path(settings.data)):
        raise CorruptError(" ".join(problems))
    parts = build_parts(settings, verify=False)
    rows, tokens = len(parts.loader.rows), parts.manifest.splits["train"].tokens
    passes = settings.train.steps * settings.train.batch / rows
    held = "" if len(parts.heldout) else " Nothing is held out: there will be no held-out figures."
    return (
        parts,
        f"{tokens:,} tokens, {rows:,} rows, every hash right; the run passes over them {passes:.2g} times.{held}",
    )


def trial_seconds(
    settings: PretrainSettings, parts: Parts, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
) -> float:
    """The time of a step at full length: the shortest of a few, of which the first compiles and the second is recorded."""
    trained = split_parameters(settings.optimizer, parts.objective)
    device = choose_device(settings.train)
    step = Step(parts.objective, optimizer, trained, settings.train, settings.seed, device, say)
    batch = parts.loader.batch_at(0)
    times = []
    for number in range(TRIAL_STEPS):
        started = time.monotonic()
        sums, _ = step(batch, number, 0.0)
        sums["total"].item()
        times.append(time.monotonic() - started)
    return min(times)


def trial_step(
    settings: PretrainSettings, parts: Parts, optimizer: torch.optim.Optimizer, say: Callable[[str], None]
) -> str:
    seconds, device = trial_seconds(settings, parts, optimizer, say), choose_device(settings.train)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_memory()
    total = duration(seconds * settings.train.steps)
    return (
        f"{seconds:.2f} s on {device}, peak memory {peak / 2**30:.1f} GiB; the whole run takes about {total}"
    )


def trial_checkpoint(groups: dict[str, dict[str, torch.Tensor]], folder: Path) -> str:
    size = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values())
    check_space(folder, size)
    try:
        trial = Path(tempfile.mkdtemp(prefix=".electra-doctor-", dir=folder))
    except OSError as error:
        raise MachineError(f"{folder} cannot be written to: {error.strerror}.") from None
    started = time.monotonic()
    try:
        save_checkpoint(trial, 0, groups, {})
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    free = shutil.disk_usage(folder).free
    return f"{size / 1e6:.0f} MB in {time.monotonic() - started:.1f} s at {folder}, {free / 1e9:.0f} GB free"


def existing_parent(folder: Path) -> Path:
    return folder if folder.is_dir() else existing_parent(folder.absolute().parent)
