"""One update: what it computes, and what it does on a machine that cannot compile or capture it."""

import contextlib
import ctypes
import gc
import json
import logging
import platform
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from conftest import make_batch
from electra import kernels as switch
from electra.base.batch import Batch
from electra.base.errors import MachineError
from electra.base.randomness import mix
from electra.objectives.corruption import SamplingSettings, sample
from electra.objectives.losses import Loss
from electra.pretraining.run import pretrain
from electra.pretraining.settings import resolve
from electra.train import device as machine
from electra.train.cuda_graph import CapturedFunction
from electra.train.log import read_metrics
from electra.train.loop import RunState
from electra.train.optimizers import OptimizerSettings, build_optimizer, split_parameters
from electra.train.settings import TrainSettings, next_accumulate
from electra.train.step import Execution, Step, build_step
from helpers import electra

CPU = torch.device("cpu")
ADAM = OptimizerSettings(lr=1e-2, clip=0.05)


class Toy(nn.Module):
    """The shape of an objective, small."""

    headline = ("loss",)
    extra_metrics = ()
    muted_alarms = ()
    corruptor = None

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.words, self.out, self.dropout = nn.Embedding(97, 8), nn.Linear(8, 1), nn.Dropout(dropout)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, batch: Batch) -> Loss:
        scores = self.out(self.dropout(self.words(batch.ids))).squeeze(-1)
        total = ((scores - batch.progress) ** 2).mean()
        return Loss(total, {"rows": torch.ones_like(batch.samples).sum()})


def batch_at(number: int, rows: int = 12) -> Batch:
    batch = make_batch(rows, 24, seed=number, padded=False)
    return Batch(batch.ids, batch.segments, batch.is_real, batch.samples, 7, False, number / 10)


def make_step(objective: nn.Module, backend=None, **settings) -> Step:
    execution = Execution.of(TrainSettings(**{"batch": 12, "device": "cpu", **settings}), CPU)
    if backend is not None:
        execution = replace(execution, backend=backend)
    return build_step(objective, ADAM, execution, 3)


def weights_after(objective: nn.Module, steps: int = 4, backend=None, **settings):
    """Weights, and the sums of each step."""
    step = make_step(objective, backend, **settings)
    sums = [step(batch_at(number), number, 0.5)[0] for number in range(steps)]
    return [p.detach().clone() for p in objective.parameters()], sums


@pytest.fixture
def lines(caplog):
    """What the library has said so far."""
    caplog.set_level(logging.INFO, "electra")
    return lambda: [record.getMessage() for record in caplog.records]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_step_is_the_mean_gradient_of_its_parts_clipped_and_applied():
    expected = Toy(dropout=0.3)
    optimizer = build_optimizer(expected, split_parameters(expected, ADAM), ADAM)
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
    sums, found = make_step(objective, accumulate=3)(batch_at(4), 4, 0.5)
    assert found.item() == pytest.approx(norm.item()) and norm > ADAM.clip
    for one, other in zip(objective.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    assert all(p.grad is None for p in objective.parameters())
    assert {name: sums[name].item() for name in ("rows", "parts", "tokens")} == {
        "rows": 12, "parts": 3, "tokens": 12 * 24,
    }  # fmt: skip
    assert not sums["total"].requires_grad


def test_dropout_depends_on_the_seed_and_the_number_of_the_step_alone():
    first, _ = weights_after(Toy(dropout=0.5), accumulate=2)
    torch.manual_seed(99)
    again, _ = weights_after(Toy(dropout=0.5), accumulate=2)
    assert same(first, again)


def test_the_compiled_step_equals_the_plain_one_and_is_compiled_once(lines):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    plain, _ = weights_after(Toy(dropout=0.3), accumulate=2)
    assert lines() == []
    compiled, _ = weights_after(Toy(dropout=0.3), accumulate=2, backend="eager")
    assert same(plain, compiled)
    assert len(lines()) == 1 and lines()[0].startswith("compiled the step in ")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # progress changed at every step


def test_ten_runs_in_one_process_are_all_compiled():
    """torch compiles a function eight times at most, and all runs of an objective, whatever their seeds, have the same."""
    for number in range(10):
        step = make_step(Toy(dropout=number / 20), backend="eager")
        step(batch_at(0), 0, 0.5)
        assert step.compiled is not None


def test_a_step_goes_on_compiled_after_another_was_built():
    plain, _ = weights_after(Toy(dropout=0.3), steps=4)
    steps = [make_step(Toy(dropout=0.3), backend="eager") for _ in range(2)]
    for number in range(4):
        for step in steps:
            step(batch_at(number), number, 0.5)
        make_step(Toy(), backend="eager")
    assert all(step.compiled is not None and same(plain, list(step.objective.parameters())) for step in steps)


def test_only_the_first_compiled_step_pauses():
    step = make_step(Toy(), backend="eager")
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


def test_what_cannot_be_compiled_runs_as_it_is_and_is_said_once(lines):
    torch.compiler.reset()
    plain, _ = weights_after(Toy(dropout=0.3), accumulate=2)
    uncompiled, _ = weights_after(Toy(dropout=0.3), accumulate=2, backend=broken_forward)
    assert same(plain, uncompiled)
    (line,) = lines()
    assert line.startswith("the step cannot be compiled, so it is slower: RuntimeError: ")
    assert "\n" not in line


def test_a_backward_that_cannot_be_compiled_leaves_nothing_behind(lines):
    torch.compiler.reset()
    plain, _ = weights_after(Toy())
    uncompiled, _ = weights_after(Toy(), backend=broken_backward)
    assert same(plain, uncompiled) and len(lines()) == 1 and "no such instruction" in lines()[0]


class NeedsAKernel(Toy):
    """One that Triton refuses: it has no tile of a size that is not a power of two."""

    def forward(self, batch):
        if switch._wanted:
            import triton

            triton.language.zeros([3], triton.language.float32)
        return super().forward(batch)


def test_a_kernel_that_cannot_run_is_done_without_and_said_once(lines):
    pytest.importorskip("triton")
    plain, _ = weights_after(Toy(dropout=0.3), fast="off")
    without, _ = weights_after(NeedsAKernel(dropout=0.3))
    assert same(plain, without)
    (line,) = lines()
    assert line.startswith("custom kernels failed, so the step continues in plain torch and is slower: ")
    with pytest.raises(MachineError, match="train.fast=on, but .*train.fast=auto"):
        make_refusing(NeedsAKernel())(batch_at(0), 0, 1.0)


def make_refusing(objective: nn.Module, backend=None) -> Step:
    """With train.fast=on, as on a machine that can compile."""
    return build_step(objective, ADAM, Execution(CPU, fast="on", backend=backend), 3)


def test_why_there_can_be_no_kernels_is_found_by_building_one(monkeypatch):
    """Where there is no CUDA device the smallest kernel fails as it does where there is no C compiler."""
    if torch.cuda.is_available():
        assert switch.trouble(torch.device("cuda")) == ""
        return
    switch.trouble.cache_clear()
    assert switch.trouble(torch.device("cuda")).startswith("Triton cannot build kernels, which requires")
    assert not switch.wanted(torch.device("cuda")) and not switch.wanted(torch.device("cpu"))
    switch.trouble.cache_clear()
    monkeypatch.setattr(switch, "HAS_TRITON", False)
    assert switch.trouble(torch.device("cuda")) == "Triton is not installed (pip install triton)"
    switch.trouble.cache_clear()


def test_fast_or_nothing_is_refused_where_the_step_cannot_be_compiled(monkeypatch):
    torch.compiler.reset()
    with pytest.raises(MachineError, match="train.fast=on, but the step cannot be compiled: .*train.fast=auto"):
        make_refusing(Toy(), broken_forward)(batch_at(0), 0, 1.0)
    with pytest.raises(MachineError, match="train.fast=on, but there is no CUDA device.*train.fast=auto"):
        make_step(Toy(), fast="on")
    monkeypatch.setattr(switch, "trouble", lambda device: "Triton is not installed (pip install triton)")
    with pytest.raises(MachineError, match="Triton is not installed.*pip install triton"):
        machine.choose_backend("on", torch.device("cuda"))


def test_a_gpu_without_triton_is_told_that_it_is_slower(monkeypatch, lines):
    monkeypatch.setattr(machine, "has_bfloat16", lambda: True)
    monkeypatch.setattr(switch, "trouble", lambda device: "")
    assert machine.choose_backend("auto", torch.device("cuda")) == "inductor"
    assert machine.choose_backend("off", torch.device("cuda")) is None
    machine.log_shortcomings("auto", torch.device("cuda"))
    machine.log_shortcomings("auto", CPU)
    assert lines() == []
    monkeypatch.setattr(switch, "trouble", lambda device: "Triton is not installed")
    assert machine.choose_backend("auto", torch.device("cuda")) is None
    machine.log_shortcomings("auto", torch.device("cuda"))
    assert lines() == ["Triton is not installed, so everything is slower."]


def test_an_error_of_our_own_is_not_hidden_behind_the_compilers():
    torch.compiler.reset()

    class Wrong(Toy):
        def forward(self, batch):
            return Loss(self.words(batch.ids) @ torch.zeros(3, 3), {})

    with pytest.raises(RuntimeError, match="mat1 and mat2|size"):
        weights_after(Wrong(), backend="eager")


class ShortOfMemory(Toy):
    def forward(self, batch: Batch) -> Loss:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")


def test_out_of_memory_ends_the_run_with_the_parts_that_would_fit(recipe, prepared, tmp_path, monkeypatch):
    """The command line, so that the exit code is seen too."""
    from electra.objectives.electra import Electra

    monkeypatch.setattr(Electra, "forward", ShortOfMemory.forward)
    done = electra("pretrain", recipe, f"data={prepared}", f"run={tmp_path}", "train.batch=8")
    assert done.returncode == 7
    assert "8 rows at once do not fit: add train.accumulate=2 (same batch, same data, less memory)" in done.stderr
    assert json.loads((tmp_path / "run_state.json").read_text())["state"] == "failed"


def test_a_step_is_freed_with_its_graphs_as_soon_as_nobody_holds_it():
    """Not by the garbage collector, which might do it while another step is captured."""
    step = make_step(Toy())
    step(batch_at(0), 0, 1.0)
    captured = weakref.ref(step.captured)
    gc.disable()
    try:
        del step
        assert captured() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("graphs", [0, 1])
def test_a_batch_that_does_not_fit_is_tried_once_more_where_graphs_held_memory(graphs, monkeypatch):
    step, forgotten = make_step(ShortOfMemory()), []
    step.captured.graphs = dict.fromkeys(range(graphs))
    monkeypatch.setattr(step.captured, "forget", lambda: forgotten.append(step.captured.graphs.clear()))
    with pytest.raises(torch.OutOfMemoryError):
        step(batch_at(0), 0, 1.0)
    assert len(forgotten) == graphs


@pytest.mark.parametrize(("world", "tries"), [(1, 2), (2, 1)])
def test_an_evaluation_that_does_not_fit_is_tried_once_more_by_a_process_alone(world, tries):
    """Others would not measure again, and all would wait for each other."""
    measured = []

    def measure(*_):
        measured.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    evaluation = SimpleNamespace(kind="heldout", is_due=lambda *_: True, measure=measure)
    captured = SimpleNamespace(graphs={"shape": None}, forget=lambda: None)
    log = SimpleNamespace(last=lambda _: {}, of_kind=lambda _: [])
    state = SimpleNamespace(
        evaluation=evaluation,
        step=1,
        is_last=False,
        log=log,
        paused_for=lambda _: contextlib.nullcontext(),
        ranks=SimpleNamespace(world=world),
        update=SimpleNamespace(captured=captured),
    )
    with pytest.raises(torch.OutOfMemoryError):
        RunState.evaluate_if_due(state, None)
    assert len(measured) == tries


@pytest.mark.parametrize(
    ("rows", "parts", "expected"), [(1024, 1, 2), (12, 4, 6), (9, 1, 3), (9, 3, 9), (8, 8, None), (7, 1, 7)]
)
def test_the_next_number_of_parts_doubles_where_it_can(rows, parts, expected):
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
        assert machine.is_out_of_memory(outer)
    assert not machine.is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


def test_what_cuda_says_becomes_one_line_and_other_errors_stay_as_they_are():
    said = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"
    with pytest.raises(MachineError) as error, machine.explain_machine("", "Run the same command again."):
        raise torch.AcceleratorError(said)
    expected = "the GPU failed: CUDA error: device-side assert triggered. Run the same command again."
    assert str(error.value) == expected
    with pytest.raises(RuntimeError, match="^shapes differ$"), machine.explain_machine("", ""):
        raise RuntimeError("shapes differ")


def test_a_function_that_cannot_be_captured_is_given_up_and_said_once(monkeypatch, lines):
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
    undone: list[int] = []
    captured = CapturedFunction(CPU, True, lambda: undone.append(1))
    batch = replace(batch_at(0), progress=torch.tensor(0.5))
    assert captured.is_new(batch) and not captured.is_settled(batch)
    assert [captured(lambda batch: batch.ids.sum(), batch) for _ in range(4)] == [None] * 4 and undone == [1]
    assert captured.is_settled(batch) and not captured.enabled
    assert streams == ["ours"] and states == ["before"]
    reason = "operation not permitted when stream is capturing"
    assert lines() == [f"the step cannot be captured as a CUDA graph, so it is slower: {reason}"]


def test_a_gpu_without_bfloat16_computes_in_float32_and_says_so(monkeypatch, lines):
    for name, fake in (
        ("is_available", lambda: True),
        ("is_bf16_supported", lambda including_emulation=True: including_emulation),
        ("get_device_name", lambda *_: "Old GPU"),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    settings = TrainSettings(precision="auto")
    device = machine.choose_device(settings)
    assert device.type == "cuda" and not isinstance(machine.autocast("auto", device), torch.autocast)
    monkeypatch.setattr(switch, "trouble", lambda device: "")
    machine.log_shortcomings("float32", device)
    assert lines() == []
    machine.log_shortcomings("auto", device)
    assert "Old GPU has no bfloat16" in lines()[0]
    with pytest.raises(
        MachineError, match="precision bfloat16 was asked for, but Old GPU has none. Use auto or float32"
    ):
        machine.choose_device(TrainSettings(precision="bfloat16"))
    assert machine.choose_device(TrainSettings(device="cpu", precision="bfloat16")) == CPU


@pytest.mark.parametrize(
    ("length", "padded", "targets", "expected"),
    [
        (128, False, {}, True),
        (128, True, {}, False),
        (64, False, {}, False),
        (192, False, {}, False),
        (128, False, {"label": torch.zeros(2)}, False),
    ],
)
def test_attention_is_kept_from_cudnn_where_its_gradient_may_be_nan(length, padded, targets, expected):
    objective, seen = Toy(), []
    objective.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    step = build_step(objective, ADAM, Execution(CPU), 0)
    step(replace(make_batch(2, length, vocabulary=97, padded=padded), targets=targets), 0, 1.0)
    assert seen == [expected]
    assert torch.backends.cuda.cudnn_sdp_enabled()


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
        if not batch.ids.is_meta:  # where FLOPs are counted nothing is computed
            seen.append((self.training, switch._wanted))
        return forward(self, batch)

    monkeypatch.setattr(Electra, "forward", watched)
    words = [f"data={prepared}", f"run={tmp_path}", "train.steps=2", "train.device=cpu", f"train.fast={fast}"]
    pretrain(resolve(str(recipe), words)[0])
    assert {training for training, _ in seen} == {True, False}
    assert {wanted for _, wanted in seen} == expected


def test_the_time_of_compiling_is_no_part_of_the_speed(recipe, prepared, tmp_path, monkeypatch):
    call = Step.__call__

    def slow(self, batch, number, *rates):
        result = call(self, batch, number, *rates)
        if number == 0:
            time.sleep(2)
            self.paused = 2.0
        return result

    monkeypatch.setattr(Step, "__call__", slow)
    words = [f"data={prepared}", f"run={tmp_path}", "train.steps=5", "train.device=cpu"]
    pretrain(resolve(str(recipe), words)[0])
    first = next(record for record in read_metrics(tmp_path) if record["kind"] == "train")
    assert first["step"] == 5 and first["seconds"] > 2
    assert first["tokens_per_second"] > 5 * 8 * 24 / 2


def test_a_finished_run_leaves_nothing_on_the_device(recipe, prepared, tmp_path, monkeypatch):
    """Fine-tuning and the next run want the room, and so may other processes."""
    alive, emptied = [], []

    def build(objective, *others):
        alive.append(weakref.ref(objective))
        return build_step(objective, *others)

    monkeypatch.setattr("electra.pretraining.run.build_step", build)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([it() for it in alive]))
    words = [f"data={prepared}", f"run={tmp_path / 'run'}", "train.steps=2", "train.device=cpu"]
    pretrain(resolve(str(recipe), words)[0])
    assert emptied == [[], [None]]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
def test_on_a_cpu_freed_memory_is_kept_for_the_next_step(monkeypatch):
    library, asked = ctypes.CDLL(None), []

    def mallopt(which, value):
        asked.append((which, value, library.mallopt(which, value)))
        return asked[-1][2] and not refuses

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    refuses = False
    build_step(Toy(), ADAM, Execution(CPU), 0)
    assert asked == [(machine.M_MMAP_THRESHOLD, 1 << 25, 1), (machine.M_TRIM_THRESHOLD, (1 << 31) - 1, 1)]
    asked.clear()
    refuses = True  # the second alone would make it twice as slow
    build_step(Toy(), ADAM, Execution(CPU), 0)
    assert [which for which, *_ in asked] == [machine.M_MMAP_THRESHOLD]
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: SimpleNamespace())
    build_step(Toy(), ADAM, Execution(CPU), 0)
