"""Imports other people's networks as our model folders: ELECTRA, BERT, RoBERTa and ModernBERT from transformers' folders, ELECTRA
and BERT from Google's TensorFlow checkpoints.

BERT's block is ELECTRA's, with words as wide as the layers. RoBERTa's is BERT's with another epsilon; its table of positions
begins with rows that no token reads, and it has one segment type where we have two. So each of them is renamed to an ELECTRA (or a
ModernBERT) in transformers' names, then read, checked and written as one. Tensors that do not fit are listed, with the reason.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from electra.base import config as configuration
from electra.base.errors import CorruptError, DataError, SettingsError, counted
from electra.base.files import read_object, write_synced
from electra.base.progress import Progress, literal
from electra.data.tokenizer import is_same_tokenizer, vocabulary_size
from electra.interop.card import usage, with_header
from electra.interop.foreign import (
    Weights,
    file_vocabulary,
    folder_vocabulary,
    folder_weights,
    inside,
    listed,
    refuse_code,
)
from electra.interop.formats import (
    ELECTRA_ENCODER,
    FORMATS,
    HEADS,
    MODERNBERT_ENCODER,
    Name,
    from_google,
    has_name,
    network_class,
    our_names,
    rename,
)
from electra.interop.read import OBJECTIVE, Pretrained, Stored, build_network, checked_settings, refuse_other_shapes
from electra.interop.tensorflow import read_bundle
from electra.interop.write import whole_or_absent, write_network

RECIPE_FILE, REPORT_FILE = "recipe.toml", "import.json"
HEAD_UNITS = 64
"""Units per attention head in every released ELECTRA and BERT; a TensorFlow checkpoint does not say how many heads there are."""
MOST_PADDING = 1024
"""The most rows of a word table that may have no token; or a tenth of the table, if that is more."""
WORD_TABLE, POSITION_TABLE, SEGMENT_TABLE = (
    f"electra.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")
)


@dataclass(frozen=True)
class Family:
    """A family of models that can be imported. `token_head` is the class whose tensor names its masked language modelling head
    has; `pads`: positions are counted from pad_token_id + 1."""

    title: str
    kind: str
    prefix: str
    token_head: str
    pads: bool = False

    @property
    def encoder(self) -> tuple[Name, ...]:
        return MODERNBERT_ENCODER if self.kind == "modernbert" else ELECTRA_ENCODER


FAMILIES = {
    "electra": Family("ELECTRA", "electra", "electra.", "ElectraForMaskedLM"),
    "bert": Family("BERT", "electra", "bert.", "BertForMaskedLM"),
    "roberta": Family("RoBERTa", "electra", "roberta.", "RobertaForMaskedLM", pads=True),
    "xlm-roberta": Family("XLM-RoBERTa", "electra", "roberta.", "RobertaForMaskedLM", pads=True),
    "camembert": Family("CamemBERT", "electra", "roberta.", "RobertaForMaskedLM", pads=True),
    "modernbert": Family("ModernBERT", "modernbert", "model.", "ModernBertForMaskedLM"),
}
LACKING = {
    "albert": "ALBERT, whose layers share one set of weights",
    "deberta": "DeBERTa, whose attention knows relative positions",
    "deberta-v2": "DeBERTa, whose attention knows relative positions",
    "distilbert": "DistilBERT, which has no segments and other tensor names",
    "mpnet": "MPNet, whose attention knows relative positions",
    "t5": "T5, an encoder with a decoder",
    "bart": "BART, an encoder with a decoder",
    "gpt2": "GPT-2, a decoder",
    "llama": "Llama, a decoder",
}
OUTPUT_MATRICES = (
    "generator_lm_head.weight",
    "cls.predictions.decoder.weight",
    "lm_head.decoder.weight",
    "decoder.weight",
)
OUTPUT_BIASES = ("cls.predictions.decoder.bias", "lm_head.decoder.bias")
OPTIMIZER = ("adam_m", "adam_v", "Adam", "Adam_1", "Momentum", "lamb_m", "lamb_v")
COUNTERS = ("global_step", "beta1_power", "beta2_power", "good_steps", "current_loss_scale", "loss_scale")


@dataclass(frozen=True)
class ImportOptions:
    """What the user says about a source, which takes precedence over the source. `tokenizer`: a vocab.txt, a tokenizer.json or a
    folder with one; `lowercase`: for a vocab.txt; `heads`: number of attention heads, for a TensorFlow checkpoint; `allow_bin`: read
    pytorch_model.bin, with weights_only."""

    tokenizer: Path | None = None
    lowercase: bool | None = None
    heads: int | None = None
    allow_bin: bool = False


class Imported(NamedTuple):
    """The folders written and who has read each back; notes on decisions; tensors that were left out, with the reason."""

    folders: dict[str, tuple[Path, str]]
    notes: list[str]
    left_out: dict[str, str]
    recipe: Path

    def left_out_lines(self) -> list[str]:
        return grouped(self.left_out)


@dataclass(frozen=True)
class Claim:
    """A tensor of the source that has a place in ours; `turned`: it is stored transposed."""

    name: str
    turned: bool = False


@dataclass(frozen=True)
class Candidate:
    """A network before its tensors are read: which of them go where (by transformers' names), its config and tokenizer."""

    folder: Path
    family: Family
    weights: Weights
    claims: Mapping[str, Claim]
    config: Mapping[str, Any]
    tokenizer: Tokenizer | None


def import_network(source: Path, out: Path, generator: Path | None, options: ImportOptions) -> Imported:
    """Writes the model folder `out`; if there is a generator, two folders in it, discriminator/ and generator/, as in an export."""
    notes: list[str] = []
    candidates = read_candidates(source, options, notes)
    if generator is not None:
        if len(candidates) > 1:
            raise SettingsError(f"{source} has a generator of its own: another one cannot be added. Leave it out.")
        candidates += read_candidates(generator, options, notes)[-1:]
    tokenizers = [it.tokenizer for it in candidates if it.tokenizer]
    if options.tokenizer is not None:
        tokenizers = [given_tokenizer(options.tokenizer, options.lowercase, notes)]
    if not tokenizers:
        raise DataError(f"{source} has neither tokenizer.json nor vocab.txt. Give one.", ("tokenizer",))
    tokenizer, *others = tokenizers
    if not all(is_same_tokenizer(it, tokenizer) for it in others):
        raise DataError(f"{source} and {generator} have different tokenizers, so they are not a pair.")

    networks: list[Pretrained] = []
    left_out: dict[str, str] = {}
    taken: defaultdict[Path, set[str]] = defaultdict(set)  # by file: a TensorFlow checkpoint has two networks
    for candidate in candidates:
        network, used = build_candidate(candidate, tokenizer, notes)
        networks.append(network)
        taken[candidate.weights.where] |= used
    for candidate, network in zip(candidates, networks, strict=True):
        unused = [name for name in candidate.weights.shapes if name not in taken[candidate.weights.where]]
        left_out |= {name: reason(name, candidate.family, network.kind) for name in unused}
    refuse_strange(source, left_out)
    notes[:] = dict.fromkeys(notes)  # two networks may have the same notes
    if generator is not None and networks[1].kind != "generator":
        raise DataError(f"{generator} is not a generator: it has no head for masked language modelling.")
    return write_import(source, out, networks, candidates, notes, left_out)


def write_import(
    source: Path,
    out: Path,
    networks: list[Pretrained],
    candidates: list[Candidate],
    notes: list[str],
    left_out: dict[str, str],
) -> Imported:
    title = candidates[0].family.title
    recipe = recipe_text(networks, notes)
    report: dict[str, Any] = {"source": source.name, "family": title, "networks": [it.kind for it in networks]}
    report |= {"notes": notes, "left_out": left_out}
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    files = {RECIPE_FILE: recipe.encode(), REPORT_FILE: text.encode()}
    names = ["discriminator", "generator"] if len(networks) > 1 else [""]
    folders = {}
    with whole_or_absent(out) as temporary:
        for name, network in zip(names, networks, strict=True):
            card = import_card(title, source.name, network, left_out)
            read_by = write_network(temporary / name, network, card, files)
            folders[name or network.kind] = (out / name, read_by)
        if len(networks) > 1:
            tokenizer = (temporary / names[0] / "tokenizer.json").read_bytes()
            for name, data in {**files, "tokenizer.json": tokenizer}.items():
                write_synced(temporary / name, data)
    return Imported(folders, notes, left_out, out / RECIPE_FILE)


# What a source holds


def read_candidates(source: Path, options: ImportOptions, notes: list[str]) -> list[Candidate]:
    if prefix := checkpoint_prefix(source):
        return tensorflow_candidates(prefix, options, notes)
    if not source.is_dir():
        what = "is neither a folder nor a TensorFlow checkpoint" if source.exists() else "does not exist"
        raise DataError(f"{source} {what}. Give a folder of transformers' format, or NAME of NAME.index.")
    return [transformers_candidate(source, options, notes)]


def transformers_candidate(folder: Path, options: ImportOptions, notes: list[str]) -> Candidate:
    if not (folder / "config.json").exists():
        raise DataError(
            f"{folder} is not a model folder: it has neither config.json nor a TensorFlow checkpoint (NAME.index)."
        )
    config = read_object(inside(folder, "config.json"))
    refuse_code(folder / "config.json", config)
    if OBJECTIVE in config:
        raise DataError(f"{folder} is already a model folder of electra, or made from one. Use it as it is.")
    family = family_of(folder, config.get("model_type"))
    weights = folder_weights(folder, options.allow_bin)
    claims: dict[str, Claim] = {}
    for name in weights.shapes:
        if (place := transformers_place(name, family)) is not None:
            if place in claims:
                raise CorruptError(f"{weights.where} has {place} twice: as {claims[place].name} and as {name}.")
            claims[place] = Claim(name)
    tokenizer = None if options.tokenizer else folder_vocabulary(folder, options.lowercase, notes)
    return Candidate(folder, family, weights, claims, config, tokenizer)


def family_of(folder: Path, name: object) -> Family:
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    what = LACKING.get(str(name), f"a model of type {str(name)[:60]!r}")
    raise DataError(
        f"{folder} is {what}: such a network is not supported. ELECTRA, BERT, RoBERTa and ModernBERT can be imported; with the tokenizer of this one a network "
        "can be pre-trained from scratch."
    )


def transformers_place(name: str, family: Family) -> str | None:
    """A tensor's name in ELECTRA's or ModernBERT's own class; None if it has none. Old checkpoints say gamma and beta in norms."""
    name = re.sub(r"\.(gamma|beta)$", lambda match: ".weight" if match[1] == "gamma" else ".bias", name)
    form, body = FORMATS[family.kind], name.removeprefix(family.prefix)
    if has_name(body, family.encoder):
        return f"{form.prefix}{body}"
    heads = [(family.token_head, f"{form.family}ForMaskedLM")]
    heads += [(form.discriminator, form.discriminator)] if family.title == "ELECTRA" else []
    for theirs, ours in heads:
        places = our_names(HEADS[ours])
        if place := rename(name, {it.transformers: places[it.ours] for it in HEADS[theirs]}):
            return place
    return None


def checkpoint_prefix(source: Path) -> Path | None:
    """The path prefix of a TensorFlow checkpoint, None if there is none; of several, the one that the file "checkpoint" names."""
    if source.name.endswith(".index"):
        return source.with_name(source.name.removesuffix(".index"))
    if not source.is_dir():
        return source if source.with_name(f"{source.name}.index").exists() else None
    names = sorted(path.name.removesuffix(".index") for path in source.glob("*.index"))
    if not names or (source / "model.safetensors").exists():
        return None
    pointer = source / "checkpoint"
    text = inside(source, "checkpoint").read_bytes()[:4096].decode("utf-8", "replace") if pointer.exists() else ""
    match = re.search(r'^model_checkpoint_path: "(?:[^"\n]*/)?([^"/\n]+)"', text, re.MULTILINE)
    if match and match[1] in names:
        names = [match[1]]
    if len(names) > 1:
        raise DataError(
            f"{source} has {len(names)} checkpoints ({', '.join(names[:5])}). Give one of them: {source / names[-1]}."
        )
    return source / names[0]


def tensorflow_candidates(prefix: Path, options: ImportOptions, notes: list[str]) -> list[Candidate]:
    """The networks in a TensorFlow checkpoint: discriminator and generator of an ELECTRA, or a BERT."""
    weights, folder = read_bundle(prefix), prefix.parent
    tokenizer = None if options.tokenizer else folder_vocabulary(folder, options.lowercase, notes)
    names = ("config.json", "bert_config.json", "electra_config.json")
    name = next((it for it in names if (folder / it).exists()), "")
    config = read_object(inside(folder, name)) if name else {}
    if any(name.endswith("/.ATTRIBUTES/VARIABLE_VALUE") for name in weights.shapes):
        raise DataError(
            f"{prefix} is a checkpoint of TensorFlow 2's objects. Only names of TensorFlow 1 (electra/…, bert/…) are known."
        )
    candidates: list[Candidate] = []
    family = FAMILIES["bert" if any(name.startswith("bert/") for name in weights.shapes) else "electra"]
    scopes = ("bert",) if family.title == "BERT" else ("electra", "generator")
    own_embeddings = any(name.startswith("generator/embeddings/") for name in weights.shapes)
    for scope in scopes:
        claims = dict(google_claims(weights, scope))
        if scope == "generator" and claims and not own_embeddings:  # it shares the discriminator's
            claims |= {place: it for place, it in google_claims(weights, "electra") if ".embeddings." in place}
        if any(".encoder.layer." in place for place in claims):
            main = candidates[0].config if candidates else {}
            described = inferred_config(prefix, weights, claims, {} if main else config)
            described["num_attention_heads"] = count_heads(described, main, options.heads, notes)
            candidates.append(Candidate(folder, family, weights, claims, described, tokenizer))
    if not candidates:
        raise DataError(f"{prefix} holds neither ELECTRA nor BERT: its tensors are {listed(weights.shapes)}.")
    return candidates


def google_claims(weights: Weights, scope: str) -> Iterator[tuple[str, Claim]]:
    form = FORMATS["electra"]
    heads = {"electra": "ElectraForPreTraining", "generator": "ElectraForMaskedLM", "bert": "BertForMaskedLM"}
    places = our_names(HEADS["ElectraForPreTraining" if scope == "electra" else "ElectraForMaskedLM"])
    head = [Name(it.ours, places[it.ours], it.google) for it in HEADS[heads[scope]]]
    for name in weights.shapes:
        if name.startswith(f"{scope}/"):
            if place := from_google(name.removeprefix(f"{scope}/"), ELECTRA_ENCODER):
                yield f"{form.prefix}{place[0]}", Claim(name, place[1])
        elif place := from_google(name, head):
            yield place[0], Claim(name, place[1])


def inferred_config(
    prefix: Path, weights: Weights, claims: Mapping[str, Claim], config: Mapping[str, Any]
) -> dict[str, Any]:
    """A config with the sizes of the tensors, with which `config` must agree. Shapes do not show heads and dropout."""
    layers = 1 + max(int(match[1]) for place in claims if (match := re.search(r"\.layer\.(\d+)\.", place)))
    shapes = {place: weights.shapes[claim.name] for place, claim in claims.items()}
    try:
        hidden, _ = shapes["electra.encoder.layer.0.attention.self.query.weight"]
        sizes = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": shapes["electra.encoder.layer.0.intermediate.dense.weight"][1],
            "max_position_embeddings": shapes[POSITION_TABLE][0],
        }
    except (KeyError, ValueError, IndexError) as error:
        raise CorruptError(f"{prefix}: {error} is missing, or not a matrix.") from None
    for key, value in sizes.items():
        if config.get(key, value) != value:
            raise CorruptError(f"{prefix}: {key} is {config[key]} in its config and {value} in its tensors.")
    return {**config, **sizes}


def count_heads(config: Mapping[str, Any], main: Mapping[str, Any], heads: int | None, notes: list[str]) -> Any:
    """The number of attention heads. A generator has as many units per head as its discriminator, whose config is `main`."""
    hidden = config["hidden_size"]
    if main:
        main_heads = main["num_attention_heads"]
        units = main["hidden_size"] // main_heads if isinstance(main_heads, int) and main_heads > 0 else 0
        return max(1, hidden // units) if units else main_heads
    if heads or "num_attention_heads" in config:
        return heads or config["num_attention_heads"]
    count = max(1, hidden // HEAD_UNITS)
    notes.append(
        f"attention heads: {count} for {hidden} units, since nothing says how many and {HEAD_UNITS} units per head are usual."
    )
    return count


# From a candidate to a network


def build_candidate(candidate: Candidate, tokenizer: Tokenizer, notes: list[str]) -> tuple[Pretrained, set[str]]:
    """The network, and the source's names of the tensors in it."""
    family, weights = candidate.family, candidate.weights
    tensors, total = {}, sum(math.prod(weights.shapes[it.name]) for it in candidate.claims.values())
    with Progress("import", total, unit="bytes", seconds_between_lines=2.0) as progress:
        for place, claim in candidate.claims.items():
            tensor = weights.floats(claim.name)
            tensors[place] = tensor.T.contiguous() if claim.turned else tensor
            progress.advance(progress.done + tensor.numel())
            if progress.seconds > 2 and progress.done < total:
                progress.report(f"{progress.rate / 1e6:.0f} M numbers/s")
    config = {**candidate.config, "model_type": family.kind}
    if family.kind == "electra":
        fit_electra(candidate, tensors, config, notes)
    if own_output(candidate, tensors):
        notes.append(
            "its token head has an output matrix of its own, where ours is the word table: the head is left out."
        )
        tensors = {place: it for place, it in tensors.items() if place.startswith(FORMATS[family.kind].prefix)}
    config.pop("tie_word_embeddings", None)
    rows = fit_vocabulary(candidate, tensors, tokenizer, notes)
    settings = checked_settings(candidate.folder / "config.json", config)
    refuse_other_shapes(weights.where, settings, rows, tensors)
    stored = Stored(candidate.folder, weights.where, config, settings, rows, tensors, tokenizer)
    network = build_network(stored)
    prefix, head = FORMATS[family.kind].prefix, HEADS[network_class(settings, network.kind)]
    places = [place for place in tensors if place.startswith(prefix) or has_name(place, head)]
    return network, {candidate.claims[place].name for place in places}


def fit_electra(candidate: Candidate, tensors: dict[str, Tensor], config: dict[str, Any], notes: list[str]) -> None:
    """Changes tensors and config in place so that BERT and RoBERTa become an ELECTRA."""
    words, positions, kinds = tensors.get(WORD_TABLE), tensors.get(POSITION_TABLE), tensors.get(SEGMENT_TABLE)
    if (
        words is not None
        and words.ndim == 2
        and (candidate.family.title != "ELECTRA" or "embedding_size" not in config)
    ):
        config["embedding_size"] = words.shape[1]
    if candidate.family.pads and positions is not None:
        pad = config.get("pad_token_id", 1)
        before = pad + 1 if isinstance(pad, int) and 0 <= pad < len(positions) - 2 else 0
        tensors[POSITION_TABLE] = positions[before:].clone()
        if isinstance(config.get("max_position_embeddings"), int):
            config["max_position_embeddings"] -= before
        notes.append(
            f"the first {before} of {len(positions)} positions belong to padding and were cut: {len(positions) - before} are left."
        )
    if kinds is not None and kinds.ndim == 2 and len(kinds) != 2:
        tensors[SEGMENT_TABLE] = kinds[:2].clone() if len(kinds) > 2 else kinds.repeat(2, 1)
        what = "the second begins as the first" if len(kinds) == 1 else f"the first two of {len(kinds)} are kept"
        notes.append(f"segments are of two kinds here: {what}.")


def own_output(candidate: Candidate, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the output matrix of the token head is not the word table."""
    table = word_table(tensors)
    for name in OUTPUT_MATRICES:
        if name in candidate.weights.shapes and table is not None:
            is_alike = candidate.weights.shapes[name] == tuple(tensors[table].shape)
            return not (is_alike and torch.equal(candidate.weights.floats(name), tensors[table]))
    is_untied = candidate.config.get("tie_word_embeddings") is False
    return is_untied and ("generator_lm_head.bias" in tensors or "decoder.bias" in tensors)


def word_table(names: Iterable[str]) -> str | None:
    return next((it for it in names if it.endswith((".word_embeddings.weight", ".tok_embeddings.weight"))), None)


def fit_vocabulary(candidate: Candidate, tensors: dict[str, Tensor], tokenizer: Tokenizer, notes: list[str]) -> int:
    """Cuts rows of the word table without a token (tables are often padded to a round number); returns the size of the vocabulary."""
    name = word_table(tensors)
    if name is None or tensors[name].ndim != 2:
        raise CorruptError(f"{candidate.weights.where} has no word table.")
    rows, size = len(tensors[name]), vocabulary_size(tokenizer)
    if size > rows:
        raise CorruptError(
            f"the tokenizer has {size:,} ids, {candidate.weights.where} has {rows:,} words. Give the right tokenizer.",
            ("tokenizer",),
        )
    if rows - size > max(MOST_PADDING, rows // 10):
        raise CorruptError(
            f"{candidate.weights.where} has {rows:,} words, the tokenizer {size:,} ids: too few for the rest to be padding. Give the right tokenizer.",
            ("tokenizer",),
        )
    if rows > size:
        notes.append(
            f"the word table has {rows:,} rows, the tokenizer {size:,} ids: the last {rows - size:,} rows are padding and were cut."
        )
        for place in (name, "generator_lm_head.bias", "decoder.bias"):
            if place in tensors and len(tensors[place]) == rows:
                tensors[place] = tensors[place][:size].clone()
    return size


def reason(name: str, family: Family, kind: str) -> str:
    """Why a tensor is left out."""
    last = name.rpartition("/")[2] or name
    if last in OPTIMIZER:
        return "state of the optimizer"
    if last in COUNTERS:
        return "counts the steps of training"
    if name.endswith("position_ids"):
        return "numbers of positions, not weights"
    if name in OUTPUT_MATRICES or name in OUTPUT_BIASES:
        return "the word table or the bias again" if kind == "generator" else "the head of another task"
    if "pooler" in name:
        return "BERT's pooler, which nothing here reads"
    if "seq_relationship" in name:
        return "BERT's head for the next sentence"
    if name.startswith(family.prefix) or "/encoder/" in name or name.startswith(("encoder.", "layers.", "embeddings.")):
        return "a part that our blocks lack"
    return "the head of another task"


def refuse_strange(source: Path, left_out: Mapping[str, str]) -> None:
    """Raises an error if an unknown tensor belongs to the encoder: then the network computes something else."""
    if strange := [name for name, why in left_out.items() if why == "a part that our blocks lack"]:
        raise DataError(
            f"{source} has tensors that no layer here uses: {listed(strange)}. Without them it would be a different network."
        )


# Files beside the weights


def given_tokenizer(path: Path, lowercase: bool | None, notes: list[str]) -> Tokenizer:
    tokenizer = folder_vocabulary(path, lowercase, notes) if path.is_dir() else file_vocabulary(path, lowercase, notes)
    if tokenizer is None:
        raise DataError(f"{path} has neither tokenizer.json nor vocab.txt.")
    return tokenizer


def recipe_text(networks: list[Pretrained], notes: list[str]) -> str:
    """The sizes of the networks as a recipe to add to any other, for a run that starts from these weights."""
    main = networks[0].encoder.settings
    what = "# The sizes of an imported network: electra pretrain RECIPE+THIS start=FOLDER data=… run=…"
    lines = [what, "[encoder]", configuration.to_toml(main)]
    if len(networks) > 1:
        small = networks[1].encoder.settings
        width, depth = small.hidden / main.hidden, small.layers / main.layers
        dropout = {"dropout": small.dropout, "attention_dropout": small.attention_dropout}
        if main.scaled(width, depth).model_copy(update=dropout) == small:
            sharing = "tied" if embeddings_equal(networks) else "none"
            lines += ["[generator]", f"width = {width!r}", f"depth = {depth!r}", f'sharing = "{sharing}"', ""]
            if sharing == "none":
                own = "generator and discriminator have embeddings of their own"
                notes.append(f"{own}: recipe.toml says generator.sharing=none.")
        else:
            none = "no generator.width and generator.depth make this generator"
            notes.append(f"{none}: a run from here begins with a new one (generator.start=fresh).")
            lines += ["[generator]", 'start = "fresh"', ""]
    return "\n".join(lines)


def embeddings_equal(networks: list[Pretrained]) -> bool:
    first, second = (it.encoder.embeddings.state_dict() for it in networks)
    return first.keys() == second.keys() and all(first[key].equal(second[key]) for key in first)


def grouped(left_out: Mapping[str, str]) -> list[str]:
    """One line per reason for leaving tensors out."""
    groups: dict[str, list[str]] = {}
    for name, why in left_out.items():
        groups.setdefault(why, []).append(name)
    counts = {why: counted(len(names), "tensor") for why, names in groups.items()}
    return [f"{why}: {counts[why]} ({listed(names)})" for why, names in groups.items()]


def import_card(title: str, source: str, network: Pretrained, left_out: Mapping[str, str]) -> str:
    reader = network_class(network.encoder.settings, network.kind)
    rows = "\n".join(f"- {literal(line)}" for line in grouped(left_out)) or "- nothing"
    tags = list(dict.fromkeys(("electra", network.encoder.settings.kind, network.kind)))
    card = f"""# {title} {network.kind}, imported from {literal(source)}

The weights are those of the source, under whose licence they are; `electra import` gave them the names of transformers' {reader}. Left out:

{rows}

## Use

{usage(reader)}

`recipe.toml` has the sizes, to go on pre-training: `electra pretrain RECIPE+FOLDER/recipe.toml start=FOLDER data=… run=…`.
"""
    return with_header(card, {"library_name": "transformers", "tags": tags, "license": "other"})
