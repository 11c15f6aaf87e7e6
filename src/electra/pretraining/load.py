"""Reading run folders and model folders, and writing model folders from runs."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from electra.base import config
from electra.base.errors import DataError, SettingsError
from electra.data.tokenizer import load_tokenizer, special_ids
from electra.interop import card, hf
from electra.interop.names import encoder_tensors
from electra.model.encoders import (
    AnyEncoder,
    AnySettings,
    DetectionHead,
    DisentangledEmbeddings,
    bound_settings,
    encoder_alone,
)
from electra.pretraining.settings import PretrainSettings, build_objective
from electra.train import checkpoint
from electra.train.log import read_metrics

CONFIG = "config.toml"
SCALED = ("layers", "hidden", "heads", "intermediate")
"""Settings of the encoder that generator.width and generator.depth change."""


def load_run(folder: Path) -> tuple[PretrainSettings, Any]:
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
    objective = build_objective(settings, tokenizer)
    checkpoint.restore(found, {"model": dict(objective.named_parameters())})
    return settings, objective.eval()


def export_parts(
    settings: PretrainSettings,
    networks: dict[str, tuple[AnyEncoder, torch.nn.Module]],
    run: Path,
    out: Path,
    figures: dict[str, Any],
) -> list[str]:
    """A folder for each network; one network is `out` itself. Returns one line about each folder written."""
    tokenizer = load_tokenizer(run / "tokenizer.json")
    special = special_ids(tokenizer)
    written = []
    top: torch.nn.Module | None
    for name, (encoder, head) in networks.items():
        kind: hf.Kind = "discriminator" if isinstance(head, DetectionHead) else "generator"
        target = out if len(networks) == 1 else out / name
        top, note = head, ""
        if not hf.has_form(encoder.settings, kind):
            kind, top = "encoder", None
            note = f" (the encoder alone: ModernBERT has no token head on words of {encoder.settings.embedding} units)"
        text = card.model_card(kind, settings.encoder.kind, config.to_toml(settings), figures)
        parts = kind, encoder, top, tokenizer, special, text
        written.append(hf.write_folder(target, *parts, objective=settings.objective.kind) + note)
    return written


def export_run(run: Path, out: Path) -> list[str]:
    settings, objective = load_run(run)
    heldout = [record for record in read_metrics(run) if record["kind"] == "heldout"]
    figures = heldout[-1] if heldout else {}
    return export_parts(settings, objective.networks(), run, out, figures)


def load_discriminator(model: Path) -> tuple[hf.Loaded, str]:
    """From a run folder or from a folder in transformers' format, and the objective it was trained with."""
    if not model.is_dir():
        raise DataError(f"{model} is neither a run folder nor an exported model folder.")
    if not (model / CONFIG).is_file():
        folder = inside(model, "discriminator")
        loaded = hf.load_discriminator(folder)
        return loaded, json.loads((folder / "config.json").read_bytes()).get(hf.OBJECTIVE, "electra")
    settings, objective = load_run(model)
    networks = objective.networks()
    if "discriminator" not in networks:
        raise DataError(f"{model} has no discriminator: its objective is {settings.objective.kind}.")
    encoder, head = networks["discriminator"]
    return hf.Loaded(standalone(encoder), head, load_tokenizer(model)), settings.objective.kind


def inside(model: Path, *names: str) -> Path:
    """An export of several networks is a folder of folders: the first of these that is there, else the folder itself."""
    return next((model / name for name in names if (model / name).is_dir()), model)


def load_detector(model: Path) -> hf.Loaded:
    loaded, objective = load_discriminator(model)
    if objective == "electric":
        raise DataError(f"{model} has energies, not probabilities of replacement. Use: electra score {model}")
    return loaded


def load_energy_model(model: Path) -> hf.Loaded:
    """The network of an Electric run, whose logits are energies."""
    loaded, objective = load_discriminator(model)
    if objective != "electric":
        raise DataError(
            f'{model} cannot score text: its objective is {objective}, and only "electric" learns energies. '
            "Train one with: electra pretrain electric data=…"
        )
    return loaded


def load_generator(model: Path) -> hf.Loaded:
    """The masked language model of a run folder or of a folder in transformers' format."""
    if (model / CONFIG).is_file():
        settings, objective = load_run(model)
        networks = objective.networks()
        if "generator" not in networks:
            raise DataError(
                f"{model} has no generator that could be used again (generator.kind={settings.generator.kind})."
            )
        encoder, head = networks["generator"]
        return hf.Loaded(encoder, head, load_tokenizer(model))
    return hf.load_generator(inside(model, "generator"))


def load_encoder(model: Path) -> tuple[AnyEncoder, Tokenizer]:
    """The main encoder of a run folder, or the encoder of a folder in transformers' format."""
    if (model / CONFIG).is_file():
        _, objective = load_run(model)
        return standalone(next(iter(objective.networks().values()))[0]), load_tokenizer(model)
    return hf.load_encoder(inside(model, "discriminator", "recovery", "generator"))


def standalone(encoder: AnyEncoder) -> AnyEncoder:
    """An encoder that needs no other: a disentangled one reads its generator's word table, which would stay behind when it
    is moved to another device."""
    if not isinstance(encoder.embeddings, DisentangledEmbeddings):
        return encoder
    alone = encoder_alone(encoder.settings, len(encoder.embeddings.table))
    alone.load_state_dict(encoder_tensors(encoder))
    return alone.eval()


def copy_weights(name: str, source: torch.nn.Module, target: torch.nn.Module) -> None:
    """The word table of a disentangled discriminator begins as the generator's; the difference is its own."""
    weights = encoder_tensors(source) if isinstance(source, AnyEncoder) else source.state_dict()
    if isinstance(source, AnyEncoder) and isinstance(target, AnyEncoder):
        require_fit(name, source.settings, target.settings)
    if isinstance(target, AnyEncoder) and isinstance(target.embeddings, DisentangledEmbeddings):
        table = weights.pop("embeddings.words.weight")
        weights["embeddings.delta"] = table - (target.embeddings.table - target.embeddings.delta).detach()
    try:
        target.load_state_dict(weights)
    except RuntimeError as error:
        last = str(error).splitlines()[-1].strip()
        raise SettingsError(f"{name} does not fit this recipe ({last}). Use the one it is from.") from None


def require_fit(name: str, there: AnySettings, here: AnySettings) -> None:
    """Weights that load are not enough: in another number of heads or another window they compute something else."""
    if there.kind != here.kind:
        raise SettingsError(
            f"the network of {name} is of kind {there.kind} and this recipe's is {here.kind}: "
            f"give encoder.kind={there.kind}."
        )
    theirs, ours = bound_settings(there), bound_settings(here)
    other = [key for key in theirs if key in ours and theirs[key] != ours[key]]
    if not other:
        return
    if "layers" in other:  # which of them are local can be compared once there are as many
        other = [key for key in other if key != "global_every"]
    scaled = SCALED if name.startswith("generator.") else ()
    shown = [
        f"{key} {theirs[key]} there and {ours[key]} here"
        if key in scaled
        else f"encoder.{key} is {theirs[key]} there and {ours[key]} here"
        for key in other
    ]
    remedies = [f"encoder.{key}={theirs[key]}" for key in other if key not in scaled]
    if len(remedies) < len(other):
        remedies.append("the generator.width and generator.depth that make the same sizes")
    note = ""
    if there.kind == "modernbert" and "embedding" in other and there.embedding == there.hidden:
        note = " In an exported ModernBERT words are as wide as the layers; the run has them as they were."
    raise SettingsError(
        f"the network of {name} does not fit this recipe: {', '.join(shown)}: give {' and '.join(remedies)}.{note}"
    )
