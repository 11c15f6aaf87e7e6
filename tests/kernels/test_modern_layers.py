"""The fused modern layers against ModernEncoder's plain ones in float64. Interpreted on the CPU, real where there is a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from interpreted import INTERPRETED, bfloat16_is_a_number  # noqa: F401

from electra import kernels as choice
from electra.kernels.layer.modern import fused_stack
from electra.model import encoder_alone, initialise
from electra.model import modern as home
from electra.model.modern import ModernEncoderSettings

DEVICE = "cpu" if INTERPRETED else "cuda"
HALF, FULL = torch.bfloat16, torch.float32
# Of the norm of the states or of a gradient. In bfloat16 twelve layers on a GPU are asked more closely below: these are a few
# tokens, and Triton's interpreter cuts where a GPU rounds.
CLOSE = {FULL: 2e-6, HALF: 5e-2}
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")


def encoder_and_rows(seq=24, hidden=64, heads=2, intermediate=48, layers=3, window=8, batch=3):
    """In float64, all parameters far from 0 and 1."""
    sizes = {"hidden": hidden, "heads": heads, "intermediate": intermediate, "layers": layers, "embedding": hidden}
    encoder = encoder_alone(ModernEncoderSettings(**sizes, window=window, global_every=2), 40).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=hidden**-0.5 if parameter.ndim == 2 else 0.3, generator=generator)
        parameter.data += parameter.ndim == 1
    ids = torch.randint(40, (batch, seq), generator=generator)
    is_real = torch.arange(seq) < torch.randint(1, seq + 1, (batch, 1), generator=generator)
    is_real[0] = True
    upstream = torch.randn(batch, seq, hidden, generator=generator)
    return encoder.to(DEVICE), ids.to(DEVICE), is_real.to(DEVICE), upstream.to(DEVICE)


def run(encoder, ids, is_real, upstream, first_only=False):
    """States of real tokens, and all gradients."""
    encoder.zero_grad()
    out = encoder(ids, torch.zeros_like(ids), is_real, first_only)
    real = torch.ones_like(ids, dtype=torch.bool) if is_real is None else is_real
    weight = (upstream * real[:, :, None])[:, : out.shape[1]]
    out.backward(weight.to(out.dtype))
    return (out * real[:, : out.shape[1], None]).detach(), {n: p.grad for n, p in encoder.named_parameters()}


@pytest.fixture
def fused(monkeypatch):
    """The layers fused on this device, in float32 too where Triton is interpreted; and how often that happened."""
    calls = []
    if INTERPRETED:
        monkeypatch.setattr(home, "usable", lambda x: x.dtype != torch.float64)
    of_class = home.ModernEncoder.fused
    monkeypatch.setattr(home.ModernEncoder, "fused", lambda *a: calls.append(a[3]) or of_class(*a))
    return calls


SHAPES = [
    {},
    {"seq": 7, "hidden": 32, "heads": 1, "intermediate": 40},
    {"layers": 1},
    {"seq": 128, "window": 32, "batch": 2, "layers": 2},
    {"seq": 200, "window": 32, "batch": 2, "layers": 2},
]
DTYPES = [FULL, HALF] if INTERPRETED else [HALF]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_layers_equal_plain_ones(fused, shape, padded, first_only, dtype):
    if INTERPRETED and dtype is HALF and shape.get("seq", 0) >= 128:
        pytest.skip("the interpreter takes minutes; float32 is asked")
    encoder, ids, is_real, upstream = encoder_and_rows(**shape)
    is_real = is_real if padded else None
    expected, expected_gradients = run(encoder, ids, is_real, upstream, first_only)
    assert not fused
    encoder.float()
    with torch.autocast(DEVICE, HALF, enabled=dtype is HALF):
        found, gradients = run(encoder, ids, is_real, upstream, first_only)
    assert fused == [len(encoder.layers) - first_only]
    assert found.isfinite().all()
    for name, tensor in {"states": found, **gradients}.items():
        exact = {"states": expected, **expected_gradients}[name]
        off = (tensor.double() - exact).norm() / exact.norm()
        assert off <= CLOSE[dtype], f"{name}: {off:.2g}"


def test_dropout_stays_with_torch(fused):
    encoder, ids, *_ = encoder_and_rows()
    with torch.autocast(DEVICE, HALF):
        encoder.float().settings = encoder.settings.model_copy(update={"dropout": 0.1})
        encoder(ids[:, :24], torch.zeros_like(ids[:, :24]), None)
        assert not fused
        encoder.eval()(ids[:, :24], torch.zeros_like(ids[:, :24]), None)
    assert fused == [3]


@pytest.mark.parametrize("final", [True, False])
def test_operator_says_the_right_shapes(final):
    encoder, *_ = encoder_and_rows()
    layers = list(encoder.float().layers)
    weights = [w.detach().requires_grad_() for layer in layers for w in layer.weights()]
    norms = [w.detach().requires_grad_() for layer in layers for w in layer.norm_weights()] + [
        torch.ones(64, device=DEVICE)
    ] * final
    halves = [w.detach().to(HALF) for w in weights]
    x = torch.randn(3, 24, 64, device=DEVICE).requires_grad_()
    arguments = x, None, weights, norms, halves, torch.randn(2, 2, 24, 16, device=DEVICE), 2, [0, 4, 0], 1e-5
    torch.library.opcheck(
        fused_stack, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )


@needs_gpu
@pytest.mark.gpu
def test_twelve_layers_are_near_to_float64():
    encoder, ids, is_real, upstream = encoder_and_rows(128, 256, 4, 704, 12, 64, batch=8)
    initialise(encoder.cpu(), encoder.settings, 0)
    encoder.to(DEVICE)
    exact, exact_gradients = run(encoder, ids, is_real, upstream)
    encoder.float()
    with torch.autocast(DEVICE, HALF):
        fused, fused_gradients = run(encoder, ids, is_real, upstream)
        with choice.reference_only():
            plain, _ = run(encoder, ids, is_real, upstream)
    off = [(x.to(HALF).double() - exact).norm() / exact.norm() for x in (fused, plain)]
    assert off[0] <= 1.5 * off[1]
    for name, exact_gradient in exact_gradients.items():
        away = (fused_gradients[name].double() - exact_gradient).norm() / exact_gradient.norm()
        assert away <= 2e-2, f"{name}: {away:.2g}"  # gradients are rounded between layers
