"""Layer-wise rates are the paper's, to the digit; without bias correction Adam is the original's."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from electra.finetuning.plan import MethodSettings
from electra.finetuning.training import depth_factor, layerwise_group
from electra.train.optimizers import Muon, Rates, build_optimizer

NAMES = ["head.dense.weight", *(f"encoder.layers.{n}.expand.weight" for n in (11, 10, 0)), "encoder.project.weight"]
NAMES += ["encoder.embeddings.words.weight", "encoder.embeddings.norm.bias"]


@pytest.mark.parametrize(("kind", "top", "bottom"), [("exact", 1, 13), ("original", 2, 14)])
def test_modernberts_last_norm_learns_with_its_top_layer_and_its_first_with_the_words(kind, top, bottom):
    last, first = (depth_factor(f"encoder.{name}.weight", 12, 0.8, kind) for name in ("final_norm", "norm"))
    assert (last, first) == pytest.approx((0.8**top, 0.8**bottom), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "exponents"), [("exact", [0, 1, 2, 12, 13, 13, 13]), ("original", [0, 2, 3, 13, 14, 14, 14])]
)
def test_each_depth_has_its_rate(kind, exponents):
    factors = [depth_factor(name, 12, 0.8, kind) for name in NAMES]
    assert factors == pytest.approx([0.8**exponent for exponent in exponents], rel=1e-12)


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.settings = SimpleNamespace(layers=2)
        self.encoder.layers = nn.ModuleList(nn.ModuleDict({"map": nn.Linear(3, 3)}) for _ in range(2))
        self.head = nn.Linear(3, 1)


def optimizer_for(model: nn.Module, **method) -> torch.optim.Optimizer:
    settings = MethodSettings(**{"lr": 0.1, "layer_decay": 0.5, "bias_correction": True, **method})
    return build_optimizer(model, [layerwise_group(model, settings)], settings.optimizer_settings())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_is_in_one_group_and_steps_at_its_rate(kind):
    model = Toy()
    optimizer = optimizer_for(model, weight_decay=0.01, optimizer=kind)
    assert isinstance(optimizer, Muon) == (kind == "muon")
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in model.parameters()} and len(grouped) == 6
    for group in optimizer.param_groups:
        assert all((p.ndim > 1) == (group["weight_decay"] > 0) for p in group["params"])
    Rates(optimizer, torch.device("cpu")).set(0.2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    # the first corrected Adam step is the rate itself
    moved = {name: (before[name] - p).abs().max().item() for name, p in model.named_parameters() if p.ndim == 1}
    expected = {"encoder.layers.0.map.bias": 0.005, "encoder.layers.1.map.bias": 0.01, "head.bias": 0.02}
    assert moved == pytest.approx(expected, rel=1e-4)
    if kind == "muon":  # the same gradient, so the same direction: twice the rate a layer higher
        lower, upper = (
            before[f"encoder.layers.{n}.map.weight"] * (1 - 0.01 * rate) - model.encoder.layers[n]["map"].weight
            for n, rate in ((0, 0.005), (1, 0.01))
        )
        torch.testing.assert_close(upper, 2 * lower, atol=1e-6, rtol=1e-4)


def test_without_bias_correction_the_first_step_is_the_original_s():
    model = Toy()
    optimizer = optimizer_for(model, lr=1e-3, bias_correction=False)
    before = model.head.weight[0, 0].item()
    model.head.weight.grad = torch.full_like(model.head.weight, 2.0)
    optimizer.step()
    expected = 1e-3 * (0.1 * 2.0) / ((0.001 * 4.0) ** 0.5 + 1e-6)
    assert before - model.head.weight[0, 0].item() == pytest.approx(expected, rel=1e-3)
