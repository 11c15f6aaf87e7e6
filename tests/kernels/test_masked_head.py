"""masked_head: the kernels against the reference in float64. Interpreted on the CPU, real where there is a CUDA device."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from interpreted import INTERPRETED, bfloat16_is_a_number  # noqa: F401

from electra import kernels as choice
from electra.base.randomness import uniform
from electra.kernels import masked_head as home
from electra.kernels.masked_head import TILE, fused_head, plan, splits_of
from electra.model.heads import SAMPLING_BLOCK, can_fuse, masked_head

DEVICE = "cpu" if INTERPRETED else "cuda"
HALF, FULL = torch.bfloat16, torch.float32
DTYPES = [FULL, HALF, torch.float16] if INTERPRETED else [HALF, torch.float16]
# Of the largest gradient: products of half precision keep 8 or 11 bits, sums are float32 throughout.
CLOSE = {FULL: 5e-6, HALF: 1e-2, torch.float16: 2e-3}
SHAPES = [(150, 300, 20), (37, 129, 16), (128, 256, 32), (1, 1000, 96)]

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning")
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")


def case(rows: int, vocab: int, embedding: int, dtype: torch.dtype = DTYPES[0], seed: int = 0):
    """states, words, bias of the given type; targets; noise."""
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randn(rows, embedding, generator=generator),
        torch.randn(vocab, embedding, generator=generator) * 2 / embedding**0.5,
        torch.randn(vocab, generator=generator),
    ]
    targets = torch.randint(vocab, (rows,), generator=generator)
    noise = uniform(seed, "sample", torch.arange(rows), 2)
    return [part.to(DEVICE, dtype) for part in parts], targets.to(DEVICE), noise.to(DEVICE)


def loss_and_gradients(head, parts, targets, noise, upstream, *options):
    leaves = [part.detach().clone().requires_grad_() for part in parts]
    found = head(*leaves, targets, noise, *options)
    found[0].backward(upstream.to(found[0].dtype))
    return [found[0].detach(), *(leaf.grad for leaf in leaves)], found


def upstream_of(rows: int) -> torch.Tensor:
    """Of both signs, and small as in a mean."""
    return (torch.randn(rows, generator=torch.Generator().manual_seed(1)) / rows).to(DEVICE)


def pretend(monkeypatch, processors: int) -> None:
    """A device of that many processors, which decides how the vocabulary is split."""
    other = plan(torch.device(DEVICE))._replace(processors=processors)
    monkeypatch.setattr(home, "plan", lambda device: other)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.isfinite().all()
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_are_those_of_the_reference(shape, dtype):
    parts, targets, noise = case(*shape, dtype)
    upstream = upstream_of(shape[0])
    found, _ = loss_and_gradients(fused_head, parts, targets, noise, upstream, 1.0, False, dtype)
    wide = [part.double() for part in parts]
    expected, _ = loss_and_gradients(masked_head, wide, targets, noise, upstream)
    assert found[0].dtype == FULL
    assert_near(found[0], expected[0], 5e-6)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.dtype == dtype
        assert_near(mine, theirs, CLOSE[dtype])


def test_words_in_full_precision_get_a_gradient_in_full_precision():
    """Under autocast the products are in half precision, the parameters are not."""
    parts, targets, noise = case(150, 300, 20, HALF)
    upstream = upstream_of(150)
    full = [part.float() for part in parts]
    found, _ = loss_and_gradients(fused_head, full, targets, noise, upstream, 1.0, False, HALF)
    expected, _ = loss_and_gradients(masked_head, [p.double() for p in parts], targets, noise, upstream)
    assert all(gradient.dtype == FULL for gradient in found[1:])
    assert all((gradient != gradient.to(HALF)).any() for gradient in found[1:])
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert_near(mine, theirs, CLOSE[HALF])


def test_rows_without_upstream_gradient_leave_no_trace():
    parts, targets, noise = case(150, 300, 20)
    upstream = upstream_of(150)
    upstream[20:140] = 0
    found, _ = loss_and_gradients(fused_head, parts, targets, noise, upstream, 1.0, False, parts[0].dtype)
    used = torch.cat([torch.arange(20), torch.arange(140, 150)]).to(DEVICE)
    few = [parts[0][used].double(), parts[1].double(), parts[2].double()]
    expected, _ = loss_and_gradients(masked_head, few, targets[used], noise[used], upstream[used])
    assert (found[1][20:140] == 0).all()
    for mine, theirs in zip([found[1][used], *found[2:]], expected[1:], strict=True):
        assert_near(mine, theirs, CLOSE[parts[0].dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sure_rows_keep_their_small_gradient(dtype):
    """Above p(target) = 0.999 the gradient is the small difference of two words' worth of pull."""
    (_, words, bias), _, noise = case(40, 200, 32, dtype)
    targets = torch.arange(40, device=DEVICE)
    states = (words[:40].double() * 20 / words[:40].double().square().sum(1, keepdim=True)).to(dtype)
    upstream = torch.full((40,), 1024.0, device=DEVICE)  # float16 has no smaller gradients
    parts = [states, words, bias]
    found, _ = loss_and_gradients(fused_head, parts, targets, noise, upstream, 1.0, False, dtype)
    expected, _ = loss_and_gradients(masked_head, [p.double() for p in parts], targets, noise, upstream)
    sure = (expected[0].exp() > 0.999).nonzero().flatten().tolist()
    assert len(sure) > 10 and (found[0] <= 0).all()
    assert_near(found[0], expected[0], 2e-5)
    for row in sure:
        assert_near(found[1][row], expected[1][row], CLOSE[dtype])


@pytest.mark.parametrize("forbid_target", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2, torch.tensor(1.7)])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_the_same_noise_draws_the_same_tokens_as_the_reference(shape, temperature, forbid_target):
    parts, targets, noise = case(*shape)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(DEVICE)
    options = targets, noise, temperature, forbid_target
    _, sampled, is_best = fused_head(*parts, *options, parts[0].dtype)
    expected = masked_head(*(part.double() for part in parts), *options)
    assert (sampled == expected.sampled).float().mean() > 0.99
    assert torch.equal(is_best, expected.is_best)
    assert sampled.dtype == torch.int64 and is_best.dtype == torch.bool


@pytest.mark.parametrize("forbid_target", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_follow_the_distribution(temperature, forbid_target):
    draws, vocab, target = 6000, 150, 3
    (states, words, bias), _, _ = case(1, vocab, 16)
    bias[target] += 3
    noise = uniform(5, "sample", torch.arange(draws), 2).to(DEVICE)
    targets = torch.full((draws,), target, device=DEVICE)
    repeated = states.expand(draws, -1)
    _, sampled, _ = fused_head(repeated, words, bias, targets, noise, temperature, forbid_target, states.dtype)
    logits = (words.double() @ states[0].double() + bias.double()) / temperature
    if forbid_target:
        logits[target] = -torch.inf
    expected = (logits.softmax(0) * draws).cpu()
    counts = torch.bincount(sampled.cpu(), minlength=vocab).double()
    assert len(counts) == vocab and (counts[expected == 0] == 0).all()
    often = expected >= 5
    bins = [torch.cat([c[often], c[~often].sum()[None]]).numpy() for c in (counts, expected)]
    assert stats.chisquare(*bins).pvalue > 1e-3


@pytest.mark.parametrize("processors", [2, 4])
def test_a_forbidden_target_alone_in_its_block_is_not_drawn(monkeypatch, processors):
    """129 tokens: the last one has a block to itself, and on 4 processors a program."""
    pretend(monkeypatch, processors)
    parts, _, noise = case(200, 129, 16)
    targets = torch.full((200,), 128, device=DEVICE)
    upstream = upstream_of(200)
    parts[2][128] += 20
    options = 1.0, True
    found, (_, sampled, _) = loss_and_gradients(fused_head, parts, targets, noise, upstream, *options, parts[0].dtype)
    wide = [part.double() for part in parts]
    expected, drawn = loss_and_gradients(masked_head, wide, targets, noise, upstream, *options)
    assert (sampled < 128).all() and (sampled == drawn.sampled).float().mean() > 0.99
    assert_near(found[0].exp(), expected[0].exp(), 1e-5)


def test_the_same_call_gives_the_same_bits():
    parts, targets, noise = case(150, 300, 20)
    options = 1.3, True, parts[0].dtype
    runs = [loss_and_gradients(fused_head, parts, targets, noise, upstream_of(150), *options) for _ in range(2)]
    for one, other in zip(runs[0][0] + [runs[0][1][1]], runs[1][0] + [runs[1][1][1]], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("processors", [1, 7])
def test_draws_do_not_depend_on_how_the_vocabulary_is_split(monkeypatch, processors):
    parts, targets, noise = case(150, 1000, 16)
    options = targets, noise, 1.0, False, parts[0].dtype
    loss, sampled, is_best = fused_head(*parts, *options)
    pretend(monkeypatch, processors)
    losses, tokens, best = fused_head(*parts, *options)
    assert torch.equal(sampled, tokens) and torch.equal(is_best, best)
    assert_near(losses, loss.double(), 1e-6)


def test_a_tile_of_the_kernels_is_a_block_of_the_plain_sampling():
    assert TILE == SAMPLING_BLOCK


def test_splits_fill_the_device_in_whole_rounds():
    assert splits_of(152, 132, 239) == 4  # 608 programs in 5 rounds of 132
    assert splits_of(19, 132, 239) == 13
    assert splits_of(132, 132, 239) == 1
    assert splits_of(1, 132, 3) == 3
    assert splits_of(1, 132, 1) == 1


def test_the_operators_keep_their_word_to_the_compiler():
    """Shapes and types without running, gradients, no hidden writes: what torch.compile relies on."""
    (states, words, bias), targets, noise = case(3, 130, 16)
    leaves = [part.requires_grad_() for part in (states, words, bias)]
    heat = torch.tensor(0.7, device=DEVICE)
    for temperature, needs_grad in ((None, True), (heat, True)):
        torch.library.opcheck(
            home._forward_op,
            (*leaves, targets, noise, temperature, False, needs_grad, states.dtype),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


def test_a_compiled_step_has_the_same_loss_and_gradients():
    parts, targets, noise = case(40, 300, 16)
    given = parts, targets, noise, upstream_of(40), 0.7, True, parts[0].dtype
    plain, _ = loss_and_gradients(fused_head, *given)
    compiled, _ = loss_and_gradients(torch.compile(fused_head, fullgraph=True, backend="aot_eager"), *given)
    assert all(torch.equal(one, other) for one, other in zip(plain, compiled, strict=True))


def test_the_kernels_are_chosen_in_one_place(monkeypatch):
    """Where they run and pay: Ampere and later, half precision (by autocast too), a narrow embedding."""
    chip = SimpleNamespace(major=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(choice, "trouble", lambda device: "")

    def can(dtype=HALF, width=128, device="cuda"):
        with FakeTensorMode():
            return can_fuse(torch.empty(7, width, dtype=dtype, device=device))

    assert can() and can(torch.float16) and not can(device="cpu") and not can(width=768)
    assert not can(FULL) and not can(torch.float64)
    chip.major = 7
    assert not can()
    chip.major = 9
    with choice.reference_only():
        assert not can()
    monkeypatch.setattr(choice, "trouble", lambda device: "no compiler")
    assert not can()
    monkeypatch.setattr(choice, "trouble", lambda device: "")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: HALF)
    assert can(FULL) and not can(FULL, device="cpu")


COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from electra.kernels.masked_head import triton as kernels
SCALARS = {"rows", "vocab", "embedding", "blocks", "splits", "blocks_per_split"}
KINDS = {"states": "*bf16", "words": "*bf16", "targets": "*i64", "sampled": "*i64", "is_best": "*i1"}
constants = {"TILE": 128, "EMBEDDING": 128, "TEMPERED": True, "NEEDS_GRAD": True, "FORBID_TARGET": True, "BLOCKS": 256, "SPLITS": 4}
for kernel, rows, warps in ((kernels.forward_kernel, 128, 8), (kernels.finish_kernel, 1, 4), (kernels.backward_kernel, 64, 8)):
    names = kernel.arg_names
    fixed = {name: value for name, value in (constants | {"ROWS": rows}).items() if name in names}
    kind = lambda name: "constexpr" if name in fixed else "i32" if name in SCALARS else KINDS.get(name, "*fp32")
    source = ASTSource(kernel, {n: kind(n) for n in names}, {(names.index(n),): v for n, v in fixed.items()},
                       {(number,): [["tt.divisibility", 16]] for number, n in enumerate(names) if kind(n)[0] in "*i"})
    for chip, stages in ((80, 3), (86, 2), (90, 3)):
        made = triton.compile(source, target=GPUTarget("cuda", chip, 32), options={"num_warps": warps, "num_stages": stages})
        print(made.name, chip, made.metadata.shared)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    """To machine code, and within the shared memory of A100 (163 KiB), RTX 3090 (99) and H100 (227)."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    made = [line.split() for line in done.stdout.splitlines()]
    assert len(made) == 9
    for name, chip, shared in made:
        assert int(shared) <= {"80": 163, "86": 99, "90": 227}[chip] * 1024, name


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_at_full_size_under_autocast_the_kernels_agree_with_the_reference(compiled):
    (states, words, bias), targets, noise = case(19 * 128 + 5, 30_522, 128, FULL)
    upstream = upstream_of(len(states))
    fast = torch.compile(lambda *given: fused_head(*given, HALF), fullgraph=True)
    head = fast if compiled else masked_head
    with torch.autocast("cuda", HALF):
        assert can_fuse(states)
        found, (_, sampled, is_best) = loss_and_gradients(
            head, [states, words, bias], targets, noise, upstream, 0.8, True
        )
    wide = [states.to(HALF).double(), words.to(HALF).double(), bias.double()]
    expected, drawn = loss_and_gradients(masked_head, wide, targets, noise, upstream, 0.8, True)
    assert_near(found[0], expected[0], 1e-5)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert_near(mine, theirs, CLOSE[HALF])
    assert (sampled == drawn.sampled).float().mean() > 0.995
    assert (is_best == drawn.is_best).float().mean() > 0.999


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_replays_with_new_noise_and_temperature():
    parts, targets, noise = case(300, 1000, 128)
    heat = torch.tensor(1.0, device=DEVICE)
    head = lambda: masked_head(*parts, targets, noise, heat, True)  # noqa: E731
    head()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = head()
    noise.copy_(uniform(9, "sample", torch.arange(300), 2))
    heat.fill_(0.5)
    graph.replay()
    assert torch.equal(found.sampled, masked_head(*parts, targets, noise, 0.5, True).sampled)
