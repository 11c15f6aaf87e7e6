"""Loads networks from run folders and model folders, and exports runs as model folders."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from electra.base import config
from electra.base.errors import CorruptError, DataError, SettingsError, command, first_line
from electra.base.files import distrust
from electra.data.shards import TOKENIZER
from electra.data.tokenizer import load_tokenizer, tokenizer_hash
from electra.interop.card import UNSAID, Publication, pretrained_card
from electra.interop.formats import NetworkKind, has_form, own_tensors
from electra.interop.read import Pretrained, read_network
from electra.interop.write import PLAIN, Manner, PretrainedNetwork, whole_or_absent, write_network
from electra.model import encoder_alone
from electra.objectives import Objective
from electra.objectives.corruption import Network
from electra.pretraining.card import run_sections
from electra.pretraining.settings import PretrainSettings, build_objective
from electra.train import checkpoint
from electra.train.log import read_metrics

CONFIG = "config.toml"
COPY = "state.json of a checkpoint has its text under settings"
NETWORK_SECTIONS = ("encoder", "generator", "masking", "sampling", "objective")
EXPORTS = ("discriminator", "recovery", "generator")
"""Folders in an export of several networks, the main one first."""


class Exported(NamedTuple):
    """A folder that was written, and in `note` what has read it back, and with which result."""

    folder: Path
    note: str


def load_settings(folder: Path) -> PretrainSettings:
    if not (folder / CONFIG).is_file():
        if "settings" in checkpoint.newest_state(folder / "checkpoints"):
            raise CorruptError(f"{folder / CONFIG} is missing. Restore it: {COPY}.")
        raise DataError(f'{folder} is not a run folder: it has no {CONFIG}. "electra pretrain" makes run folders.')
    try:
        return config.validate(PretrainSettings, config.read_recipe(str(folder / CONFIG)))
    except SettingsError as error:
        reason = first_line(error).rstrip(".")
        raise CorruptError(f"{folder / CONFIG} is damaged ({reason}). Restore it: {COPY}.") from None


def load_run(folder: Path) -> tuple[PretrainSettings, Objective]:
    """A run's settings and its objective at the newest intact checkpoint."""
    settings = load_settings(folder)
    newest = checkpoint.newest_checkpoint(folder / "checkpoints")
    if newest is None:
        raise DataError(f"{folder} has no checkpoint yet. Train first: {command('pretrain', folder / CONFIG)}")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    refuse_edited_run(folder, settings, tokenizer, newest.state)
    objective = build_objective(settings, tokenizer)
    checkpoint.restore(newest, {"model": dict(objective.named_parameters())})
    return settings, objective.eval()


def refuse_edited_run(folder: Path, settings: PretrainSettings, tokenizer: Tokenizer, state: Mapping[str, Any]) -> None:
    """Refuse a run folder whose tokenizer or networks are not those of the checkpoint. That weights load is not enough: with other
    ids or another number of heads they compute something else."""
    digest = tokenizer_hash(tokenizer)
    if state.get("tokenizer_sha256", digest) != digest:
        distrust(f"{folder / TOKENIZER} is not the tokenizer that the run was trained with", "Restore that of its data")
    if "settings" not in state:  # an older run
        return
    trained, now = config.parse_toml(state["settings"]), config.flatten(config.dump(settings))
    networks = config.flatten({name: trained.get(name, {}) for name in NETWORK_SECTIONS})
    if changed := [f"{key}: {value!r} -> {now.get(key)!r}" for key, value in networks.items() if now.get(key) != value]:
        listed = "; ".join(changed)
        distrust(f"{folder / CONFIG} is not what the run was trained with ({listed})", f"Restore it: {COPY}")


def load_network(path: Path, kind: NetworkKind | None = None) -> Pretrained:
    """Load a network from a run folder, an export of one network or of several, or any folder in transformers' format. Without
    a kind: the main network, with the head it has."""
    if not path.is_dir():
        what = "is neither a run folder nor a model folder" if path.exists() else "does not exist"
        raise DataError(f"{path} {what}. Give the folder of a run, of an export or of a transformers model.")
    if not (path / CONFIG).is_file():
        names = EXPORTS if kind in (None, "encoder") else (kind,)
        return read_network(next((path / name for name in names if (path / name).is_dir()), path), kind)
    settings, objective = load_run(path)
    networks = objective.networks()
    if kind == "discriminator" and kind not in networks:
        raise DataError(f"{path} has no discriminator: its objective is {settings.objective.kind}.")
    if kind == "generator" and kind not in networks:
        raise DataError(f"{path} has no generator that can be reused (generator.kind={settings.generator.kind}).")
    name = kind if kind in networks else next(iter(networks))
    network = pretrained(settings, networks[name], path)
    encoder = network.encoder
    if not encoder.embeddings.is_disentangled:
        return network
    # it reads its generator's word table, which would stay behind when the network is moved to another device
    alone = encoder_alone(encoder.settings, len(encoder.embeddings.table))
    alone.load_state_dict(own_tensors(encoder))
    return replace(network, encoder=alone.eval())


def pretrained(settings: PretrainSettings, network: Network, run: Path) -> Pretrained:
    """A run's network as `Pretrained`. With `start` the trained length is unknown, because that of the earlier weights is."""
    length = None if settings.start else settings.rows.length
    return Pretrained(*network, load_tokenizer(run), settings.objective.kind, length)


def export_networks(
    settings: PretrainSettings,
    networks: Mapping[str, Network],
    run: Path,
    out: Path,
    metrics: Mapping[str, Any],
    publication: Publication = UNSAID,
    manner: Manner = PLAIN,
) -> list[Exported]:
    """Write a folder for each network in `out`; a single network is written to `out` itself."""
    written, sections = [], run_sections(run, settings, metrics)
    for name, parts in networks.items():
        network, note = pretrained(settings, parts, run), ""
        if not has_form(network.encoder.settings, network.kind):
            size = network.encoder.settings.embedding
            note = f" (the encoder alone: ModernBERT has no token head of {size} units; encoder.token_head=tied makes one it has)"
            network = replace(network, kind="encoder", head=None)
        card = run_card(settings, network, sections, publication)
        target = out if len(networks) == 1 else out / name
        written.append(Exported(target, write_network(target, network, card, manner=manner) + note))
    return written


def run_card(
    settings: PretrainSettings, network: Pretrained, sections: Mapping[str, str], publication: Publication
) -> str:
    about = config.to_toml(settings), sections, network.objective, publication
    parameters = sum(map(torch.numel, PretrainedNetwork(network).parameters()))  # tied ones count once
    return pretrained_card(network.kind, settings.encoder.kind, *about, parameters)


def heldout_metrics(run: Path) -> dict[str, Any]:
    """The step of the weights that `load_run` reads, with the held-out metrics of that step if it was evaluated. A run that was killed
    has logged other steps than it has saved."""
    newest = checkpoint.newest_checkpoint(run / "checkpoints")
    step = newest.step if newest else 0
    return next((it for it in read_metrics(run, "heldout") if it["step"] == step), {"step": step})


def export_run(run: Path, out: Path, publication: Publication = UNSAID, manner: Manner = PLAIN) -> list[Exported]:
    """Export all networks of a run, or none."""
    settings, objective = load_run(run)
    with whole_or_absent(out) as temporary:
        written = export_networks(
            settings, objective.networks(), run, temporary, heldout_metrics(run), publication, manner
        )
    return [Exported(out / it.folder.relative_to(temporary), it.note) for it in written]
