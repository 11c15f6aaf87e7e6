"""Networks out of run folders and model folders, model folders out of runs, and weights from one network into another."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from electra.base import config
from electra.base.errors import CorruptError, DataError, SettingsError
from electra.base.files import distrust
from electra.data.shards import TOKENIZER
from electra.data.tokenizer import load_tokenizer, tokenizer_hash
from electra.interop.card import UNSAID, Publication, pretrained_card
from electra.interop.formats import NetworkKind, has_form, own_tensors
from electra.interop.read import Pretrained, read_network
from electra.interop.write import write_network
from electra.model import Encoder, EncoderSettings, compatibility_settings, encoder_alone
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
SCALED = ("layers", "hidden", "heads", "intermediate")
"""Settings of the encoder that generator.width and generator.depth change."""


class Exported(NamedTuple):
    """A folder that was written, and who has read it back, and how."""

    folder: Path
    note: str


def load_settings(folder: Path) -> PretrainSettings:
    if not (folder / CONFIG).is_file():
        raise DataError(f'{folder} is not a run folder: it has no {CONFIG}. "electra pretrain" makes run folders.')
    try:
        return config.validate(PretrainSettings, config.read_recipe(str(folder / CONFIG)))
    except SettingsError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise CorruptError(f"{folder / CONFIG} is damaged ({reason}). Restore it: {COPY}.") from None


def load_run(folder: Path) -> tuple[PretrainSettings, Objective]:
    """A run's settings and its objective at the newest whole checkpoint."""
    settings = load_settings(folder)
    newest = checkpoint.newest_checkpoint(folder / "checkpoints")
    if newest is None:
        raise DataError(f"{folder} has no checkpoint yet. Train first: electra pretrain {folder / CONFIG}")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    refuse_edited_run(folder, settings, tokenizer, newest.state)
    objective = build_objective(settings, tokenizer)
    checkpoint.restore(newest, {"model": dict(objective.named_parameters())})
    return settings, objective.eval()


def refuse_edited_run(folder: Path, settings: PretrainSettings, tokenizer: Tokenizer, state: Mapping[str, Any]) -> None:
    """What the checkpoint says of its tokenizer and its networks. Weights that load are not enough: with other ids or another
    number of heads they compute something else."""
    digest = tokenizer_hash(tokenizer)
    if state.get("tokenizer_sha256", digest) != digest:
        distrust(
            f"{folder / TOKENIZER} is not the tokenizer that the run was trained with", "Put back that of its data"
        )
    if "settings" not in state:  # an older run
        return
    trained, now = config.parse_toml(state["settings"]), config.flatten(config.dump(settings))
    networks = config.flatten({name: trained.get(name, {}) for name in NETWORK_SECTIONS})
    if changed := [f"{key}: {value!r} -> {now.get(key)!r}" for key, value in networks.items() if now.get(key) != value]:
        listed = "; ".join(changed)
        distrust(f"{folder / CONFIG} is not what the run was trained with ({listed})", f"Restore it: {COPY}")


def load_network(path: Path, kind: NetworkKind | None = None) -> Pretrained:
    """From a run folder, an export of one network or of several, or anybody's folder in transformers' format. Without a
    kind: the main network, with the head it has."""
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
        raise DataError(f"{path} has no generator that could be used again (generator.kind={settings.generator.kind}).")
    name = kind if kind in networks else next(iter(networks))
    network = pretrained(settings, networks[name], path)
    encoder = network.encoder
    if not encoder.embeddings.is_disentangled:
        return network
    # it reads its generator's word table, which would stay behind when it is moved to another device
    alone = encoder_alone(encoder.settings, len(encoder.embeddings.table))
    alone.load_state_dict(own_tensors(encoder))
    return replace(network, encoder=alone.eval())


def pretrained(settings: PretrainSettings, network: Network, run: Path) -> Pretrained:
    """A run that started from other weights does not know what those were trained on."""
    length = None if settings.start else settings.rows.length
    return Pretrained(*network, load_tokenizer(run), settings.objective.kind, length)


def export_networks(
    settings: PretrainSettings,
    networks: Mapping[str, Network],
    run: Path,
    out: Path,
    metrics: Mapping[str, Any],
    publication: Publication = UNSAID,
) -> list[Exported]:
    """A folder for each network; one network is `out` itself."""
    written, sections = [], run_sections(run, settings, metrics)
    for name, parts in networks.items():
        network, note = pretrained(settings, parts, run), ""
        if not has_form(network.encoder.settings, network.kind):
            size = network.encoder.settings.embedding
            note = f" (the encoder alone: ModernBERT has no token head of {size} units; encoder.token_head=tied makes one it has)"
            network = replace(network, kind="encoder", head=None)
        about = config.to_toml(settings), sections, network.objective, publication
        card = pretrained_card(network.kind, settings.encoder.kind, *about, sum(map(torch.numel, tensors_of(network))))
        target = out if len(networks) == 1 else out / name
        written.append(Exported(target, write_network(target, network, card) + note))
    return written


def tensors_of(network: Pretrained) -> Iterator[torch.Tensor]:
    """Each once, tied ones too."""
    parts = [part for part in (network.encoder, network.head) if part is not None]
    yield from {id(tensor): tensor for part in parts for tensor in part.parameters()}.values()


def export_run(run: Path, out: Path, publication: Publication = UNSAID) -> list[Exported]:
    settings, objective = load_run(run)
    heldout = [record for record in read_metrics(run) if record["kind"] == "heldout"]
    return export_networks(settings, objective.networks(), run, out, heldout[-1] if heldout else {}, publication)


def copy_weights(name: str, source: torch.nn.Module, target: torch.nn.Module, is_scaled: bool = False) -> None:
    """`name` is the setting that asks for it; `is_scaled`: the target's sizes come from generator.width and
    generator.depth. The word table of a disentangled discriminator begins as the generator's; the difference is its own."""
    weights = own_tensors(source) if isinstance(source, Encoder) else source.state_dict()
    if isinstance(source, Encoder) and isinstance(target, Encoder):
        require_fit(name, source.settings, target.settings, SCALED if is_scaled else ())
    if isinstance(target, Encoder) and target.embeddings.is_disentangled:
        table = weights.pop("embeddings.words.weight")
        weights["embeddings.delta"] = table - (target.embeddings.table - target.embeddings.delta).detach()
    try:
        target.load_state_dict(weights)
    except RuntimeError as error:
        last = str(error).splitlines()[-1].strip()
        raise SettingsError(f"{name} does not fit this recipe ({last}). Use the one it is from.") from None


def require_fit(name: str, there: EncoderSettings, here: EncoderSettings, scaled: tuple[str, ...]) -> None:
    """Weights that load are not enough: in another number of heads or another window they compute something else.
    `scaled` are the settings that cannot be given by their own name."""
    source, target = compatibility_settings(there), compatibility_settings(here)
    other = [key for key in source if key in target and source[key] != target[key]]
    if "kind" in other:
        other = ["kind"]
    if "layers" in other:  # which of them are local can be compared once there are as many
        other = [key for key in other if key not in ("global_every", "global_from")]
    if not other:
        return
    names = {key: key if key in scaled else f"encoder.{key} is" for key in other}
    shown = ", ".join(f"{names[key]} {source[key]} there and {target[key]} here" for key in other)
    remedies = [f"encoder.{key}={source[key]}" for key in other if key not in scaled]
    if len(remedies) < len(other):
        remedies.append("the generator.width and generator.depth that make the same sizes")
    note = ""
    if there.kind == "modernbert" and "embedding" in other and there.embedding == there.hidden:
        note = " In an exported ModernBERT words are as wide as the layers; the run has them as they were."
    raise SettingsError(
        f"the network of {name} does not fit this recipe: {shown}: give {' and '.join(remedies)}.{note}"
    )
