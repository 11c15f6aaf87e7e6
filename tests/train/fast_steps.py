"""What test_fast_step.py runs, each in a process of its own: python fast_steps.py CASE [DEVICE]. Compiled code does without the
checks of shapes that the tests install, and a cap on the device's memory would hold for all tests after it."""

import gc
import sys
from dataclasses import replace

import torch
from torch import Tensor

from electra.base.batch import Batch, SpecialIds
from electra.model.electra import ElectraEncoderSettings
from electra.model.generators import GeneratorSettings
from electra.objectives import ElectraSettings
from electra.objectives import build as build_objective
from electra.objectives.corruption import MaskingSettings, ObjectiveInputs, SamplingSettings
from electra.pretraining.settings import resolve
from electra.train.optimizers import OptimizerSettings, build_optimizer, split_parameters
from electra.train.settings import TrainSettings
from electra.train.step import Step
from helpers import words_of

VOCABULARY = 500
DEVICE = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cuda")
BACKEND = None if DEVICE.type == "cuda" else "eager"
ADAM = OptimizerSettings(lr=1e-3)
ROWS, LENGTH = 32 if DEVICE.type == "cuda" else 4, 64
WARM_UP = 2  # the first step compiles, the second is recorded


def build(dropout: float = 0.0, **parts) -> torch.nn.Module:
    sizes = {"layers": 2, "hidden": 64, "heads": 2, "intermediate": 128, "embedding": 32, "positions": 64}
    encoder = ElectraEncoderSettings(
        **(sizes | parts.pop("sizes", {})), dropout=dropout, attention_dropout=dropout
    )
    vocabulary = parts.get("vocabulary", VOCABULARY)
    inputs = ObjectiveInputs(
        encoder=encoder,
        generator=GeneratorSettings(width=0.5),
        masking=parts.get("masking", MaskingSettings()),
        sampling=parts.get("sampling", SamplingSettings()),
        special=SpecialIds(0, 1, 2, 3, 4),
        continues=torch.arange(vocabulary) % 3 == 2,
        token_counts=torch.zeros(vocabulary),
        seed=5,
    )
    return build_objective(ElectraSettings(), inputs).to(DEVICE).train()


def batch_at(number: int, rows: int = ROWS, length: int = LENGTH, padded: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(5, VOCABULARY, (rows, length), generator=generator)
    is_real = torch.ones_like(ids, dtype=torch.bool)
    if padded:
        is_real[::2, length // 2 :] = False
        ids = ids.where(is_real, 0)
    samples = torch.arange(rows) + number * rows
    return Batch(ids, torch.zeros_like(ids), is_real, samples, 7, padded, number / 20)


def start(objective: torch.nn.Module, said: list[str], **settings) -> Step:
    train = TrainSettings(**{"batch": ROWS, "device": DEVICE.type, **settings})
    backend = None if train.fast == "off" else BACKEND
    optimizer, parts = build_optimizer(ADAM, objective), split_parameters(ADAM, objective)
    return Step(objective, optimizer, parts, train, 3, DEVICE, said.append, backend)


def is_fast(step: Step, said: list[str]) -> None:
    """Compiled and, on a GPU, recorded: nothing fell back."""
    assert step.compiled is not None, said
    assert all(line.startswith("compiled the step in ") for line in said), said
    if DEVICE.type == "cuda":
        assert step.recorder.record and step.recorder.recordings, said


def weights(objective: torch.nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.detach().float().cpu().clone() for name, parameter in objective.named_parameters()
    }


def equals_plain() -> None:
    """Losses and gradient norms of the first steps. In bfloat16 a few samples fall out otherwise."""
    near, about = {"float32": 2e-3, "bfloat16": 3e-2}, {"float32": 2e-2, "bfloat16": 0.15}
    for precision, unit, accumulate in (
        ("float32", "token", 1),
        ("bfloat16", "token", 1),
        ("bfloat16", "span", 4),
    ):
        found: dict[str, list[tuple[float, float]]] = {}
        for fast in ("auto", "off"):
            said: list[str] = []
            masking = MaskingSettings.model_validate({"unit": unit})
            step = start(build(masking=masking), said, fast=fast, precision=precision, accumulate=accumulate)
            found[fast] = []
            for number in range(5):
                sums, norm = step(batch_at(number), number, 1.0)
                found[fast].append((sums["total"].item() / accumulate, norm.item()))
                assert sums["tokens"].item() == ROWS * LENGTH and sums["parts"].item() == accumulate
            if fast == "auto":
                is_fast(step, said)
        for (loss, norm), (plain_loss, plain_norm) in zip(found["auto"], found["off"], strict=True):
            context = precision, unit, accumulate, found
            assert abs(loss - plain_loss) <= near[precision] * plain_loss, context
            assert abs(norm - plain_norm) <= about[precision] * plain_norm, context
        torch.compiler.reset()


def learns() -> None:
    """The same rows again and again: the loss falls, so a replay does use the optimizer and the new rates."""
    said: list[str] = []
    step = start(build(), said)
    losses = [
        step(replace(batch_at(0), progress=0.0), number, 1.0)[0]["total"].item() for number in range(60)
    ]
    is_fast(step, said)
    assert losses[-1] < 0.95 * losses[0], losses
    before = weights(step.objective)
    step(batch_at(0), 60, 0.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(step.objective).items())


def shapes_take_turns() -> None:
    """Batches with and without padding have a recording each, in one memory, and what each returns is its own."""
    said: list[str] = []
    step = start(build(), said)
    for number in range(9):
        padded = number % 2 == 1
        sums, _ = step(batch_at(number, padded=padded), number, 1.0)
        assert sums["tokens"].item() == ROWS * LENGTH * (3 if padded else 4) // 4
        assert torch.isfinite(sums["total"]).item()
    is_fast(step, said)
    if DEVICE.type == "cuda":
        assert len(step.recorder.recordings) == 2


def never_waits() -> None:
    """After the warm-up nothing asks the device for a number."""
    said: list[str] = []
    step = start(build(0.1, sampling=SamplingSettings(start_temperature=2.0)), said)
    batches = [batch_at(number) for number in range(10)]
    totals: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        if number == WARM_UP and DEVICE.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        sums, _ = step(batch, number, 1.0 / (number + 1))
        totals = {
            name: totals[name] + value if name in totals else value.clone() for name, value in sums.items()
        }
        assert (step.paused > 0) == (number < (WARM_UP if DEVICE.type == "cuda" else 1)), number
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    is_fast(step, said)
    assert totals["parts"].item() == 10


def compiles_once() -> None:
    """While progress, temperature, samples and learning rate change."""
    said: list[str] = []
    torch._dynamo.utils.counters.clear()
    step = start(build(0.1, sampling=SamplingSettings(start_temperature=2.0)), said)
    step(batch_at(0), 0, 1.0)
    step.recorder.record = False  # replays would hide a second compilation
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(1, 10):
            step(batch_at(number), number, 1.0 / number)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert step.compiled is not None and len(said) == 1, said


def temperature_is_not_frozen() -> None:
    """Two steps that differ in progress alone sample differently, in a replay too. The rate is zero, so weights stay."""
    hot = SamplingSettings(start_temperature=50.0, temperature=0.02, cooling=1.0)
    said: list[str] = []
    step = start(build(sampling=hot), said)
    found = []
    for number, progress in enumerate([0.0, 0.0, 0.0, 1.0]):
        sums, _ = step(replace(batch_at(0), progress=progress), number, 0.0)
        found.append(sums["total"].item())
    is_fast(step, said)
    assert found[2] == found[1] != found[3], found


def resumes_exactly() -> None:
    """Dropout on: ten steps in one go against six and four, each half with recordings of its own."""
    torch.use_deterministic_algorithms(True)
    said: list[str] = []
    whole = start(build(0.1), said)
    for number in range(10):
        whole(batch_at(number), number, 1.0)
    is_fast(whole, said)

    first = start(build(0.1), said)
    for number in range(6):
        first(batch_at(number), number, 1.0)
    second = start(build(0.1), said)
    second.objective.load_state_dict(first.objective.state_dict())
    states = zip(second.objective.parameters(), first.objective.parameters(), strict=True)
    for parameter, before in states:
        for name, tensor in first.optimizer.state[before].items():
            second.optimizer.state[parameter][name].copy_(tensor)
    for number in range(6, 10):
        second(batch_at(number), number, 1.0)
    expected, found = weights(whole.objective), weights(second.objective)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    other = start(build(0.1), said)
    for number in range(10):
        other(batch_at(number), number + 1, 1.0)
    assert not all(torch.equal(expected[name], t) for name, t in weights(other.objective).items())


def halves_when_memory_is_short() -> None:
    """The step of 512 rows is given three quarters of what it needs."""
    assert DEVICE.type == "cuda"
    torch.use_deterministic_algorithms(True)
    wide = {"sizes": {"layers": 6, "hidden": 256, "heads": 4, "intermediate": 1024, "embedding": 128}}
    rows, settings = 512, {"batch": 512}
    said: list[str] = []
    step = start(build(**wide), said, **settings)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(batch_at(0, rows), 0, 1.0)
    needed = torch.cuda.max_memory_allocated() - before
    del step
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()

    said = []
    step = start(build(**wide), said, **settings)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    limit = torch.cuda.memory_reserved() + 0.75 * needed
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    for number in range(5):
        sums, _ = step(batch_at(number, rows), number, 1.0)
        assert torch.isfinite(sums["total"]).item() and sums["tokens"].item() == rows * 64
    assert step.accumulate in (2, 4, 8), step.accumulate
    assert said[0] == "out of memory with 512 rows at once: going on with 256 (same batch, same data)", said
    assert step.compiled is not None and step.recorder.record and step.recorder.recordings, said
    halved = weights(step.objective)

    torch.cuda.set_per_process_memory_fraction(1.0)
    plain = start(build(**wide), said, **settings, accumulate=step.accumulate)
    for number in range(5):
        plain(batch_at(number, rows), number, 1.0)
    for name, tensor in weights(plain.objective).items():
        assert (halved[name] - tensor).abs().mean().item() < 2e-4, name


def takes_recipe() -> None:
    """`tiny` joined with the recipe named by the third word: compiled in one piece and recorded, with the plain step's
    losses (float32, no dropout) over the first steps."""
    words = ["data=x", "encoder.dropout=0", "encoder.attention_dropout=0", *words_of(sys.argv[3])]
    settings, _ = resolve(f"tiny+{sys.argv[3]}", words)
    inputs = ObjectiveInputs(
        encoder=settings.encoder,
        generator=settings.generator,
        masking=settings.masking,
        sampling=settings.sampling,
        special=SpecialIds(0, 1, 2, 3, 4),
        continues=torch.arange(VOCABULARY) % 3 == 2,
        token_counts=torch.rand(VOCABULARY),
        seed=5,
    )
    found: dict[str, list[float]] = {}
    for fast in ("auto", "off"):
        torch.manual_seed(0)
        objective = build_objective(settings.objective, inputs).to(DEVICE).train()
        optimizer = build_optimizer(settings.optimizer, objective)
        trained = split_parameters(settings.optimizer, objective)
        train = TrainSettings(batch=ROWS, device=DEVICE.type, fast=fast, precision="float32")
        said: list[str] = []
        step = Step(
            objective, optimizer, trained, train, 3, DEVICE, said.append, BACKEND if fast == "auto" else None
        )
        sums = [step(batch_at(number, padded=True), number, 0.1)[0] for number in range(4)]
        found[fast] = [one["total"].item() for one in sums[:1]] + [sums[-1]["total"].item()]
        if fast == "auto":
            is_fast(step, said)
    for mine, theirs in zip(found["auto"], found["off"], strict=True):
        assert abs(mine - theirs) <= 5e-3 * abs(theirs), found


def goes_on_where_nothing_can_be_recorded() -> None:
    """An objective that asks the host for a number, with dropout: said once, and the same weights as without recording."""
    assert DEVICE.type == "cuda"
    torch.use_deterministic_algorithms(True)
    found = []
    for record in (True, False):
        objective, said = build(0.1), []
        objective.register_forward_hook(lambda module, given, loss: loss.total.item() and None)
        step = start(objective, said)
        step.compiled = None  # a compiler would refuse it first
        step.recorder.record = record
        for number in range(4):
            sums, _ = step(batch_at(number), number, 1.0)
        assert torch.isfinite(sums["total"]).item()
        assert [line.startswith("the step cannot be recorded") for line in said] == [True] * record, said
        found.append(weights(objective))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
