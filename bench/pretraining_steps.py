"""The pre-training steps that throughput.py compares, by size: ours, and the same on transformers' modules."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from electra.base.batch import Batch, SpecialIds
from electra.data.rows import RowsSettings
from electra.kernels import reference_only
from electra.model import EncoderSettings
from electra.model.electra import ElectraEncoderSettings
from electra.model.generators import GeneratorSettings
from electra.model.modern import ModernEncoderSettings
from electra.objectives import build
from electra.objectives.corruption import MaskingSettings, ObjectiveInputs, SamplingSettings
from electra.objectives.electra import ElectraSettings
from electra.pretraining.settings import PretrainSettings
from electra.pretraining.trial import flops_per_token
from electra.train.optimizers import OptimizerSettings
from electra.train.settings import TrainSettings
from electra.train.step import Execution, build_step
from transformers_step import Head, transformers_step

SPECIAL = SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)
ORDINARY = 999
RING = 8
PEER = "transformers compiled"
MODES: dict[str, tuple[str | None, Head]] = {
    "transformers": (None, "labels"),
    "transformers plain gathered": (None, "gathered"),
    "transformers plain chosen": (None, "chosen"),
    PEER: ("default", "labels"),
    "transformers graphs": ("reduce-overhead", "labels"),
    "transformers gathered": ("default", "gathered"),
    "transformers chosen": ("default", "chosen"),
}
Switch = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Rung:
    """Our step with some of what makes it fast: compiled, captured as a CUDA graph, with which kernels."""

    compiles: bool = True
    captures: bool = True
    kernels: Switch = nullcontext


PLAIN = "electra plain"
RUNGS = {
    PLAIN: Rung(compiles=False, captures=False, kernels=reference_only),
    "electra compiled": Rung(captures=False, kernels=reference_only),
    "electra captured": Rung(kernels=reference_only),
    "electra": Rung(),
}
VARIANTS = (*RUNGS, *MODES)


@dataclass(frozen=True)
class Size:
    encoder: EncoderSettings
    generator: GeneratorSettings
    share: float
    vocabulary: int
    usual: str


def sizes(layers: int, hidden: int, embedding: int) -> ElectraEncoderSettings:
    heads = hidden // 64
    return ElectraEncoderSettings(
        layers=layers, hidden=hidden, heads=heads, intermediate=4 * hidden, embedding=embedding
    )


SIZES = {
    "tiny": Size(sizes(1, 64, 32), GeneratorSettings(width=0.5), 0.15, 2000, "tiny:4x32"),
    "modern": Size(
        ModernEncoderSettings(intermediate=704, embedding=128), GeneratorSettings(), 0.15, 30_522, "modern:128x128"
    ),
    "modern-small": Size(
        ModernEncoderSettings(intermediate=704, embedding=128, global_every=1),
        GeneratorSettings(width=0.5, depth=0.25),
        0.15,
        30_522,
        "modern-small:128x128",
    ),
    "small": Size(sizes(12, 256, 128), GeneratorSettings(), 0.15, 30_522, "small:128x128"),
    "base": Size(sizes(12, 768, 768), GeneratorSettings(width=1 / 3), 0.15, 30_522, "base:64x512"),
    "large": Size(sizes(24, 1024, 1024), GeneratorSettings(), 0.25, 30_522, "large:32x512"),
}


@dataclass(frozen=True)
class Case:
    size: str
    rows: int
    length: int
    dropout: float

    @property
    def encoder(self) -> EncoderSettings:
        quiet = {"dropout": self.dropout, "attention_dropout": self.dropout}
        return SIZES[self.size].encoder.model_copy(update=quiet)

    @cache  # noqa: B019  (a handful of cases)
    def flops_per_token(self) -> float:
        size = SIZES[self.size]
        settings = PretrainSettings(
            data="unused",
            run="unused",
            encoder=self.encoder,
            generator=size.generator,
            masking=MaskingSettings(share=size.share),
            rows=RowsSettings(length=self.length),
            train=TrainSettings(batch=self.rows),
        )
        return flops_per_token(settings, size.vocabulary)

    def ring(self, device: torch.device) -> list[Tensor]:
        random = torch.Generator().manual_seed(0)
        shape = RING, self.rows, self.length
        ids = torch.randint(ORDINARY, SIZES[self.size].vocabulary, shape, generator=random)
        ids[:, :, 0], ids[:, :, -1] = SPECIAL.cls, SPECIAL.sep
        return list(ids.to(device))


Run = Callable[[int], Tensor]  # one update by its number; the loss, not waited for


def ours(case: Case, device: torch.device, rung: Rung) -> Run:
    size, fast = SIZES[case.size], "auto" if rung.compiles else "off"
    inputs = ObjectiveInputs(
        encoder=case.encoder,
        generator=size.generator,
        masking=MaskingSettings(share=size.share),
        sampling=SamplingSettings(),
        special=SPECIAL,
        continues=torch.zeros(size.vocabulary, dtype=torch.bool),
        token_counts=torch.zeros(size.vocabulary),
        seed=0,
    )
    objective = build(ElectraSettings(), inputs).to(device).train()
    settings = TrainSettings.model_validate({"batch": case.rows, "device": device.type, "fast": fast})
    execution = replace(Execution.of(settings, device), capture=rung.captures and device.type == "cuda")
    step = build_step(objective, OptimizerSettings(), execution, 0)
    first = torch.arange(case.rows, device=device)
    batches = [
        Batch(ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool), first, seed=0, padded=False)
        for ids in case.ring(device)
    ]

    def run(number: int) -> Tensor:
        batch = replace(batches[number % RING], samples=first + number * case.rows)
        with rung.kernels():
            sums, _ = step(batch, number, 1.0)
        return sums["total"]

    return run


def theirs(case: Case, device: torch.device, variant: str) -> Run:
    size, full = SIZES[case.size], case.encoder
    small = full.scaled(size.generator.width, size.generator.depth)
    tokens = size.vocabulary, size.share, ORDINARY, SPECIAL.mask
    step = transformers_step(full, small, *tokens, device, *MODES[variant])
    ring = case.ring(device)
    return lambda number: step(ring[number % RING])
