"""A pre-training run put together: settings, data, network, loop, export. The only place that knows all of them."""

import json
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import tokenizers
import torch
from pydantic import Field, model_validator

import electra
from electra import config, flops
from electra.batch import SpecialIds
from electra.data.loader import HeldOut, Loader
from electra.data.rows import NoRows, Rows, RowsSettings, build_rows
from electra.data.shards import Manifest, manifest_hash, open_data, read_manifest
from electra.data.tokenizer import load_tokenizer, special_ids, vocabulary_size
from electra.errors import CorruptError, DataError, SettingsError
from electra.files import lock, remove_leftovers, write_atomically, write_json
from electra.interop import card, hf
from electra.model.encoder import EncoderSettings
from electra.model.generator import GeneratorSettings
from electra.objectives.electra import Electra, ElectraSettings
from electra.train import checkpoint, guard
from electra.train.optim import OptimizerSettings
from electra.train.runlog import read_metrics
from electra.train.schedule import ScheduleSettings
from electra.train.trainer import FREE_TO_CHANGE, Run, TrainSettings, choose_device, memory_remedy, train

CONFIG = "config.toml"


class PretrainSettings(config.Settings):
    """The whole tree of a pre-training run. `data` is a folder made by "electra prepare"; `run` is where everything
    that the run makes goes (default: runs/ and the recipe's name)."""

    data: str
    run: str
    seed: int = Field(0, ge=0)
    encoder: EncoderSettings = EncoderSettings()
    generator: GeneratorSettings = GeneratorSettings()
    objective: ElectraSettings = ElectraSettings()
    rows: RowsSettings = RowsSettings()
    train: TrainSettings = TrainSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()

    @model_validator(mode="after")
    def parts_agree(self) -> "PretrainSettings":
        problems = []
        if self.rows.length > self.encoder.positions:
            problems.append(
                f"rows.length ({self.rows.length}) is beyond encoder.positions ({self.encoder.positions})"
            )
        sharing_all = self.generator.sharing == "all"
        if sharing_all and (self.generator.width, self.generator.depth) != (1, 1):
            problems.append('generator.sharing = "all" needs generator.width=1 and generator.depth=1')
        small = self.encoder.scaled(self.generator.width, self.generator.depth)
        if not small.hidden or small.hidden % small.heads:
            problems.append(
                f"generator.width={self.generator.width} makes {small.hidden} hidden units for {small.heads} heads"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self


def resolve(recipe: str, words: list[str]) -> tuple[PretrainSettings, dict[str, str]]:
    """The settings of a command line. The run folder has a default that depends on the recipe's name."""
    given = config.parse_overrides(words).keys() | config.read_recipe(recipe).keys()
    if "run" in given:
        return config.resolve(PretrainSettings, recipe, words)
    settings, sources = config.resolve(PretrainSettings, recipe, [*words, f'run="runs/{Path(recipe).stem}"'])
    return settings, sources | {"run": "default"}


@dataclass(frozen=True)
class Parts:
    """What the settings and the data folder make together."""

    objective: Electra
    manifest: Manifest
    loader: Loader
    heldout: HeldOut


def build_objective(settings: PretrainSettings, vocab_size: int, special: SpecialIds) -> Electra:
    parts = settings.objective, settings.encoder, settings.generator
    return Electra(*parts, vocab_size, special, settings.seed)


def build_parts(settings: PretrainSettings, verify: bool = True) -> Parts:
    folder = Path(settings.data)
    data = open_data(folder, "train", verify)
    special = special_ids(load_tokenizer(folder))
    rows = build_rows(settings.rows, data, special, settings.seed)
    loader = Loader(
        rows,
        settings.rows.length,
        settings.train.batch,
        settings.train.steps,
        settings.seed,
        workers=settings.train.workers,
    )
    heldout = build_heldout(settings, folder, special, verify)
    objective = build_objective(settings, data.manifest.vocab_size, special)
    return Parts(objective, data.manifest, loader, heldout)


def build_heldout(
    settings: PretrainSettings, folder: Path, special: SpecialIds, verify: bool = True
) -> HeldOut:
    """Empty where nothing was held out: training works, its held-out figures are missing."""
    part = settings.train.batch // settings.train.accumulate
    limit = settings.train.evaluate_rows
    rows: Rows = NoRows(special)
    if read_manifest(folder).splits["heldout"].shards:
        rows = build_rows(settings.rows, open_data(folder, "heldout", verify), special, settings.seed)
    return HeldOut(rows, settings.rows.length, part, limit, settings.seed)


def pretrain(settings: PretrainSettings, command: str = "") -> dict[str, float]:
    """Train, or go on training, and export the discriminator at the end. `command` is what resumes the run."""
    folder = Path(settings.run)
    with lock(folder), guard.Signals() as signals, guard.explain_memory(memory_remedy(settings.train)):
        remove_leftovers(folder)
        refuse_other_settings(folder, settings)
        parts = build_parts(settings)
        fingerprint = {
            "data_manifest_sha256": manifest_hash(Path(settings.data)),
            "tokenizer_sha256": parts.manifest.tokenizer_sha256,
        }
        refuse_other_data(folder, fingerprint)
        write_atomically(folder / CONFIG, config.to_toml(settings).encode())
        write_json(folder / "environment.json", environment() | fingerprint)
        write_atomically(folder / "tokenizer.json", (Path(settings.data) / "tokenizer.json").read_bytes())
        run = Run(folder, fingerprint, command)
        figures = train(
            parts.objective,
            parts.loader,
            parts.heldout,
            settings.train,
            settings.optimizer,
            settings.schedule,
            settings.seed,
            run,
            signals,
            flops_per_token(settings, parts.manifest.vocab_size),
            device_peak(settings.train),
        )
        if not (folder / "export").exists():
            export_parts(settings, parts.objective, folder, folder / "export", ("discriminator",), figures)
        return figures


def work(settings: PretrainSettings, vocab_size: int) -> flops.Work:
    """What a run computes, for counting it."""
    sizes = vocab_size, settings.rows.length, settings.train.batch, settings.train.steps
    return flops.Work(settings.objective, settings.encoder, settings.generator, *sizes)


def flops_per_token(settings: PretrainSettings, vocab_size: int) -> float:
    """0 for an objective that nobody has counted: training must not depend on it."""
    with suppress(SettingsError):
        return work(settings, vocab_size).per_token()
    return 0.0


def device_peak(settings: TrainSettings) -> float:
    """Of the GPU that the run is on; 0 on processors and on devices that we do not know."""
    cuda = choose_device(settings).type == "cuda"
    return flops.peak_flops(torch.cuda.get_device_name()) if cuda else 0.0


def refuse_other_settings(folder: Path, settings: PretrainSettings) -> None:
    path = folder / CONFIG
    if not path.is_file() or not checkpoint.checkpoint_folders(folder / "checkpoints"):
        return
    before = config.validate(PretrainSettings, config.read_recipe(str(path)))
    changed = config.differences(before, settings, ignore=("run", "data", *FREE_TO_CHANGE))
    if changed:
        raise SettingsError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}). Use those, or another run folder (run=…)."
        )


def refuse_other_data(folder: Path, fingerprint: dict[str, str]) -> None:
    path = folder / "environment.json"
    if not path.is_file() or not checkpoint.checkpoint_folders(folder / "checkpoints"):
        return
    before = json.loads(path.read_text("utf-8"))
    names = {"tokenizer_sha256": "tokenizer", "data_manifest_sha256": "token shards"}
    for key, name in names.items():
        if before.get(key) != fingerprint[key]:
            raise CorruptError(
                f"{folder} was trained on other {name} (sha256 {str(before.get(key))[:12]}…, now {fingerprint[key][:12]}…). "
                "Give the data of that run, or another run folder (run=…)."
            )


def environment() -> dict[str, Any]:
    def git_commit() -> str | None:
        """Of the checkout that this code is in, not of one that happens to lie around the installation."""
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
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def resume_command(recipe: str, words: list[str]) -> str:
    return shlex.join(["electra", "pretrain", recipe, *words])


def load_run(folder: Path) -> tuple[PretrainSettings, Electra]:
    """A run's settings and its network at the newest whole checkpoint."""
    if not (folder / CONFIG).is_file():
        raise DataError(
            f'{folder} is not a run folder: it has no {CONFIG}. "electra pretrain" makes run folders.'
        )
    settings = config.validate(PretrainSettings, config.read_recipe(str(folder / CONFIG)))
    found = checkpoint.newest_checkpoint(
        folder / "checkpoints", lambda text: print(f"WARNING: {text}", file=sys.stderr)
    )
    if found is None:
        raise DataError(f"{folder} has no checkpoint yet. Train first: electra pretrain {folder / CONFIG}")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    objective = build_objective(settings, vocabulary_size(tokenizer), special_ids(tokenizer))
    checkpoint.restore(found, {"model": dict(objective.named_parameters())})
    return settings, objective.eval()


def export_parts(
    settings: PretrainSettings,
    objective: Electra,
    run: Path,
    out: Path,
    kinds: tuple[hf.Kind, ...],
    figures: dict[str, Any],
) -> list[str]:
    """Returns one line about each folder written."""
    tokenizer = load_tokenizer(run / "tokenizer.json")
    special = special_ids(tokenizer)
    written = []
    for kind in kinds:
        encoder = objective.discriminator if kind == "discriminator" else objective.generator
        head = objective.detection_head if kind == "discriminator" else objective.token_head
        target = out if len(kinds) == 1 else out / kind
        text = card.model_card(kind, config.to_toml(settings), figures)
        written.append(hf.write_folder(target, kind, encoder, head, tokenizer, special, text))
    return written


def export_run(run: Path, out: Path) -> list[str]:
    settings, objective = load_run(run)
    heldout = [record for record in read_metrics(run) if record["kind"] == "heldout"]
    figures = heldout[-1] if heldout else {}
    return export_parts(settings, objective, run, out, ("discriminator", "generator"), figures)


def load_detector(model: Path) -> hf.Loaded:
    """From a run folder or from a folder in transformers' format."""
    if not model.is_dir():
        raise DataError(f"{model} is neither a run folder nor an exported model folder.")
    if (model / CONFIG).is_file():
        _, objective = load_run(model)
        return hf.Loaded(objective.discriminator, objective.detection_head, load_tokenizer(model))
    return hf.load_discriminator(model / "discriminator" if (model / "discriminator").is_dir() else model)
