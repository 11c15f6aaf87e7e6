"""Metrics of a finished or running pre-training on held-out documents."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer

from electra.base.batch import Batch
from electra.base.errors import CorruptError, DataError, SettingsError
from electra.data.shards import few_held_out, read_manifest
from electra.data.tokenizer import continuing_tokens, is_same_tokenizer, load_tokenizer, special_ids, tokenizer_hash
from electra.model import readable_length
from electra.model.generators import TransformerGenerator
from electra.model.heads import TokenHead
from electra.objectives import Objective
from electra.objectives.corruption import Corruptor
from electra.objectives.losses import Sums
from electra.objectives.metrics import OF_GENERATOR, Metrics, detection, summarise
from electra.pretraining.load import load_network, load_run, load_settings
from electra.pretraining.run import build_heldout
from electra.pretraining.settings import PretrainSettings, build_objective
from electra.train.device import choose_device
from electra.train.loop import sums_over

log = logging.getLogger(__name__)
MEANINGS = {
    "mlm_loss": "generator: cross-entropy at the chosen positions (nats)",
    "mlm_accuracy": "generator: its first guess is the original token",
    "sampled_accuracy": "generator: the token it sampled is the original",
    "replaced_share": "tokens that were replaced (Electric: all noise, also a sample that is the original)",
    "rtd_loss": "discriminator: binary cross-entropy, all real tokens",
    "rtd_accuracy": "discriminator: right answers",
    "majority_baseline": 'right answers of always saying "original"',
    "precision": "of the tokens it flags, replaced ones",
    "recall": "of the replaced tokens, flagged ones",
    "auc": "ROC-AUC: a replaced token scores above an original one",
    "energy_variance": "Electric: how much its scores differ within a batch; near 0 they say nothing",
    "recovery_loss": "main network: cross-entropy of naming the original tokens",
    "reward": "generator: mean reward, the discriminator's loss at its samples",
    "selection_accuracy": "main network: picks the original among the candidates",
    "span_loss": "main network: binary cross-entropy of replaced spans",
    "span_accuracy": "main network: right answers about spans",
}


def evaluate_run(
    run: Path, data: Path | None = None, rows: int | None = None, generator: Path | None = None
) -> tuple[Metrics, Metrics]:
    """Metrics of a run's networks on held-out documents, and those of an untrained network that reads the same text, as the
    trained generator has corrupted it.

    `generator`: another run, whose generator corrupts the text instead. Data, rows, masking, sampling and precision are then
    that run's too, so that every discriminator reads the same text: a yardstick for runs whose own generators differ."""
    if rows is not None and rows < 1:
        raise SettingsError(
            f"cannot evaluate {rows} rows. Give at least 1, or leave it out for as many as in training."
        )
    settings, trained = load_run(run)
    tokenizer = load_tokenizer(run / "tokenizer.json")
    text, corruptor = (settings, None) if generator is None else yardstick(run, settings, generator, tokenizer)
    folder = data or Path(text.data)
    if data is None and not folder.exists():
        raise DataError(missing_shards(generator or run, folder), ("data",))
    manifest = read_manifest(folder)
    other = manifest.tokenizer_sha256 != tokenizer_hash(tokenizer)
    if other and not is_same_tokenizer(load_tokenizer(folder), tokenizer):
        raise CorruptError(
            f"{folder} was prepared with another tokenizer than {run} was trained with. Prepare it again."
        )
    changes = {"device": "auto"} | ({"evaluate_rows": rows} if rows is not None else {})  # any machine may evaluate
    train = text.train.model_copy(update=changes)
    device = choose_device(train)
    trained.to(device).eval()
    untrained = build_objective(settings, tokenizer).to(device).eval()

    # how both networks are scored
    if corruptor is None:
        own = trained.corruptor
        scores = [lambda batch: trained(batch).sums, lambda batch: untrained(batch, own(batch) if own else None).sums]
    else:
        corruptor.to(device).eval()
        scores = [detect(run, objective, corruptor) for objective in (trained, untrained)]
    heldout = build_heldout(text.model_copy(update={"train": train}), folder, special_ids(tokenizer))
    if not len(heldout):
        raise DataError(
            f"{folder} has no held-out documents. Prepare some text with heldout=0.01 and give that folder as data."
        )
    if warning := few_held_out(manifest):
        log.warning(warning)

    how = device, train.precision, train.fast != "off"  # as in training
    sums = (sums_over(heldout, score, *how) for score in scores)
    ours, theirs = (summarise(part, trained.extra_metrics) for part in sums)
    if trained.corruptor is not None:  # the second column has no generator of its own
        theirs = {name: value for name, value in theirs.items() if name not in OF_GENERATOR}
    return ours, theirs


def missing_shards(run: Path, folder: Path) -> str:
    """The error message if a run's shards do not exist. A run keeps their path as it was given."""
    if folder.is_absolute():
        return f"{folder}, the shards of {run}, does not exist. Give their current path as data."
    where = f"which is relative to where it was started and does not exist from {Path.cwd()}"
    return f"{run} was trained on {folder}, {where}. Change to that folder, or give the path of the shards from here as data."


def detect(run: Path, objective: Objective, corruptor: Corruptor) -> Callable[[Batch], Sums]:
    """A function that scores the discriminator on replacements by `corruptor`. Electric's outputs are energies: compare only AUC."""
    network = objective.networks().get("discriminator")
    if network is None:
        raise DataError(f"{run} has no discriminator to test on another generator's text.")

    def score(batch: Batch) -> Sums:
        corrupted = corruptor(batch)
        return detection(network.detect(corrupted.batch), corrupted.is_replaced, batch.is_real).sums

    return score


def yardstick(
    run: Path, settings: PretrainSettings, generator: Path, tokenizer: Tokenizer
) -> tuple[PretrainSettings, Corruptor]:
    """The settings of another run, which define the text, and a corruptor with its generator. A masked LM is a generator too."""
    text, network = load_settings(generator), load_network(generator, "generator")
    if not is_same_tokenizer(network.tokenizer, tokenizer):
        raise DataError(f"{generator} was trained with another tokenizer than {run}: their tokens cannot be compared.")
    if text.rows.length > readable_length(settings.encoder, text.rows.length):
        reads = f"{run} can read (encoder.positions {settings.encoder.positions})"
        raise SettingsError(f"the rows of {generator} (rows.length {text.rows.length}) are longer than {reads}.")
    assert isinstance(network.head, TokenHead)
    frozen = TransformerGenerator(network.encoder, network.head, learns=False)
    continues = torch.from_numpy(continuing_tokens(tokenizer))
    return text, Corruptor(frozen, text.masking, text.sampling, special_ids(tokenizer), continues)
