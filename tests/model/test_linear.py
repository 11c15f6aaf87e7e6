"""Products by oneDNN, where they are taken and that they are F.linear's, gradients included."""

import resource
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from electra.model import linear as module
from electra.model.linear import Linear, OneDnnLinear, gains_by_onednn, is_mkl_slow, linear, sizes

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="this torch was built without oneDNN")


@pytest.fixture
def slow_mkl(monkeypatch):
    monkeypatch.setattr(module, "is_mkl_slow", lambda: True)
    monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(module, "BLOCKS", (8, 4, 1))


@needs_onednn
@pytest.mark.parametrize("blocks", [(8, 4, 1), (16, 4)])
@pytest.mark.parametrize(("outputs", "has_bias"), [(20, True), (20, False), (100, True)])
@pytest.mark.parametrize("shape", ["plain", "one row", "turned", "part", "expanded"])
def test_onednn_is_linear_in_float64_with_all_gradients(slow_mkl, monkeypatch, shape, outputs, has_bias, blocks):
    monkeypatch.setattr(module, "BLOCKS", blocks)
    torch.manual_seed(0)
    whole = torch.randn(6, 5, 48)
    x = {
        "plain": whole,
        "one row": whole[0, 0],
        "turned": whole.transpose(0, 1),
        "part": whole[:, :1, 8:40],
        "expanded": whole[:, :1].expand(6, 5, 48),
    }[shape]
    weight, bias = torch.randn(outputs, 96)[:, : x.shape[-1]], torch.randn(outputs) if has_bias else None
    grad = torch.randn(*x.shape[:-1], outputs).transpose(0, -1).contiguous().transpose(0, -1)
    results = []
    for dtype, function in ((torch.float32, linear), (torch.float64, F.linear)):
        inputs = [it.to(dtype).requires_grad_() for it in (x.detach(), weight, bias) if it is not None]
        y = function(*inputs)
        by_onednn = dtype == torch.float32 and x.numel() >= blocks[-1] * x.shape[-1]
        assert (type(y.grad_fn).__name__ == "OneDnnLinearBackward") == by_onednn
        results.append((y, *torch.autograd.grad(y, inputs, grad.to(dtype))))
    for ours, exact in zip(*results, strict=True):
        assert ours.shape == exact.shape
        assert (ours - exact).abs().max() < 2e-5


@needs_onednn
def test_only_the_gradients_that_are_asked_for(slow_mkl):
    x, layer = torch.randn(4, 8), Linear(8, 3)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None and torch.equal(layer.bias.grad, torch.full((3,), 4.0))
    with torch.inference_mode():
        assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-6)


def test_what_is_small_or_not_float32_or_autocast_stays_torchs(slow_mkl, monkeypatch):
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    assert gains_by_onednn(x, weight)
    assert not gains_by_onednn(x.double(), weight.double())
    assert not gains_by_onednn(x.to("meta"), weight.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not gains_by_onednn(x, weight) and linear(x, weight).dtype == torch.bfloat16
    monkeypatch.setattr(module, "LEAST", 25)
    assert not gains_by_onednn(x, weight)
    monkeypatch.setattr(module, "LEAST", 24)
    assert gains_by_onednn(x, weight)
    monkeypatch.setattr(module, "BLOCKS", (8, 5))
    assert not gains_by_onednn(x, weight)
    monkeypatch.setattr(module, "is_mkl_slow", lambda: False)
    assert not gains_by_onednn(x, weight)


@pytest.mark.parametrize(("name", "slow"), [("AuthenticAMD", True), ("vendor_id : GenuineIntel", False)])
def test_intels_processors_keep_mkl(monkeypatch, name, slow):
    monkeypatch.setattr(module, "processor", lambda: name)
    for backend in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(backend, "is_available", lambda: True)
    is_mkl_slow.cache_clear()
    assert is_mkl_slow() == (slow and hasattr(torch.ops.mkldnn, "_linear_pointwise"))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    is_mkl_slow.cache_clear()
    assert not is_mkl_slow()
    is_mkl_slow.cache_clear()


@needs_onednn
def test_what_is_exported_or_compiled_has_torchs_own_operator(slow_mkl):
    layer = nn.Sequential(Linear(8, 8), nn.GELU())
    exported = torch.export.export(layer, (torch.randn(4, 8),))
    targets = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert "aten.linear.default" in targets and not any("mkldnn" in it for it in targets)


@needs_onednn
def test_a_second_derivative_is_refused_not_wrong(slow_mkl):
    x = torch.randn(4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad((OneDnnLinear.apply(x, torch.randn(3, 8), None) ** 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_rows_are_cut_into_few_sizes():
    assert sizes(2048) == [1024, 1024] and sizes(1024) == [1024]
    assert sizes(3001) == [1024, 1024, 256, 256, 256, 185]
    assert sizes(256) == [256] and sizes(7) == [7]


@needs_onednn
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_lengths_that_are_ever_new_cost_no_memory(monkeypatch):
    """oneDNN keeps more than a megabyte for each of its shapes; 200 lengths by three products were 800 MB."""
    monkeypatch.setattr(module, "is_mkl_slow", lambda: True)
    layer, rows = Linear(256, 768), torch.randn(1500, 256)

    def train(count: int) -> None:
        layer(rows[:count].requires_grad_()).sum().backward()

    def megabytes() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6

    for count in range(1490, 1500):
        train(count)
    before = megabytes()
    for count in range(1200, 1400):
        train(count)
    assert megabytes() - before < 100
