"""Initial weights from another run, an export or an import, copied into the networks of a recipe.

The optimizer and the schedule are always new. What does not fit is refused, with the settings that would fit. Three things are made
to fit: a longer table of positions (its rows repeated in order: neighbours stay neighbours) and tokens that were added to the
vocabulary (the mean of their old pieces), both with a message, and rows of padding at the end of a word table (cut).
"""

import logging
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from electra.base.errors import DataError, SettingsError
from electra.base.progress import Table
from electra.data.extension import added_pieces
from electra.data.tokenizer import vocabulary_size
from electra.interop.formats import own_tensors
from electra.interop.importing import RECIPE_FILE
from electra.interop.read import Pretrained
from electra.model import Encoder, EncoderSettings, compatibility_settings
from electra.model.heads import TokenHead
from electra.model.modern import ModernEncoderSettings
from electra.objectives import Objective
from electra.objectives.corruption import Network
from electra.pretraining.load import CONFIG, EXPORTS, load_network, load_run, pretrained
from electra.pretraining.settings import PretrainSettings
from electra.train.log import read_metrics

log = logging.getLogger(__name__)
SCALED = ("layers", "hidden", "heads", "intermediate")
"""Settings of the encoder that generator.width and generator.depth change."""
WORDS_OF_HEAD = "bias"


def take_weights(settings: PretrainSettings, objective: Objective, tokenizer: Tokenizer) -> None:
    """Copy the weights that the settings name, the generator's first: a disentangled discriminator is stored as its difference
    from the generator, and shared embeddings are those of the discriminator."""
    networks = objective.networks()
    name, main = next(iter(networks.items()))
    generator = networks.get("generator") if name != "generator" else None
    if settings.generator.kind == "frozen":
        source = load_network(Path(settings.generator.source), "generator")
        copy_network(f"generator.source={settings.generator.source}", source, networks["generator"], tokenizer)
    if not settings.start:
        return
    start = load_network(Path(settings.start))
    parts = [f"the encoder of {settings.start}"]
    if generator is not None and settings.generator.kind == "transformer":
        parts.append(take_generator(settings, start, main, generator, tokenizer))
    try:
        copy_encoder(f"start={settings.start}", start, main.encoder, tokenizer)
    except SettingsError as error:
        recipe = Path(settings.start) / RECIPE_FILE
        added = f" Or add the sizes of the import: RECIPE+{recipe}." if recipe.is_file() else ""
        raise SettingsError(f"{error}{added}") from None
    if has_same_head(settings, start, main):
        copy_weights(f"start={settings.start}", grown_head(start, tokenizer), main.head)
        parts.insert(1, "its head")
    log.info("the run begins with %s; the optimizer and the schedule are new.", ", ".join(parts))


def take_generator(
    settings: PretrainSettings, start: Pretrained, main: Network, generator: Network, tokenizer: Tokenizer
) -> str:
    """Copy the generator's weights; returns, in words, what it begins with."""
    if settings.generator.start == "discriminator":
        layers = generator.encoder.settings.layers
        copy_first_layers(f"start={settings.start}", start, generator, tokenizer)
        return f"a generator of its first {f'{layers} layers' if layers > 1 else 'layer'}"
    stored = stored_generator(Path(settings.start)) if settings.generator.start == "auto" else None
    if stored is None:
        return "a new generator"
    try:
        if generator.encoder is main.encoder:
            copy_weights(f"start={settings.start}", grown_head(stored, tokenizer), generator.head)
            return "the head of its generator"
        copy_network(f"start={settings.start}", stored, generator, tokenizer)
    except SettingsError as error:
        log.warning("the generator beside start is not used but replaced by a new one: %s", error)
        return "a new generator"
    tied = settings.generator.sharing == "tied"
    if tied and not start.encoder.embeddings.table.equal(stored.encoder.embeddings.table):
        log.warning(
            "generator and discriminator of %s have word tables of their own; with generator.sharing=tied the generator reads that of "
            "the discriminator. generator.sharing=none keeps both.",
            settings.start,
        )
    return "its generator"


def stored_generator(path: Path) -> Pretrained | None:
    """The generator that a discriminator was trained with, if it is still there."""
    if (path / CONFIG).is_file():
        settings, objective = load_run(path)
        _, *others = objective.networks().items()
        return next((pretrained(settings, it, path) for name, it in others if name == "generator"), None)
    beside = any((path / name).is_dir() for name in EXPORTS if name != "generator")
    if not (beside and (path / "generator").is_dir()):
        return None
    stored = load_network(path / "generator")
    if stored.kind == "generator":
        return stored
    log.warning(
        "%s/generator was exported without its token head: the run gives it a new generator. The run folder has it.",
        path,
    )
    return None


def has_same_head(settings: PretrainSettings, start: Pretrained, main: Network) -> bool:
    """Whether the main network can begin with the head too. Electric's head has the shape of ELECTRA's, but its outputs are energies."""
    alike = (settings.objective.kind == "electric") == (start.objective == "electric")
    return start.head is not None and start.kind == main.kind and (alike or main.kind == "generator")


def copy_network(name: str, source: Pretrained, target: Network, tokenizer: Tokenizer) -> None:
    assert source.head is not None
    copy_encoder(name, source, target.encoder, tokenizer, is_scaled=True)
    copy_weights(name, grown_head(source, tokenizer), target.head)


def copy_encoder(name: str, source: Pretrained, target: Encoder, tokenizer: Tokenizer, is_scaled: bool = False) -> None:
    """Copy an encoder's weights. `is_scaled`: the target's sizes come from generator.width and generator.depth."""
    require_fit(name, source.encoder.settings, target.settings, SCALED if is_scaled else ())
    copy_weights(name, grown_encoder(name, source, target.settings, tokenizer), target)


def copy_first_layers(name: str, source: Pretrained, target: Network, tokenizer: Tokenizer) -> None:
    weights, small = grown_encoder(name, source, target.encoder.settings, tokenizer), target.encoder.settings
    kept = {*target.encoder.state_dict(), "embeddings.words.weight"}
    alike = ("kind", "hidden", "heads", "intermediate", "embedding")
    widths = {key: getattr(source.encoder.settings, key) for key in alike}
    if other := [key for key, value in widths.items() if getattr(small, key) != value]:
        shown = ", ".join(f"{key} is {widths[key]} there and {getattr(small, key)} here" for key in other)
        raise SettingsError(
            f"no generator can be made of {name}: {shown}. Give generator.width=1 and the encoder of {name}."
        )
    modern = [it for it in (source.encoder.settings, small) if isinstance(it, ModernEncoderSettings)]
    local = [[it.is_local(layer) for layer in range(small.layers)] for it in modern]
    if any(it != local[0] for it in local):  # global_from=last counts from the last layer, which is another one here
        remedy = "Give a generator.depth that leaves out a multiple of encoder.global_every layers"
        raise SettingsError(f"no generator can be made of {name}: its first layers would be local elsewhere. {remedy}.")
    copy_weights(name, {key: tensor for key, tensor in weights.items() if key in kept}, target.encoder)
    head = grown_head(source, tokenizer) if isinstance(source.head, TokenHead) else {}
    if {key: it.shape for key, it in head.items()} == {key: it.shape for key, it in target.head.state_dict().items()}:
        copy_weights(name, head, target.head)


# Making weights fit


def grown_encoder(name: str, source: Pretrained, target: EncoderSettings, tokenizer: Tokenizer) -> dict[str, Tensor]:
    weights = own_tensors(source.encoder)
    weights["embeddings.words.weight"] = grown_rows(
        name, weights["embeddings.words.weight"], source.tokenizer, tokenizer
    )
    positions = weights.get("embeddings.positions.weight")
    if positions is not None and target.positions > len(positions):
        repeats = -(-target.positions // len(positions))
        weights["embeddings.positions.weight"] = positions.repeat(repeats, 1)[: target.positions]
        there, here = len(positions), target.positions
        log.info("%s has %d positions, this run %d: the additional ones start as copies, in order.", name, there, here)
    return weights


def grown_head(source: Pretrained, tokenizer: Tokenizer) -> dict[str, Tensor]:
    assert source.head is not None
    weights = source.head.state_dict()
    if isinstance(source.head, TokenHead):
        weights[WORDS_OF_HEAD] = grown_rows("the head", weights[WORDS_OF_HEAD], source.tokenizer, tokenizer)
    return weights


def grown_rows(name: str, table: Tensor, theirs: Tokenizer, ours: Tokenizer) -> Tensor:
    """The table with a row for each token of our tokenizer."""
    pieces = added_pieces(theirs, ours)
    if pieces is None:
        raise DataError(
            f"{name} was trained with another tokenizer than the data. Prepare the text with its tokenizer, or with an extension of it."
        )
    if pieces and table.ndim > 1:
        text = "%s gets %d new tokens: the embedding of each begins as the mean of its old pieces."
        log.info(text, name, len(pieces))
    rows = [table[: vocabulary_size(theirs)], *(table[ids].mean(0, keepdim=True) for ids in pieces)]
    return torch.cat(rows)


def copy_weights(name: str, weights: dict[str, Tensor], target: torch.nn.Module) -> None:
    """Load weights into `target`; errors name the setting `name`. A disentangled discriminator reads the generator's word table,
    so it stores only its difference from that."""
    if isinstance(target, Encoder) and target.embeddings.is_disentangled:
        weights = dict(weights)
        table = weights.pop("embeddings.words.weight")
        weights["embeddings.delta"] = table - (target.embeddings.table - target.embeddings.delta).detach()
    try:
        target.load_state_dict(weights)
    except RuntimeError as error:
        last = str(error).splitlines()[-1].strip()
        raise SettingsError(f"{name} does not fit this recipe ({last}). Use the recipe it comes from.") from None


def require_fit(name: str, there: EncoderSettings, here: EncoderSettings, scaled: tuple[str, ...]) -> None:
    """Refuse an encoder of another architecture. That weights load is not enough: with another number of heads or another window
    they compute something else. `scaled` are the settings that cannot be given by their own name."""
    source, target = compatibility_settings(there), compatibility_settings(here)
    other = [key for key in source if key in target and source[key] != target[key]]
    if "positions" in other and here.positions > there.positions:  # the table is made longer
        other.remove("positions")
    if "kind" in other:
        other = ["kind"]
    if "layers" in other:  # which of them are local can only be compared if there are as many
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
        note = " In an exported ModernBERT words are as wide as the layers; the run folder has them at their original width."
    raise SettingsError(
        f"the network of {name} does not fit this recipe: {shown}: give {' and '.join(remedies)}.{note}"
    )


def before_and_after(run: Path) -> Table | None:
    """What the run has changed on held-out text: the metrics of its initial weights beside its last ones; None without the former."""
    records = read_metrics(run, "heldout")
    if len(records) < 2 or records[0]["step"] != 0:
        return None
    first, last = records[0], records[-1]
    names = [name for name, value in last.items() if isinstance(value, float) and isinstance(first.get(name), float)]
    rows = [(name, f"{first[name]:.4f}", f"{last[name]:.4f}", f"{last[name] - first[name]:+.4f}") for name in names]
    return Table(("held-out", "before", f"after step {last['step']:,}", "change"), rows)
