"""Puts a pre-training run together: settings, data, network, loop, export. The only module that knows all of them."""

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import tokenizers
import torch

import electra
from electra.base import config
from electra.base.batch import SpecialIds
from electra.base.errors import CorruptError, ElectraError, SettingsError, common
from electra.base.files import (
    check_storage,
    lock,
    read_object,
    read_or_set_aside,
    refuse_other_kind,
    remove_leftovers,
    write_atomically,
    write_json,
    writing,
)
from electra.base.jobs import Signals
from electra.base.ranks import ALONE, Ranks, join
from electra.data.batches import HeldOut, Loader, Resident, place_corpus
from electra.data.rows import Rows, build_rows
from electra.data.shards import Manifest, few_held_out, manifest_hash, open_data, read_manifest
from electra.data.tokenizer import load_tokenizer, special_ids, vocabulary_size
from electra.objectives import Objective
from electra.pretraining.card import ENVIRONMENT, described_data
from electra.pretraining.load import CONFIG, export_networks, load_run, load_settings
from electra.pretraining.samples import ROWS_SHOWN, SAMPLES, keep_samples
from electra.pretraining.settings import PretrainSettings, build_objective
from electra.pretraining.start import before_and_after, take_weights
from electra.pretraining.trial import device_peak, flops_per_token
from electra.train import checkpoint
from electra.train.device import choose_device, explain_machine, free_memory, log_shortcomings, machine
from electra.train.distributed import is_sharded, shard
from electra.train.log import METRICS
from electra.train.loop import HeldOutEvaluation, Run, train
from electra.train.optimizers import OptimizerSettings
from electra.train.settings import FREE_TO_CHANGE, Horizon, TrainSettings, memory_remedy, schedule_warning
from electra.train.step import Execution, build_step
from electra.train.trackers import TRACKING, wanted_trackers

log = logging.getLogger(__name__)

BEFORE_AFTER = "before-after.md"
SAVED = "Everything up to the newest checkpoint is saved: run the same command again."
MANY_PASSES = 100
"""Over the training text. On 0.17 M tokens three times as many steps, from 42 passes to 127, raised modern-tiny's detection in text of
others from an AUC of .741 to .750; eleven times as much text, at the same number of steps, to .792."""
FSDP_ALONE = "train.parallel=fsdp is for several processes: add train.processes, or start with torchrun."


@dataclass(frozen=True)
class Parts:
    """What is built from the settings and the data folder."""

    objective: Objective
    manifest: Manifest
    loader: Loader | Resident
    loader_note: str
    heldout: HeldOut


def build_parts(
    settings: PretrainSettings, device: torch.device, verify: bool = True, fresh: bool = True, ranks: Ranks = ALONE
) -> Parts:
    """Build the parts of a run. `fresh`: take weights from the folders that `start` and `generator.source` name. A resumed run
    no longer needs them: its checkpoints hold everything."""
    folder = Path(settings.data)
    data = open_data(folder, "train", verify)
    tokenizer = load_tokenizer(folder)
    if (size := vocabulary_size(tokenizer)) != data.manifest.vocab_size:
        what = f"vocab_size is {data.manifest.vocab_size}, its tokenizer has {size}"
        raise CorruptError(f'{folder}/manifest.json: {what}. Remove it and run "electra prepare" again.')
    special = special_ids(tokenizer)
    rows = build_rows(settings.rows, data, special, settings.seed)
    train, pin = settings.train, device.type == "cuda"
    share, steps = (ranks.rank, ranks.world, train.accumulate), sys.maxsize if train.minutes else train.steps
    streamed = Loader(rows, train.batch, steps, settings.seed, *share, train.workers, pin)
    loader, note = place_corpus(streamed, data.manifest.vocab_size, train.corpus, device)
    heldout = build_heldout(settings, folder, special, verify)
    counts = data.token_counts() if settings.generator.kind == "unigram" and fresh else None
    objective = build_objective(settings, tokenizer, counts)
    if fresh:
        take_weights(settings, objective, tokenizer)
    return Parts(objective, data.manifest, loader, note, heldout)


def build_heldout(settings: PretrainSettings, folder: Path, special: SpecialIds, verify: bool = True) -> HeldOut:
    """The held-out rows. Empty if nothing was held out: training works, but without held-out metrics."""
    train = settings.train
    rows: Rows | None = None
    if read_manifest(folder).splits["heldout"].shards:
        rows = build_rows(settings.rows, open_data(folder, "heldout", verify), special, settings.seed)
    return HeldOut(rows, train.batch // train.accumulate, train.evaluate_rows, settings.seed)


def pretrain(settings: PretrainSettings, command: str = "") -> dict[str, float]:
    """Train, or resume training, and export the main network at the end; returns the last held-out metrics. `command` is what
    resumes the run. Processes that torchrun started train together. Memory is freed before and after, because an earlier run
    that ended with an error could not free its own."""
    free_memory()
    with join(lambda: settings.train.timeout) as ranks:
        if not ranks.together:
            refuse_alone(settings.train)
        elif settings.train.processes not in (1, ranks.world):
            what = f"train.processes={settings.train.processes} has no effect"
            log.warning("%s: torchrun started %d processes.", what, ranks.world)
        ranks.wait_at_most(settings.train.timeout)
        metrics = pretrain_together(settings, command, ranks)
    free_memory()
    return metrics


def refuse_alone(train: TrainSettings) -> None:
    """Refuse settings for several processes in a process that is alone and starts no others."""
    if train.processes > 1:
        raise SettingsError("train.processes is for a single pre-training run. Take it out here.")
    if train.parallel == "fsdp":
        raise SettingsError(FSDP_ALONE)


def pretrain_together(settings: PretrainSettings, command: str, ranks: Ranks) -> dict[str, float]:
    # what the machine cannot do is refused before anything is read or written
    ranks.everyone(lambda: refuse_uneven(settings.train.batch, settings.train.accumulate, ranks.world))
    device = ranks.everyone(lambda: ranks.device(choose_device(settings.train)))
    execution = ranks.everyone(lambda: Execution.of(settings.train, device, ranks))
    log_shortcomings(settings.train.precision, device)
    ranks.first(lambda: wanted_trackers(settings.train.track))

    folder, data = Path(settings.run), Path(settings.data)
    remedy = memory_remedy(settings.train.batch, settings.train.accumulate)
    with ExitStack() as held, Signals() as signals, explain_machine(remedy, SAVED):
        # open the run folder, which may hold a run to resume
        fingerprint = ranks.everyone(lambda: fingerprint_of(data))
        refuse_others(ranks, settings, device, fingerprint)

        def open_folder() -> tuple[PretrainSettings, bool]:
            if not checkpoint.checkpoint_folders(folder / "checkpoints"):
                refuse_other_kind(folder, CONFIG)
            held.enter_context(lock(folder))
            remove_leftovers(folder)
            check_storage(folder)
            fresh = not checkpoint.checkpoint_folders(folder / "checkpoints")
            if fresh:
                return settings, fresh
            return settings_to_resume(folder, settings, fingerprint), fresh

        settings, fresh = ranks.first(open_folder)
        schedule, begin, end = Horizon(settings.train).stage(settings.schedule, settings.train.steps - 1)
        if not settings.train.minutes and (warning := schedule_warning(schedule, int(end) - begin)):
            log.warning(warning)
        described = fingerprint | {"settings": config.to_toml(settings)}
        parts = ranks.everyone(lambda: build_parts(settings, device, ranks.local == 0, fresh, ranks))
        log.info(parts.loader_note)
        for warning in data_warnings(settings, parts):
            log.warning(warning)

        def describe_folder() -> None:
            if fresh:
                set_earlier_aside(folder, settings, fingerprint)
            elif settings.train.stages:  # its export is from an earlier end
                set_export_aside(folder, settings.train.stages[-1])
            write_atomically(folder / CONFIG, config.to_toml(settings).encode())
            known = {"processes": ranks.world, "data": described_data(parts.manifest)}
            write_json(folder / ENVIRONMENT, environment() | known | fingerprint)
            write_atomically(folder / "tokenizer.json", (data / "tokenizer.json").read_bytes())

        ranks.first(describe_folder)

        # train
        objective = parts.objective.to(device)
        if settings.train.parallel == "fsdp":
            shard(objective, ranks, device, execution.reduce)
        update = build_step(objective, settings.optimizer_of_run(), execution, settings.seed)
        held.callback(update.captured.graphs.clear)  # NCCL ends only after the graphs that hold its kernels
        is_hidden = settings.objective.kind == "electric" or is_sharded(objective)  # energies are no probabilities
        rows = () if is_hidden else HeldOut(parts.heldout.rows, ROWS_SHOWN, ROWS_SHOWN, settings.seed)
        tokenizer = load_tokenizer(data)

        def keep(step: int) -> None:
            keep_samples(folder, step, objective, update, tokenizer, rows)

        heldout = HeldOutEvaluation(update, parts.heldout, settings.train, signals, keep, bool(settings.start))
        peak = device_peak(device) * ranks.world
        speed = peak / flops_per_token(settings, parts.manifest.vocab_size) if peak else 0.0
        run = Run(folder, described, command, peak_speed=speed, settings=config.dump(settings))
        state = train(update, parts.loader, heldout, settings.schedule, settings.train, run, signals)

        # export the main network
        metrics = state.log.last("heldout")

        def export_main() -> None:
            if state.step > state.first_step:  # an export that exists has other weights
                set_aside(folder, ["export"])
            if not (folder / "export").exists():
                whole = load_run(folder)[1] if is_sharded(objective) else parts.objective
                main = dict(list(whole.networks().items())[:1])
                export_networks(settings, main, folder, folder / "export", metrics)
            if settings.start and (table := before_and_after(folder)):
                write_atomically(folder / BEFORE_AFTER, table.markdown().encode())

        ranks.first(export_main)
        return metrics


def data_warnings(settings: PretrainSettings, parts: Parts) -> list[str]:
    """What to know about the data before training on it. How many steps `train.minutes` has is not known yet."""
    rows, train, held_out = len(parts.loader.rows), settings.train, few_held_out(parts.manifest)
    warnings, enough = [held_out] if held_out else [], max(1, MANY_PASSES * rows // train.batch)
    if not train.minutes and train.steps > enough:
        what = f"the run passes {train.steps * train.batch / rows:,.0f} times over its text and will learn it by heart"
        remedy = (
            f"Most is learned in {MANY_PASSES} passes (train.steps={enough}); more text helps more than more steps."
        )
        warnings.append(f"{what}. {remedy}")
    return warnings


def fingerprint_of(data: Path) -> dict[str, str]:
    tokenizer_sha256 = read_manifest(data).tokenizer_sha256
    return {"data_manifest_sha256": manifest_hash(data), "tokenizer_sha256": tokenizer_sha256}


def refuse_uneven(batch: int, parts: int, processes: int) -> None:
    if batch % (parts * processes) == 0:
        return
    cut = f"train.batch={batch} over {processes} processes" + (f" x train.accumulate={parts}" if parts > 1 else "")
    below = batch // (parts * processes) * parts * processes
    other = " or ".join(str(rows) for rows in (below, below + parts * processes) if rows)
    fewer = max((count for count in range(1, processes) if batch % (parts * count) == 0), default=1)
    raise SettingsError(
        f"{cut}: every process must get the same number of rows. Use train.batch={other}, or train.processes={fewer}."
    )


def refuse_others(ranks: Ranks, settings: PretrainSettings, device: torch.device, fingerprint: dict[str, str]) -> None:
    """Refuse processes that would not compute the same: another version, other settings, other data."""
    versions = {"electra": electra.__version__, "torch": torch.__version__, "python": platform.python_version()}
    own = {**versions, "device": device.type, **fingerprint, **config.dump(settings)}
    everyone = ranks.gather(own)
    for rank, other in enumerate(everyone):
        if different := config.differences(everyone[0], other, ignore=("data", "run")):
            what = f"process {rank} of {ranks.world} differs from process 0 ({'; '.join(different[:3])})"
            raise common(SettingsError(f"{what}. Start all with the same version, settings and data."))


def settings_to_resume(folder: Path, settings: PretrainSettings, fingerprint: dict[str, str]) -> PretrainSettings:
    """The settings with which the run in `folder` resumes: those given, with its decays and stages. Refuses other settings or data."""
    before, state = load_settings(folder), checkpoint.newest_state(folder / "checkpoints")
    settings = made_longer(before, with_decay_of(before.optimizer, settings), state.get("step"))
    refuse_other_settings(folder, before, settings)
    trained = fingerprint | (read_or_set_aside(folder / ENVIRONMENT) or {}) | state
    for key, name in (("tokenizer_sha256", "tokenizer"), ("data_manifest_sha256", "token shards")):
        if trained[key] != fingerprint[key]:
            raise CorruptError(
                f"{folder} was trained on other {name} (sha256 {str(trained[key])[:12]}…, now {fingerprint[key][:12]}…). "
                "Give the data of that run, or another run folder (run=…)."
            )
    if settings.train.stages != before.train.stages:
        text = "extending the finished run: %d more steps after step %d, with a warm-up and a decay of their own."
        log.info(text, settings.train.steps - before.train.steps, before.train.steps)
    return settings


def with_decay_of(before: OptimizerSettings, settings: PretrainSettings) -> PretrainSettings:
    """Keep weight decays that a run began with as numbers if the settings now say "auto": recipes once had numbers."""
    if settings.optimizer.weight_decay != "auto" or before.weight_decay == "auto":
        return settings
    decays = (it.model_dump(include={"weight_decay", "total_decay"}) for it in (before, before.generator))
    return settings.model_copy(update={"optimizer": settings.optimizer.updated(*decays)})


def made_longer(earlier: PretrainSettings, settings: PretrainSettings, done: int | None) -> PretrainSettings:
    """The settings with the stages of the run, and one more if it has finished and is to be extended."""
    before, train = earlier.train, settings.train
    if train.stages or before.minutes or train.minutes:
        return settings
    stages = before.stages
    if train.steps > before.steps == done:
        stages = (*stages, before.steps)
    update = {"train": train.model_copy(update={"stages": stages})}
    return settings.model_copy(update=update) if stages and stages[-1] < train.steps else settings


def set_export_aside(folder: Path, step: int) -> None:
    """Rename the export of a finished run before it is extended beyond `step`; do nothing if the extension has begun already."""
    aside = folder / f"export-step-{step}"
    if (folder / "export").is_dir() and not aside.exists() and load_settings(folder).train.steps == step:
        (folder / "export").rename(aside)
        log.info("the earlier export is kept as %s.", aside)


def set_earlier_aside(folder: Path, settings: PretrainSettings, fingerprint: dict[str, str]) -> None:
    """Set aside what an earlier run has left in a folder without checkpoints: its exports and, unless its settings and data were
    the same, what it measured."""
    names = ["export", *(path.name for path in sorted(folder.glob("export-step-*")))]
    with suppress(ElectraError):  # if its settings cannot be read, nobody knows whether they were the same
        before = read_object(folder / ENVIRONMENT) | config.dump(load_settings(folder))
        now = before | fingerprint | config.dump(settings)
        if not config.differences(before, now, ignore=("run", "data")):
            return set_aside(folder, names)
    set_aside(folder, [*names, METRICS, SAMPLES, TRACKING, "tensorboard", BEFORE_AFTER])


def set_aside(folder: Path, names: Sequence[str]) -> None:
    if paths := [folder / name for name in names if (folder / name).exists()]:
        aside = next(path for n in count(1) if not (path := folder / f"earlier-{n}").exists())
        with writing(aside):
            aside.mkdir()
            for path in paths:
                path.rename(aside / path.name)
        log.warning("%s of an earlier run: kept in %s.", ", ".join(path.name for path in paths), aside)


def refuse_other_settings(folder: Path, before: PretrainSettings, settings: PretrainSettings) -> None:
    is_longer = settings.train.stages == (*before.train.stages, before.train.steps)
    free = ("run", "data", *FREE_TO_CHANGE, *(("train.steps", "train.stages") if is_longer else ()))
    if changed := config.differences(config.dump(before), config.dump(settings), ignore=free):
        more = ""
        if settings.train.steps > before.train.steps and not settings.train.minutes and not is_longer:
            more = " Only a finished run can be extended with more train.steps: finish this one first."
        raise SettingsError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}). Use those, or another run folder (run=…), "
            f"which may begin with its weights (start={folder}).{more}"
        )


def environment() -> dict[str, Any]:
    def git_commit() -> str | None:
        """The commit of the checkout that holds this code, not of one that happens to contain the installation."""
        here = Path(__file__).parent
        ask = ["git", "rev-parse", "--show-toplevel", "HEAD"]
        with suppress(OSError, subprocess.SubprocessError, ValueError):
            answer = subprocess.run(ask, capture_output=True, text=True, cwd=here, timeout=5).stdout
            top, commit = answer.split()
            return commit if Path(top) == here.parents[1] else None
        return None

    return {
        "electra": electra.__version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "numpy": numpy.__version__,
        "cpu_count": os.cpu_count(),
        **machine(),
    }
