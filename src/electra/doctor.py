"""Find out in a minute what would else be found out after hours: one trial step at full length, one trial checkpoint."""

import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from electra.data.shards import verify_shards
from electra.errors import ElectraError, MachineError
from electra.pretrain import Parts, PretrainSettings, build_parts, resolve
from electra.train.checkpoint import save_checkpoint
from electra.train.display import duration
from electra.train.guard import check_space
from electra.train.optim import build_optimizer
from electra.train.trainer import autocast, checkpoint_groups, choose_device

TRIAL_STEPS = 3


def examine(recipe: str | None, words: list[str]) -> bool:
    """Prints one line a check; False if any of them failed."""
    console = Console(highlight=False)
    healthy = True

    def check(name: str, look: Callable[[], str]) -> bool:
        nonlocal healthy
        try:
            console.print(f"[green]ok[/]    {name}: {look()}", soft_wrap=True)
            return True
        except ElectraError as error:
            console.print(f"[red]wrong[/] {name}: {error}", soft_wrap=True)
            healthy = False
            return False

    check("machine", machine)
    if recipe is None:
        return healthy
    found: dict[str, PretrainSettings] = {}
    parts: list[Parts] = []
    if not check("settings", lambda: settings_line(found, recipe, words)):
        return False
    settings = found["settings"]
    folder = existing_parent(Path(settings.run))
    if check("shards", lambda: shards_line(settings, parts)):
        check("one step at full length", lambda: trial_step(settings, parts[0]))
        check("one checkpoint", lambda: trial_checkpoint(settings, parts[0], folder))
    return healthy


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = (
        f"{torch.cuda.get_device_name()}"
        if torch.cuda.is_available()
        else "no GPU (training runs on the CPU)"
    )
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"python {python}, torch {torch.__version__}, {os.cpu_count()} cores, {memory:.0f} GiB memory, {gpu}"
    )


def settings_line(found: dict[str, PretrainSettings], recipe: str, words: list[str]) -> str:
    found["settings"] = settings = resolve(recipe, words)[0]
    rows, train = settings.rows, settings.train
    return f"{recipe}, {train.steps:,} steps of {train.batch} rows of {rows.length} tokens"


def shards_line(settings: PretrainSettings, parts: list[Parts]) -> str:
    folder = Path(settings.data)
    if problems := verify_shards(folder):
        raise MachineError(" ".join(problems))
    built = build_parts(settings, verify=False)
    parts.append(built)
    epochs = settings.train.steps * settings.train.batch / len(built.loader.rows)
    tokens = built.manifest.splits["train"].tokens
    return f"{tokens:,} tokens, {len(built.loader.rows):,} rows, every hash right; the run passes over them {epochs:.2g} times"


def trial_step(settings: PretrainSettings, parts: Parts) -> str:
    device = choose_device(settings.train)
    objective = parts.objective.to(device).train()
    optimizer = build_optimizer(settings.optimizer, objective)
    batch = parts.loader.batch_at(0).to(device)
    times = []
    for _ in range(TRIAL_STEPS):
        started = time.monotonic()
        for piece in batch.split(settings.train.accumulate):
            with autocast(settings.train, device):
                loss = objective(piece)
            loss.total.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.total.item()
        times.append(time.monotonic() - started)
    seconds = min(times)
    total = duration(seconds * settings.train.steps)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return f"{seconds:.2f} s on {device}, peak memory {peak:.1f} GiB; the whole run takes about {total}"


def trial_checkpoint(settings: PretrainSettings, parts: Parts, folder: Path) -> str:
    optimizer = build_optimizer(settings.optimizer, parts.objective)
    groups = checkpoint_groups(parts.objective, optimizer)
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
