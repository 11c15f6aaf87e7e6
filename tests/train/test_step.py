"""One update: what it computes, and what it does on a machine that cannot compile it or lacks the memory."""

import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from conftest import make_batch
from electra import kernels as choice
from electra.base.batch import Batch
from electra.base.errors import MachineError, MemoryExhaustedError
from electra.base.randomness import mix
from electra.objectives.corruption import SamplingSettings, sample
from electra.pretraining.run import pretrain
from electra.pretraining.settings import resolve
from electra.train import device as guard
from electra.train import device as machine
from electra.train import loop as trainer
from electra.train.cuda_graph import Recorder
from electra.train.log import read_metrics
from electra.train.optimizers import OptimizerSettings, build_optimizer, split_parameters
from electra.train.settings import TrainSettings, next_accumulate
from electra.train.step import Step

CPU = torch.device("cpu")
ADAM = OptimizerSettings(lr=1e-2, clip=0.05)


class ToyLoss(NamedTuple):
    total: Tensor
    sums: dict[str, Tensor]


class Toy(nn.Module):
    """The shape of an objective, small. `limit`: it runs out of memory with more rows at once; `fails_at`: the calls at
    which it does so whatever the rows."""

    def __init__(self, dropout: float = 0.0, limit: int = 1000, fails_at: tuple[int, ...] = ()):
        super().__init__()
        self.words, self.out, self.dropout = nn.Embedding(97, 8), nn.Linear(8, 1), nn.Dropout(dropout)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.limit, self.fails_at, self.calls, self.kernels = limit, fails_at, 0, []

    def forward(self, batch: Batch) -> ToyLoss:
        return ToyLoss(*self.loss(batch))

    def loss(self, batch: Batch):
        scores = self.out(self.dropout(self.words(batch.ids))).squeeze(-1)
        total = ((scores - batch.progress) ** 2).mean()
        return total, {"rows": torch.ones_like(batch.samples).sum()}


class ShortOfMemory(Toy):
    def forward(self, batch: Batch) -> ToyLoss:
        self.calls += 1
        if len(batch.ids) > self.limit or self.calls in self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return ToyLoss(*self.loss(batch))


def batch_at(number: int, rows: int = 12) -> Batch:
    batch = make_batch(rows, 24, seed=number, padded=False)
    return Batch(batch.ids, batch.segments, batch.is_real, batch.samples, 7, False, number / 10)


def make_step(objective: nn.Module, said: list[str], backend=None, **settings) -> Step:
    settings = TrainSettings(**{"batch": 12, "device": "cpu", **settings})
    parts = split_parameters(ADAM, objective)
    return Step(objective, build_optimizer(ADAM, objective), parts, settings, 3, CPU, said.append, backend)


def weights_after(objective: nn.Module, steps: int = 4, backend=None, **settings):
    """Weights, what was said, and the sums of each step."""
    said: list[str] = []
    step = make_step(objective, said, backend, **settings)
    sums = [step(batch_at(number), number, 0.5)[0] for number in range(steps)]
    return [p.detach().clone() for p in objective.parameters()], said, sums


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_step_is_the_mean_gradient_of_its_parts_clipped_and_applied():
    expected = Toy(dropout=0.3)
    optimizer = build_optimizer(ADAM, expected)
    for group in optimizer.param_groups:
        group["lr"] = 0.5 * ADAM.lr
    torch.manual_seed(mix(3, "dropout", 4, 0))
    for piece in batch_at(4).split(3):
        (expected(piece).total / 3).backward()
    norm = torch.stack([p.grad.norm() for p in expected.parameters()]).norm()
    for parameter in expected.parameters():
        parameter.grad *= ADAM.clip / norm
    optimizer.step()

    objective = Toy(dropout=0.3)
    sums, found = make_step(objective, [], accumulate=3)(batch_at(4), 4, 0.5)
    assert found.item() == pytest.approx(norm.item()) and norm > ADAM.clip
    for one, other in zip(objective.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert all(p.grad is None for p in objective.parameters())
    assert {name: sums[name].item() for name in ("rows", "parts", "tokens")} == {
        "rows": 12, "parts": 3, "tokens": 12 * 24,
    }  # fmt: skip
    assert not sums["total"].requires_grad


def test_dropout_depends_on_the_seed_and_the_number_of_the_step_alone():
    first, *_ = weights_after(Toy(dropout=0.5), accumulate=2)
    torch.manual_seed(99)
    again, *_ = weights_after(Toy(dropout=0.5), accumulate=2)
    assert same(first, again)


def test_the_compiled_step_equals_the_plain_one_and_is_compiled_once():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    plain, said, _ = weights_after(Toy(dropout=0.3), accumulate=2)
    assert said == []
    compiled, said, _ = weights_after(Toy(dropout=0.3), accumulate=2, backend="eager")
    assert same(plain, compiled)
    assert len(said) == 1 and said[0].startswith("compiled the step in ")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # progress changed at every step


def test_only_the_first_compiled_step_pauses():
    step = make_step(Toy(), [], backend="eager")
    paused = []
    for number in range(3):
        step(batch_at(number), number, 1.0)
        paused.append(step.paused)
    assert paused[0] > 0 and paused[1:] == [0, 0]


def broken_forward(graph, inputs):
    raise RuntimeError("no such instruction\nand a long listing")


def broken_backward(graph, inputs):
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    forward = lambda graph, inputs: make_boxed_func(graph.forward)  # noqa: E731
    return aot_autograd(fw_compiler=forward, bw_compiler=broken_forward)(graph, inputs)


def test_what_cannot_be_compiled_runs_as_it_is_and_is_said_once():
    torch.compiler.reset()
    plain, *_ = weights_after(Toy(dropout=0.3), accumulate=2)
    found, said, _ = weights_after(Toy(dropout=0.3), accumulate=2, backend=broken_forward)
    assert same(plain, found)
    assert len(said) == 1 and said[0].startswith(
        "the step cannot be compiled, so it is slower: RuntimeError: "
    )
    assert "\n" not in said[0]


def test_a_backward_that_cannot_be_compiled_leaves_nothing_behind():
    torch.compiler.reset()
    plain, *_ = weights_after(Toy())
    found, said, _ = weights_after(Toy(), backend=broken_backward)
    assert same(plain, found) and len(said) == 1 and "no such instruction" in said[0]


class NeedsAKernel(Toy):
    """One that Triton refuses: it has no tile of a size that is not a power of two."""

    def forward(self, batch):
        if choice._wanted:
            import triton

            triton.language.zeros([3], triton.language.float32)
        return super().forward(batch)


def test_a_kernel_that_cannot_run_is_done_without_and_said_once():
    pytest.importorskip("triton")
    plain, *_ = weights_after(Toy(dropout=0.3), fast="off")
    found, said, _ = weights_after(NeedsAKernel(dropout=0.3))
    assert same(plain, found)
    assert len(said) == 1 and said[0].startswith(
        "a kernel cannot run, so the step does without and is slower: "
    )
    with pytest.raises(MachineError, match="train.fast=on, but .*train.fast=auto"):
        weights_after(NeedsAKernel(), fast="on", backend="eager")


def test_why_there_can_be_no_kernels_is_found_by_building_one(monkeypatch):
    """Where there is no CUDA device the smallest kernel fails as it does where there is no C compiler."""
    if torch.cuda.is_available():
        assert choice.trouble(torch.device("cuda")) == ""
        return
    choice.trouble.cache_clear()
    assert choice.trouble(torch.device("cuda")).startswith("Triton cannot build kernels, for which it needs")
    assert not choice.wanted(torch.device("cuda")) and not choice.wanted(torch.device("cpu"))
    choice.trouble.cache_clear()
    monkeypatch.setattr(choice, "HAS_TRITON", False)
    assert choice.trouble(torch.device("cuda")) == "Triton is not installed (pip install triton)"
    choice.trouble.cache_clear()


def test_fast_or_nothing_is_refused_where_the_step_cannot_be_compiled(monkeypatch):
    torch.compiler.reset()
    with pytest.raises(
        MachineError, match="train.fast=on, but the step cannot be compiled: .*train.fast=auto"
    ):
        weights_after(Toy(), backend=broken_forward, fast="on")
    with pytest.raises(MachineError, match="train.fast=on, but there is no CUDA device.*train.fast=auto"):
        weights_after(Toy(), fast="on")
    monkeypatch.setattr(choice, "trouble", lambda device: "Triton is not installed (pip install triton)")
    with pytest.raises(MachineError, match="Triton is not installed.*pip install triton"):
        machine.choose_backend("on", torch.device("cuda"), print)


def test_a_gpu_without_triton_is_told_that_it_is_slower(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(choice, "trouble", lambda device: "")
    assert machine.choose_backend("auto", torch.device("cuda"), said.append) == "inductor"
    assert machine.choose_backend("off", torch.device("cuda"), said.append) is None and said == []
    monkeypatch.setattr(choice, "trouble", lambda device: "Triton is not installed")
    assert machine.choose_backend("auto", torch.device("cuda"), said.append) is None
    assert said == ["Triton is not installed, so everything is slower."]
    assert machine.kernel_remark(torch.device("cuda")) == said[0]
    assert machine.kernel_remark(torch.device("cpu")) is None


def test_an_error_of_our_own_is_not_hidden_behind_the_compilers():
    torch.compiler.reset()

    class Wrong(Toy):
        def forward(self, batch):
            return ToyLoss(self.words(batch.ids) @ torch.zeros(3, 3), {})

    with pytest.raises(RuntimeError, match="mat1 and mat2|size"):
        weights_after(Wrong(), backend="eager")


def test_a_batch_that_does_not_fit_is_computed_in_more_parts_with_the_same_weights():
    """12 rows, then 6, then 3: as a run that began with four parts."""
    expected, _, sums = weights_after(Toy(dropout=0.3), accumulate=4)
    found, said, found_sums = weights_after(ShortOfMemory(dropout=0.3, limit=3))
    assert same(expected, found)
    assert said == [
        "out of memory with 12 rows at once: going on with 6 (same batch, same data)",
        "out of memory with 6 rows at once: going on with 3 (same batch, same data)",
    ]
    assert [s["parts"].item() for s in found_sums] == [4] * 4
    assert [s["total"].item() for s in found_sums] == [s["total"].item() for s in sums]


def test_gradients_of_parts_that_did_fit_are_dropped_before_the_batch_is_tried_again():
    expected, *_ = weights_after(Toy(), accumulate=4)
    found, said, _ = weights_after(ShortOfMemory(fails_at=(2,)), accumulate=2)
    assert same(expected, found) and len(said) == 1


def test_a_single_row_that_does_not_fit_ends_the_run_with_a_way_out():
    with pytest.raises(MemoryExhaustedError, match="out of memory. A single row does not fit: use a shorter"):
        weights_after(ShortOfMemory(limit=0))


def test_an_update_that_may_have_begun_is_not_done_twice(monkeypatch):
    objective = Toy()
    step = make_step(objective, [])
    monkeypatch.setattr(step.optimizer, "step", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("late")))
    with pytest.raises(torch.OutOfMemoryError, match="late"):
        step(batch_at(0), 0, 1.0)


@pytest.mark.parametrize(
    ("rows", "parts", "expected"), [(1024, 1, 2), (12, 4, 6), (9, 1, 3), (9, 3, 9), (8, 8, None), (7, 1, 7)]
)
def test_parts_double_where_they_can(rows, parts, expected):
    assert next_accumulate(rows, parts) == expected


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_lack_of_memory_is_recognised_behind_the_error_of_a_compiler(said):
    try:
        try:
            raise RuntimeError(said)
        except RuntimeError as inner:
            raise ValueError("the compiler failed") from inner
    except ValueError as outer:
        assert guard.is_out_of_memory(outer)
    assert not guard.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


def test_what_cuda_says_becomes_one_line_and_other_errors_stay_as_they_are():
    said = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"
    with pytest.raises(MachineError) as error, guard.explain_device("Run the same command again."):
        raise torch.AcceleratorError(said)
    expected = "the GPU failed: CUDA error: device-side assert triggered. Run the same command again."
    assert str(error.value) == expected
    for other in (RuntimeError("shapes differ"), torch.OutOfMemoryError("CUDA out of memory.")):
        with pytest.raises(type(other)), guard.explain_device(""):
            raise other


def test_evaluation_goes_on_in_halves_where_memory_is_short():
    batch = batch_at(0, rows=7)
    whole = trainer.sums_of(Toy(), batch)
    assert trainer.sums_of(ShortOfMemory(limit=2), batch)["rows"] == whole["rows"] == 7
    with pytest.raises(torch.OutOfMemoryError):
        trainer.sums_of(ShortOfMemory(limit=0), batch)


def test_a_function_that_cannot_be_recorded_runs_plainly_and_says_why_once(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    for name, fake in (("CUDAGraph", object), ("graph", refuse), ("synchronize", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "ours")
    streams: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    states: list[str] = []
    random = SimpleNamespace(clone_state=lambda: "before", graphsafe_set_state=states.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", [random])
    said: list[str] = []
    undone: list[int] = []
    recorder: Recorder[Tensor] = Recorder(
        lambda tensors, by: tensors["x"] * by, CPU, True, said.append, lambda: undone.append(1)
    )
    results = [recorder({"x": torch.tensor(n)}, 2).item() for n in range(4)]
    assert results == [0, 2, 4, 6] and undone == [1]
    assert streams == ["ours"] and states == ["before"]
    reason = "operation not permitted when stream is capturing"
    assert said == [f"the step cannot be recorded, so it is slower: {reason}"]


def test_a_gpu_without_bfloat16_computes_in_float32_and_says_so(monkeypatch):
    for name, fake in (
        ("is_available", lambda: True),
        ("is_bf16_supported", lambda including_emulation=True: including_emulation),
        ("get_device_name", lambda *_: "Old GPU"),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    settings = TrainSettings(precision="auto")
    device = machine.choose_device(settings)
    assert device.type == "cuda" and not isinstance(machine.autocast(settings, device), torch.autocast)
    assert "Old GPU has no bfloat16" in machine.precision_remark(settings, device)
    with pytest.raises(
        MachineError, match="precision bfloat16 was asked for, but Old GPU has none. Use auto or float32"
    ):
        machine.choose_device(TrainSettings(precision="bfloat16"))
    assert machine.precision_remark(TrainSettings(precision="float32"), device) is None
    assert machine.choose_device(TrainSettings(device="cpu", precision="bfloat16")) == CPU


@pytest.mark.parametrize("progress", [0.0, 0.1, 0.3, 0.5, 0.9])
def test_the_temperature_is_the_same_from_a_number_and_from_a_tensor(progress):
    cooling = SamplingSettings(start_temperature=2.0, cooling=0.4)
    tensor = torch.tensor(progress, dtype=torch.float64)
    expected, found = cooling.temperature_at(progress), cooling.temperature_at(tensor)
    assert isinstance(found, Tensor) and found.item() == expected
    generator = torch.Generator().manual_seed(0)
    logits, noise = torch.randn(50, 97, generator=generator), torch.rand(50, 2, generator=generator)
    targets = torch.zeros(50, dtype=torch.long)
    drawn = [sample(logits, noise, cooling, value, targets) for value in (progress, tensor)]
    assert torch.equal(*drawn)
    assert SamplingSettings(temperature=0.7, start_temperature=0.7).temperature_at(tensor) == 0.7


@pytest.mark.parametrize(("fast", "expected"), [("auto", {True}), ("off", {False})])
def test_off_computes_and_evaluates_without_kernels(fast, expected, recipe, prepared, tmp_path, monkeypatch):
    from electra.objectives.electra import Electra

    seen = []
    forward = Electra.forward

    def watched(self, batch):
        seen.append((self.training, choice._wanted))
        return forward(self, batch)

    monkeypatch.setattr(Electra, "forward", watched)
    words = [f"data={prepared}", f"run={tmp_path}", "train.steps=2", "train.device=cpu", f"train.fast={fast}"]
    pretrain(resolve(str(recipe), words)[0])
    assert {training for training, _ in seen} == {True, False}
    assert {wanted for _, wanted in seen} == expected


def test_the_time_of_compiling_is_no_part_of_the_speed(recipe, prepared, tmp_path, monkeypatch):
    class Slow(Step):
        def __call__(self, batch, number, share):
            result = super().__call__(batch, number, share)
            if number == 0:
                time.sleep(2)
                self.paused = 2.0
            return result

    monkeypatch.setattr(trainer, "Step", Slow)
    words = [f"data={prepared}", f"run={tmp_path}", "train.steps=5", "train.device=cpu"]
    pretrain(resolve(str(recipe), words)[0])
    first = next(record for record in read_metrics(tmp_path) if record["kind"] == "train")
    assert first["step"] == 5 and first["seconds"] > 2
    assert first["tokens_per_second"] > 5 * 8 * 24 / 2
