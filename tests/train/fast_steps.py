"""What test_fast_step.py runs in processes of its own: python fast_steps.py CASE[+CASE…] [DEVICE]. Compiled code does without the
checks of shapes that the tests install, and a cap on the device's memory would hold for all tests after it."""

import logging
import sys
from dataclasses import replace

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from electra.base.batch import Batch, SpecialIds
from electra.model import electra, heads, modern
from electra.model.electra import ElectraEncoderSettings
from electra.model.generators import GeneratorSettings
from electra.objectives import ElectraSettings
from electra.objectives import build as build_objective
from electra.objectives.corruption import MaskingSettings, ObjectiveInputs, SamplingSettings
from electra.pretraining.settings import PretrainSettings, resolve
from electra.train.optimizers import OptimizerSettings
from electra.train.settings import TrainSettings
from electra.train.step import Execution, Step, build_step
from helpers import words_of

VOCABULARY = 500
DEVICE = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cuda")
BACKEND = None if DEVICE.type == "cuda" else "eager"
ADAM = OptimizerSettings(lr=1e-3)
ROWS, LENGTH = 32 if DEVICE.type == "cuda" else 4, 64
WARM_UP = 2  # the first step compiles, the second is captured


def build(dropout: float = 0.0, **parts) -> torch.nn.Module:
    sizes = {"layers": 2, "hidden": 64, "heads": 2, "intermediate": 128, "embedding": 32, "positions": 64}
    encoder = ElectraEncoderSettings(**(sizes | parts.pop("sizes", {})), dropout=dropout, attention_dropout=dropout)
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


class Lines(logging.Handler):
    """What the library says, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        logging.getLogger("electra").setLevel(logging.INFO)
        logging.getLogger("electra").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


LINES = Lines()


def start(objective: torch.nn.Module, adam: OptimizerSettings = ADAM, **settings) -> Step:
    LINES.said.clear()
    train = TrainSettings(**{"batch": ROWS, "device": DEVICE.type, **settings})
    execution = Execution.of(train, DEVICE)
    if train.fast != "off" and BACKEND is not None:
        execution = replace(execution, backend=BACKEND)
    return build_step(objective, adam, execution, 3)


def is_fast(step: Step) -> None:
    """Compiled and, on a GPU, captured: nothing fell back."""
    assert step.compiled is not None, LINES.said
    assert all(line.startswith("compiled the step in ") for line in LINES.said), LINES.said
    if DEVICE.type == "cuda":
        assert step.captured.enabled and step.captured.graphs, LINES.said


def weights(objective: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().float().cpu().clone() for name, parameter in objective.named_parameters()}


def equals_plain() -> None:
    """Losses and gradient norms of the first steps. In bfloat16 a few samples fall out otherwise."""
    near, about = {"float32": 2e-3, "bfloat16": 3e-2}, {"float32": 2e-2, "bfloat16": 0.15}
    for precision, unit, accumulate in (("float32", "token", 1), ("bfloat16", "token", 1), ("bfloat16", "span", 4)):
        found: dict[str, list[tuple[float, float]]] = {}
        for fast in ("auto", "off"):
            masking = MaskingSettings.model_validate({"unit": unit})
            step = start(build(masking=masking), fast=fast, precision=precision, accumulate=accumulate)
            found[fast] = []
            for number in range(5):
                sums, norm = step(batch_at(number), number, 1.0)
                found[fast].append((sums["total"].item() / accumulate, norm.item()))
                assert sums["tokens"].item() == ROWS * LENGTH and sums["parts"].item() == accumulate
            if fast == "auto":
                is_fast(step)
        for (loss, norm), (plain_loss, plain_norm) in zip(found["auto"], found["off"], strict=True):
            context = precision, unit, accumulate, found
            assert abs(loss - plain_loss) <= near[precision] * plain_loss, context
            assert abs(norm - plain_norm) <= about[precision] * plain_norm, context
        torch.compiler.reset()


def learns() -> None:
    """The same rows again and again: the loss falls, so a replay does use the optimizer and the new rates."""
    step = start(build())
    losses = [step(replace(batch_at(0), progress=0.0), number, 1.0)[0]["total"].item() for number in range(60)]
    is_fast(step)
    assert losses[-1] < 0.95 * losses[0], losses
    before = weights(step.objective)
    step(batch_at(0), 60, 0.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(step.objective).items())


def shapes_take_turns() -> None:
    """Batches with and without padding have a graph each, in one memory, and what each returns is its own."""
    step = start(build())
    for number in range(9):
        padded = number % 2 == 1
        sums, _ = step(batch_at(number, padded=padded), number, 1.0)
        assert sums["tokens"].item() == ROWS * LENGTH * (3 if padded else 4) // 4
        assert torch.isfinite(sums["total"]).item()
    is_fast(step)
    if DEVICE.type == "cuda":
        assert len(step.captured.graphs) == 2


def never_waits() -> None:
    """After the warm-up nothing asks the device for a number."""
    step = start(build(0.1, sampling=SamplingSettings(start_temperature=2.0)))
    batches = [batch_at(number) for number in range(10)]
    totals: dict[str, Tensor] = {}
    for number, batch in enumerate(batches):
        if number == WARM_UP and DEVICE.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        sums, _ = step(batch, number, 1.0 / (number + 1))
        totals = {name: totals[name] + value if name in totals else value.clone() for name, value in sums.items()}
        assert (step.paused > 0) == (number < (WARM_UP if DEVICE.type == "cuda" else 1)), number
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    is_fast(step)
    assert totals["parts"].item() == 10


def compiles_once() -> None:
    """While progress, temperature, samples and learning rate change."""
    torch._dynamo.utils.counters.clear()
    step = start(build(0.1, sampling=SamplingSettings(start_temperature=2.0)))
    step(batch_at(0), 0, 1.0)
    step.captured.enabled = False  # replays would hide a second compilation
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(1, 10):
            step(batch_at(number), number, 1.0 / number)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert step.compiled is not None and len(LINES.said) == 1, LINES.said


def temperature_is_not_frozen() -> None:
    """Two steps that differ in progress alone sample differently, in a replay too. The rate is zero, so weights stay."""
    hot = SamplingSettings(start_temperature=50.0, temperature=0.02, cooling=1.0)
    step = start(build(sampling=hot))
    found = []
    for number, progress in enumerate([0.0, 0.0, 0.0, 1.0]):
        sums, _ = step(replace(batch_at(0), progress=progress), number, 0.0)
        found.append(sums["total"].item())
    is_fast(step)
    assert found[2] == found[1] != found[3], found


def resumes_exactly() -> None:
    """Dropout on: ten steps in one go against six and four, each half with graphs of its own."""
    torch.use_deterministic_algorithms(True)
    whole = start(build(0.1))
    for number in range(10):
        whole(batch_at(number), number, 1.0)
    is_fast(whole)

    first = start(build(0.1))
    for number in range(6):
        first(batch_at(number), number, 1.0)
    second = start(build(0.1))
    second.objective.load_state_dict(first.objective.state_dict())
    states = zip(second.objective.parameters(), first.objective.parameters(), strict=True)
    for parameter, before in states:
        for name, tensor in first.optimizer.state[before].items():
            second.optimizer.state[parameter][name].copy_(tensor)
    for number in range(6, 10):
        second(batch_at(number), number, 1.0)
    expected, found = weights(whole.objective), weights(second.objective)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    other = start(build(0.1))
    for number in range(10):
        other(batch_at(number), number + 1, 1.0)
    assert not all(torch.equal(expected[name], t) for name, t in weights(other.objective).items())


def leaves_its_graphs_when_memory_is_short() -> None:
    """A new shape that does not fit beside the graphs of another is computed after those have gone, with the same loss."""
    assert DEVICE.type == "cuda"
    wide = {"sizes": {"layers": 6, "hidden": 256, "heads": 4, "intermediate": 1024, "embedding": 128}}
    rows = 512
    step = start(build(**wide), batch=rows)
    for number in range(3):
        step(batch_at(number, rows), number, 0.0)
    graphs, free = len(step.captured.graphs), torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(1.1 * free / torch.cuda.get_device_properties(DEVICE).total_memory)
    sums, _ = step(batch_at(3, rows, padded=True), 3, 0.0)
    assert graphs == 1 and not step.captured.graphs, LINES.said
    assert torch.isfinite(sums["total"]).item() and sums["tokens"].item() == rows * LENGTH * 3 // 4


def built(settings: PretrainSettings) -> torch.nn.Module:
    """Of a recipe; the same weights each time."""
    inputs = ObjectiveInputs(
        encoder=settings.encoder,
        generator=settings.generator,
        masking=settings.masking,
        sampling=settings.sampling,
        special=SpecialIds(0, 1, 2, 3, 4),
        continues=torch.arange(VOCABULARY) % 3 == 2,
        token_counts=1.0 + torch.arange(VOCABULARY) % 17,
        seed=5,
    )
    torch.manual_seed(0)
    return build_objective(settings.objective, inputs).to(DEVICE).train()


def takes_recipe() -> None:
    """`tiny` joined with the recipe named by the next word: compiled in one piece and captured, with the plain step's
    losses (float32, no dropout) over the first steps."""
    recipe = sys.argv.pop(3)
    words = ["data=x", "encoder.dropout=0", "encoder.attention_dropout=0", *words_of(recipe)]
    settings, _ = resolve(f"tiny+{recipe}", words)
    found: dict[str, list[float]] = {}
    for fast in ("auto", "off"):
        step = start(built(settings), settings.optimizer, fast=fast, precision="float32")
        sums = [step(batch_at(number, padded=True), number, 0.1)[0] for number in range(4)]
        found[fast] = [one["total"].item() for one in sums[:1]] + [sums[-1]["total"].item()]
        if fast == "auto":
            is_fast(step)
    for mine, theirs in zip(found["auto"], found["off"], strict=True):
        assert abs(mine - theirs) <= 5e-3 * abs(theirs), found


def computes_by_kernels() -> None:
    """The recipe named by the next word, with our kernels in it, interpreted: one graph that reads no number back, and the loss and
    every gradient of plain torch."""
    recipe = sys.argv.pop(3)
    dropout = ["encoder.dropout=0", "encoder.attention_dropout=0"]
    settings, _ = resolve(recipe, ["data=x", *dropout, *words_of(recipe.split("+")[-1])])
    batch = replace(batch_at(1, rows=2, length=24, padded=True), progress=torch.tensor(0.5, dtype=torch.float64))
    operators: set[str] = set()

    def note(graph: torch.fx.GraphModule, _: object) -> object:
        operators.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    found = []
    for by_kernels in (True, False):
        for module in (electra, modern, heads):
            module.usable = lambda x, answer=by_kernels: answer
        objective = built(settings)
        backend = aot_autograd(fw_compiler=note)
        loss = (torch.compile(objective, fullgraph=True, backend=backend) if by_kernels else objective)(batch)
        loss.total.backward()
        found.append((loss.total.detach(), {name: p.grad for name, p in objective.named_parameters()}))
    (loss, gradients), (plain_loss, plain) = found
    layers = "electra.modern_layers" if isinstance(settings.encoder, modern.ModernEncoderSettings) else "electra.layer"
    assert {f"{layers}.default", f"{layers}_backward.default"} <= operators, operators
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & operators, operators
    assert abs(loss - plain_loss) <= 1e-6 * plain_loss, (loss, plain_loss)
    for name, expected in plain.items():
        gradient = gradients[name]
        assert (gradient is None) == (expected is None), name
        if expected is not None:
            assert (gradient - expected).norm() <= 1e-5 * expected.norm(), name


def goes_on_where_nothing_can_be_captured() -> None:
    """An objective that asks the host for a number, with dropout: said once, and the same weights as without capturing."""
    assert DEVICE.type == "cuda"
    torch.use_deterministic_algorithms(True)
    results = []
    for capture in (True, False):
        objective = build(0.1)
        objective.register_forward_hook(lambda module, given, loss: loss.total.item() and None)
        step = start(objective)
        step.compiled = None  # a compiler would refuse it first
        step.captured.enabled = capture
        for number in range(4):
            sums, _ = step(batch_at(number), number, 1.0)
        assert torch.isfinite(sums["total"]).item()
        lines = [line.startswith("the step cannot be captured") for line in LINES.said]
        assert lines == [True] * capture, LINES.said
        results.append(weights(objective))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


if __name__ == "__main__":
    for case in sys.argv[1].split("+"):
        torch._dynamo.reset()
        globals()[case]()
