"""What a run starts from: an encoder, and a task with its rows as examples."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from electra.base.randomness import mix
from electra.data.tokenizer import special_ids
from electra.finetuning import Splits, Task
from electra.finetuning.plan import Plan
from electra.finetuning.training import Dev, Finetuned, Prepared
from electra.interop.formats import own_tensors
from electra.interop.read import warn_beyond
from electra.model import EncoderSettings, encoder_alone, initialise
from electra.pretraining.load import load_network


@dataclass(frozen=True)
class Start:
    """The encoder that fine-tuning starts from, by our names."""

    path: str
    settings: EncoderSettings
    vocab_size: int
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer
    length: int | None = None
    """How many positions pre-training had trained."""

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def load_start(model: Path) -> Start:
    """A run folder, our export, or any ELECTRA or ModernBERT folder of transformers: pre-trained, bare or fine-tuned on another task."""
    network = load_network(model, "encoder")
    encoder = network.encoder
    sizes = encoder.settings, len(encoder.embeddings.table)
    return Start(str(model), *sizes, own_tensors(encoder), network.tokenizer, network.length)


def prepare_task(plan: Plan, splits: Splits, start: Start) -> Prepared:
    task = build(plan, splits, start)
    rows = task.training_rows(splits["train"])
    train, cut = task.encode(rows)
    longest = max((len(example.ids) for example in train), default=0)
    warn_beyond(start.settings, start.length, longest)
    others, cut_in_others = encode_others(task, splits)
    labelled = tuple(
        split
        for split, part in others.items()
        if part.examples and all(example.target is not None for example in part.examples)
    )
    pad = special_ids(start.tokenizer).pad
    return Prepared(task, train, others, labelled, {"train": (cut, len(rows)), **cut_in_others}, pad)


def encode_others(task: Task, splits: Splits) -> tuple[dict[str, Dev], dict[str, tuple[int, int]]]:
    """Every split but train, and (how many rows were cut, of how many)."""
    others, cut = {}, {}
    for split, rows in splits.items():
        if split != "train":
            examples, count = task.encode(rows)
            others[split], cut[split] = Dev(rows, examples), (count, len(rows))
    return others, cut


def build(plan: Plan, splits: Splits, start: Start) -> Task:
    return plan.task.build(start.tokenizer, usable_length(plan, start), splits)


def usable_length(plan: Plan, start: Start) -> int:
    return min(plan.task.length, start.settings.positions)


def build_model(plan: Plan, task: Task, start: Start, seed: int) -> Finetuned:
    """The pre-trained encoder under a head that depends on the seed alone."""
    dropout = {"dropout": plan.method.dropout, "attention_dropout": plan.method.attention_dropout}
    settings = start.settings.model_copy(update=dropout)
    encoder = encoder_alone(settings, start.vocab_size)
    initialise(encoder, settings, mix(seed, "encoder"))
    if plan.method.pretrained:
        encoder.load_state_dict(start.tensors)
    head = task.head(settings)
    initialise(head, settings, mix(seed, "head"))
    return Finetuned(encoder, head)
