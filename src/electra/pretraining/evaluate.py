"""Metrics of a finished or running pre-training on held-out documents."""

from pathlib import Path

import torch

from electra.base.batch import Batch
from electra.base.errors import CorruptError, DataError
from electra.data.shards import read_manifest
from electra.data.tokenizer import load_tokenizer, special_ids, tokenizer_hash
from electra.objectives import Adversarial, Electra, Objective, ReplacedSpan, Selection
from electra.objectives.losses import detection_loss
from electra.objectives.metrics import Metrics, Sums, detection_sums, summarise
from electra.pretraining.load import load_run
from electra.pretraining.run import build_heldout
from electra.pretraining.settings import build_objective
from electra.train.device import choose_device, kernels
from electra.train.loop import add_sums

MEANINGS = {
    "mlm_loss": "generator: cross-entropy at the chosen positions (nats)",
    "mlm_accuracy": "generator: its first guess is the original token",
    "sampled_accuracy": "generator: the token it sampled is the original",
    "replaced_share": "tokens that were really replaced",
    "rtd_loss": "discriminator: binary cross-entropy, all real tokens",
    "rtd_accuracy": "discriminator: right answers",
    "majority_baseline": 'right answers of always saying "original"',
    "precision": "of the tokens it flags, replaced ones",
    "recall": "of the replaced tokens, flagged ones",
    "auc": "ROC-AUC: a replaced token scores above an original one",
    "recovery_loss": "main network: cross-entropy of naming the original tokens",
    "reward": "generator: mean reward, the discriminator's loss at its samples",
    "selection_accuracy": "main network: picks the original among the candidates",
    "span_loss": "main network: binary cross-entropy of replaced spans",
    "span_accuracy": "main network: right answers about spans",
}


def evaluate_run(run: Path, data: Path | None = None, rows: int | None = None) -> tuple[Metrics, Metrics]:
    """(metrics of the trained network, metrics of an untrained discriminator reading the same corrupted text)."""
    settings, trained = load_run(run)
    folder = data or Path(settings.data)
    tokenizer = load_tokenizer(run / "tokenizer.json")
    if read_manifest(folder).tokenizer_sha256 != tokenizer_hash(tokenizer):
        raise CorruptError(
            f"{folder} was prepared with another tokenizer than {run} was trained with. Prepare it again."
        )
    special = special_ids(tokenizer)
    if rows:
        settings = settings.model_copy(
            update={"train": settings.train.model_copy(update={"evaluate_rows": rows})}
        )
    device = choose_device(settings.train.model_copy(update={"device": "auto"}))  # any machine may evaluate
    untrained = build_objective(settings, tokenizer).to(device).eval()
    trained.to(device).eval()
    ours: Sums = {}
    baseline: Sums = {}
    with torch.no_grad(), kernels(settings.train.fast != "off"):
        for batch in build_heldout(settings, folder, special):
            batch = batch.to(device)
            add_sums(ours, trained(batch).sums)
            add_sums(baseline, baseline_sums(trained, untrained, batch))
    if not ours:
        raise DataError(
            f"{folder} has no held-out documents. Prepare some text with --heldout 0.01 and give it as --data."
        )
    return summarise(ours, trained.extra_metrics), summarise(baseline, untrained.extra_metrics)


def baseline_sums(trained: Objective, untrained: Objective, batch: Batch) -> Sums:
    """What an untrained network makes of the batch: where it detects, of the text that the trained generator corrupted."""
    if not isinstance(trained, Electra | Adversarial | ReplacedSpan | Selection):
        return untrained(batch).sums
    corrupted = trained.corruptor(batch)
    logits = untrained.networks()["discriminator"].detect(corrupted.batch)
    loss = detection_loss(logits, corrupted.is_replaced, batch.is_real)
    return detection_sums(logits, corrupted.is_replaced, batch.is_real, loss)
