"""What a training step costs, before hours are spent on it: seconds and memory by a few trial steps, floating-point
operations by counting.

The operations counted are those of matrix products, to which a device's peak refers: torch's own counter watches while one
batch goes through the objective forward and backward on the meta device, where nothing is computed. Attention counts as the
products it is made of, and a local layer as the keys of its window, whatever a kernel without windows computes. Embedding
lookups do not count, nor does what a kernel computes a second time to save memory.

The paper's accounting (`paper_flops`) is that of the original `flops_computation.py`, so that a recipe lands on the axes of
the paper's figures. It counts every operation of a forward pass, dropout and softmax included; an embedding lookup as the
product with a one-hot vector; a backward pass as another forward pass; and the softmax over the vocabulary at 15.625 % of the
positions. Beside these conventions it has two slips that concern us, which `corrected` puts right:

- the LayerNorm after attention counts 5 operations per token instead of 5 per hidden unit (google-research/electra#121);
- the share of positions with a softmax is 15.625 % for every model, also for ELECTRA-Large, which masks 25 %.
"""

import os
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from electra.base.batch import Batch, SpecialIds
from electra.base.errors import MachineError
from electra.base.files import check_storage, lock, write_atomically
from electra.base.jobs import peak_memory
from electra.base.ranks import Ranks
from electra.model import Encoder, EncoderSettings, token_head_width
from electra.model.electra import ElectraEncoderSettings
from electra.model.modern import ModernEncoder, ModernEncoderSettings
from electra.objectives import build
from electra.objectives.adversarial import AdversarialSettings
from electra.objectives.masked_lm import MaskedLMSettings
from electra.objectives.replaced_span import ReplacedSpanSettings
from electra.objectives.selection import SelectionSettings
from electra.objectives.token_recovery import TokenRecoverySettings
from electra.pretraining.settings import PretrainSettings
from electra.train.checkpoint import save_checkpoint
from electra.train.device import check_space
from electra.train.step import Step

WARM_STEPS = 2
TRIAL_STEPS = 20

PAPER_VOCABULARY = 30522
PAPER_OUTPUT_SHARE = 0.15625
PAPER_PASSES = 2
PAPER_BERT_BASE = 6.428335104e19  # its training, as the paper counts (bench/published_flops.py has them all)
DROPOUT, LAYER_NORM, GELU, SOFTMAX = 4, 5, 8, 5  # operations per element, as the paper counts them

# Dense bfloat16 with float32 accumulation, in TFLOP/s, nominal (float16 for V100 and T4, which lack bfloat16), and the watts that
# makers name for the whole board (in a GH200, for the module). An entry fits if all its words are in torch's name of the device.
DEVICES = {
    "b200": (2250.0, 1000),
    "gh200": (989.0, 1000),
    "h200": (989.0, 700),
    "h100": (989.0, 700),
    "h100 pcie": (756.0, 350),
    "h100 nvl": (835.0, 400),
    "a100": (312.0, 400),
    "a10": (125.0, 150),
    "a10g": (70.0, 300),
    "l40s": (362.0, 350),
    "l4": (121.0, 72),
    "v100": (125.0, 300),
    "t4": (65.0, 70),
    "rtx 4090": (165.0, 450),
    "rtx 3090": (71.0, 350),
}
PEAKS = {name: peak for name, (peak, _) in DEVICES.items()}
POWER = {name: watts for name, (_, watts) in DEVICES.items()}
MEASURED = {"h200": 790.0}  # large square products in cuBLAS
PARTIAL = {"mig", "laptop", "max"}  # slices and small relatives that carry a large device's name


def try_step(step: Step, batch: Batch, seconds: float = 0.0) -> tuple[float, int]:
    """Time a step at full length. Returns its seconds, and the most bytes of the device's memory in use. The first step compiles and the
    second captures, so the time is the third's, or the median of as many as fit into `seconds` (0 if several processes step together)."""
    times: list[float] = []
    for number in range(WARM_STEPS + TRIAL_STEPS):
        if times[WARM_STEPS:] and sum(times[WARM_STEPS:]) >= seconds:
            break
        started = time.monotonic()
        sums, _ = step(batch, number, 0.0)
        sums["total"].item()
        times.append(time.monotonic() - started)
    step.captured.graphs.clear()  # NCCL ends only after the graphs that hold its kernels
    return statistics.median(
        times[WARM_STEPS:]
    ), torch.cuda.max_memory_allocated() if step.execution.device.type == "cuda" else peak_memory()


def try_checkpoint(groups: dict[str, dict[str, torch.Tensor]], run: Path) -> str:
    """Save a trial checkpoint where the run's would go; returns its size and time in words."""
    folder = nearest_folder(run)
    size = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values())
    check_space(folder, size)
    try:
        trial = Path(tempfile.mkdtemp(prefix=".electra-doctor-", dir=folder))
    except OSError as error:
        raise MachineError(f"{folder} cannot be written to: {error.strerror}.") from None
    started = time.monotonic()
    try:
        save_checkpoint(trial, 0, groups, {})
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    free = shutil.disk_usage(folder).free
    return f"{size / 1e6:.0f} MB in {time.monotonic() - started:.1f} s at {folder}, {free / 1e9:.0f} GB free"


def nearest_folder(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(it for it in (path.absolute(), *path.absolute().parents) if it.is_dir())


def try_group(ranks: Ranks, size: int, device: torch.device, run: Path) -> list[str]:
    """Check what several processes must share beside settings and data: the time, a network that is fast enough for the
    gradients of a step, and the run folder, which process 0 writes and whose renames and locks must work. Returns notes."""
    ranks.gather(0)
    clocks = ranks.gather(time.time())
    apart = max(clocks) - min(clocks)
    gradients = torch.zeros(size // 4, device=device)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        ranks.total({"gradients": gradients})["gradients"][:1].cpu()
        times.append(time.perf_counter() - started)
    sent = size * 2 * (ranks.world - 1) / ranks.world
    notes = [
        f"clocks are {apart:.2f} s apart" + (" (WARNING: synchronise them with one time server)" if apart > 1 else ""),
        f"{size / 1e6:.0f} MB of gradients are added up in {1000 * min(times):.1f} ms ({sent / min(times) / 1e9:.2f} GB/s sent by each)",
    ]
    there = ranks.first(lambda: try_storage(run))
    seen = [rank for rank, is_seen in enumerate(ranks.gather(there.exists())) if is_seen]
    ranks.first(lambda: there.unlink(missing_ok=True))
    others = "all processes see it" if len(seen) == ranks.world else f"only processes {seen} see it, which is enough"
    return [*notes, f"the place of the run folder supports renames and locks; {others}"]


def try_storage(run: Path) -> Path:
    """Write a file, by renaming a temporary one under a lock, and return its path."""
    trial = nearest_folder(run) / f"electra-doctor-{os.getpid()}"
    locked = trial.with_name(f"{trial.name}.d")
    try:
        with lock(locked):
            check_storage(locked)
            write_atomically(trial, b"seen")
    finally:
        shutil.rmtree(locked, ignore_errors=True)
    return trial


def count_flops(settings: PretrainSettings, vocab_size: int) -> dict[str, float]:
    """Operations per token in the matrix products of training, for each encoder and for all heads together. In padded rows
    every position counts, real or not."""
    rows, length = settings.train.batch // settings.train.accumulate, settings.rows.length
    with torch.device("meta"):
        flags = torch.zeros(vocab_size, dtype=torch.bool)
        inputs = settings.inputs(SpecialIds(0, 1, 2, 3, 4), flags, flags.float())
        objective = build(settings.objective, inputs).train()
        ids = torch.zeros(rows, length, dtype=torch.long)
        real, samples = torch.ones_like(ids, dtype=torch.bool), torch.arange(rows)
    batch = Batch(ids, torch.zeros_like(ids), real, samples, seed=0, padded=False)
    # torch counts no fused attention without a device, so attention runs as plain matrix products
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        objective(batch).total.backward()
    assert isinstance(objective, nn.Module)
    counts, parts, total = counter.get_flop_counts(), {}, counter.get_total_flops()
    for name, encoder in objective.named_modules(remove_duplicate=False):
        if not isinstance(encoder, Encoder):
            continue
        path = f"{type(objective).__name__}.{name}"
        inside = [counts.get(f"{path}.layers.{number}", {}) for number in range(len(encoder.layers))]
        # for an Identity, torch counts what the backward pass does after it
        projection = counts.get(f"{path}.project", {}) if isinstance(encoder.project, nn.Linear) else {}
        flops = sum(sum(part.values()) for part in (projection, *inside))
        total -= flops
        if isinstance(encoder, ModernEncoder):
            unseen = 1 - keys_nearby(length, encoder.settings.window // 2) / length
            local = (part for part, layer in zip(inside, encoder.layers, strict=True) if layer.is_local)
            flops -= sum(part.get(torch.ops.aten.bmm, 0) for part in local) * unseen
        if flops:  # an encoder with two names is counted under one of them
            parts[name.removeprefix("corruptor.").removesuffix(".encoder")] = flops / ids.numel()
    return parts | {"heads": total / ids.numel()}


def keys_nearby(length: int, reach: int) -> float:
    """The mean number of tokens, itself included, that are at most `reach` away from a token of a row."""
    reach = min(reach, length - 1)
    return 2 * reach + 1 - reach * (reach + 1) / length


def flops_per_token(settings: PretrainSettings, vocab_size: int) -> float:
    """Operations per token, forward and backward."""
    return sum(count_flops(settings, vocab_size).values())


def step_flops(settings: PretrainSettings, vocab_size: int) -> float:
    return flops_per_token(settings, vocab_size) * settings.train.batch * settings.rows.length


def paper_flops(settings: PretrainSettings, vocab_size: int, corrected: bool = False) -> float:
    """Operations of the whole run, as the paper would count them. What the paper does not have is counted by its rules: ModernBERT's
    layers, other objectives' heads, other generators' passes. A generator that learns has two passes, as everything else, a frozen one
    has one; sampling from a table costs nothing. Generators that do not read [MASK] predict every token, and fill spans and words in
    forward passes alone. The candidates of a selection are a few columns of its softmax."""
    encoder, length, noise = settings.encoder, settings.rows.length, settings.generator
    share = max(1, round(settings.masking.share * length)) / length if corrected else PAPER_OUTPUT_SHARE
    small = encoder.scaled(noise.width, noise.depth)
    repeated = settings.train.batch * settings.train.steps

    def body(sizes: EncoderSettings) -> float:
        if isinstance(sizes, ModernEncoderSettings):
            return modern_body(sizes, length, vocab_size)
        return paper_body(sizes, length, vocab_size, corrected)

    def head(sizes: EncoderSettings, share: float | None, towers: int = 1, outputs: int = vocab_size) -> float:
        return paper_head(sizes, length, outputs, share, towers)

    generator = 0.0
    match noise.kind:
        case "transformer" | "frozen":
            passes = PAPER_PASSES if noise.kind == "transformer" else 1
            generator = passes * repeated * (body(small) + head(small, share))
        case "two_tower":
            generator = PAPER_PASSES * repeated * (2 * body(small) + head(small, 1.0, towers=2))
        case "autoregressive":
            generator = PAPER_PASSES * repeated * (body(small) + head(small, 1.0))
            if settings.masking.unit != "token":
                generator += settings.masking.span_limit * repeated * (body(small) + head(small, share))

    heads = head(encoder, None)
    match settings.objective:
        case MaskedLMSettings():
            heads, generator = head(encoder, share), 0.0
        case TokenRecoverySettings(predict="chosen"):
            heads = head(encoder, share)
        case TokenRecoverySettings(predict=predict):
            heads += head(encoder, 1.0 if predict == "all" else share)
        case SelectionSettings(candidates=others):
            heads += head(narrow(encoder), share, outputs=others + 1)
        case ReplacedSpanSettings():
            heads += head(encoder.model_copy(update={"hidden": 2 * encoder.hidden}), None)
        case AdversarialSettings():
            heads += share * (2 * small.hidden + 1) * length  # the baseline
    return PAPER_PASSES * repeated * (body(encoder) + heads) + generator


def paper_body(sizes: ElectraEncoderSettings, length: int, vocab_size: int, corrected: bool) -> int:
    """Operations forward for one row, through embeddings (words, types and positions as one-hot products) and layers."""
    h, e, s = sizes.hidden, sizes.embedding, length
    lookup = 2 * e * vocab_size + 2 * e * (s + 2) + 2 * e + (LAYER_NORM + DROPOUT) * e
    project = (2 * e + 1) * h if e != h else 0
    attention = 3 * (2 * h + 1) * h + 2 * h * s + (SOFTMAX + DROPOUT + 1) * s * sizes.heads
    output = 2 * h * s + 2 * h * h + h + (DROPOUT + 1) * h + LAYER_NORM * (h if corrected else 1)
    expand = (2 * h + GELU + 1) * sizes.intermediate
    contract = 2 * h * sizes.intermediate + h + (DROPOUT + 1) * h + LAYER_NORM * h
    return (lookup + project + sizes.layers * (attention + output + expand + contract)) * s


def modern_body(sizes: ModernEncoderSettings, length: int, vocab_size: int) -> float:
    """Operations forward for one row, through embeddings and ModernBERT's layers: no biases, no dropout, no tables of types and
    positions; rotating queries and keys is three operations per unit, and a local layer attends to its window."""
    h, e, inner = sizes.hidden, sizes.embedding, sizes.intermediate
    lookup = 2 * e * vocab_size + (2 * e * h if e != h else 0) + LAYER_NORM * h
    products = 4 * 2 * h * h + 2 * 3 * h + (2 * 2 * h + GELU + 1) * inner + 2 * h * inner
    around = 2 * (LAYER_NORM + 1) * h
    keys = (keys_nearby(length, sizes.window // 2) if sizes.is_local(n) else length for n in range(sizes.layers))
    attention = sum(4 * h * seen + (SOFTMAX + 1) * seen * sizes.heads for seen in keys)
    return (lookup + sizes.layers * (products + around) + attention) * length


def paper_head(sizes: EncoderSettings, length: int, vocab_size: int, share: float | None, towers: int = 1) -> float:
    """Operations forward for one row: the token head at a `share` of the positions, or the detection head (None) at all of them.
    It reads the states of `towers` encoders."""
    h, e = towers * sizes.hidden, sizes.embedding
    if share is None:
        return (2 * h + 1 + GELU + 2) * h * length
    width = token_head_width(sizes)
    dense = (2 * h + 1 + GELU + LAYER_NORM) * width + (2 * width * e if width != e else 0)
    return share * (dense + 2 * e * vocab_size + (SOFTMAX + 2) * vocab_size) * length


def narrow(sizes: EncoderSettings) -> EncoderSettings:
    """The same sizes, with a token head that ends at the width of the words."""
    return sizes.model_copy(update={"token_head": "narrow"}) if isinstance(sizes, ModernEncoderSettings) else sizes


def known_device(name: str) -> str:
    """The key of PEAKS that fits a device's name (torch's, or a user's), or "" if none does."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    fitting = [known for known in PEAKS if set(known.split()) <= words]
    return "" if words & PARTIAL else max(fitting, key=len, default="")


def device_peak(device: torch.device) -> float:
    """The most operations per second that a device can do; 0 for CPUs and unknown devices."""
    return PEAKS.get(known_device(torch.cuda.get_device_name(device)), 0.0) * 1e12 if device.type == "cuda" else 0.0


def measured_cpu(seconds: float = 0.5, size: int = 1024) -> float:
    """Operations per second of this machine's CPU in a float32 matrix product, because tables have no CPUs."""
    matrix = torch.randn(size, size)
    matrix @ matrix
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix @ matrix
        count += 1
    return 2.0 * size**3 * count / (time.perf_counter() - started)
