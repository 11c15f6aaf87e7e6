import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from electra.base.errors import SettingsError
from electra.pretraining.settings import resolve
from electra.train.optimizers import (
    OptimizerSettings,
    Rates,
    build_optimizer,
    clip_gradients,
    optimizer_tensors,
    split_parameters,
)
from electra.train.settings import ScheduleSettings, highest_fraction, rate_fraction, schedule_warning

CPU = torch.device("cpu")


def optimizer_for(settings: OptimizerSettings, model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, split_parameters(model, settings), settings)


def original_adam(weight, gradients, rates, decay, beta1=0.9, beta2=0.999, eps=1e-6, correct=False):
    """Adam as the original code has it, in float64: no bias correction, decay added to the update before the rate."""
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for number, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        c1, c2 = (1 - beta1**number, 1 - beta2**number) if correct else (1, 1)
        weight = weight - rate * ((m / c1) / (np.sqrt(v / c2) + eps) + decay * weight)
    return weight


@pytest.mark.parametrize("correct", [False, True], ids=["as the original", "bias-corrected"])
def test_adam_equals_the_originals_update(correct):
    rng = np.random.default_rng(0)
    model = nn.Linear(5, 3).double()
    before = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    gradients = {name: rng.normal(size=(6, *value.shape)) for name, value in before.items()}
    rates = [1e-2, 2e-2, 3e-2, 2e-2, 1e-2, 5e-3]
    optimizer = optimizer_for(OptimizerSettings(lr=2e-2, bias_correction=correct, weight_decay=0.1), model)
    for number, rate in enumerate(rates):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.from_numpy(gradients[name][number].copy())
        Rates(optimizer, CPU).set(rate / 2e-2)
        optimizer.step()
    for name, parameter in model.named_parameters():
        decay = 0.1 if name == "weight" else 0.0
        expected = original_adam(before[name], gradients[name], rates, decay, correct=correct)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_share_of_a_total_decays_as_the_optimizers_own_weight_decay(kind):
    """Also what a captured step reads: a tensor whose value comes before each step."""
    ends = []
    for own in ({"weight_decay": 1.7 / (2e-2 * 100)}, {"weight_decay": "auto", "total_decay": 1.7}):
        torch.manual_seed(0)
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(5, 3)]), "words": nn.Embedding(7, 4)}).double()
        optimizer = optimizer_for(OptimizerSettings(kind=kind, lr=2e-2, bias_correction=True, **own), model)
        rates = Rates(optimizer, CPU)
        for _, kept in rates.kept:
            kept.data = kept.double()
        for fraction in (0.5, 1.0, 0.7, 0.1):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            model["words"].weight.grad[3:] = 0
            rates.set(fraction, fraction / 100)
            rates.decay()
            optimizer.step()
        ends.append([parameter.detach().numpy() for parameter in model.parameters()])
    for number, share in zip(*ends, strict=True):
        np.testing.assert_allclose(share, number, rtol=1e-12)


def test_layer_norm_and_bias_are_not_decayed_and_embeddings_are():
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "linear": nn.Linear(4, 4), "words": nn.Embedding(9, 4)})
    groups = optimizer_for(OptimizerSettings(), model).param_groups
    plain, decayed = sorted(groups, key=lambda group: group["weight_decay"])
    assert {id(p) for p in decayed["params"]} == {id(model["linear"].weight), id(model["words"].weight)}
    assert decayed["weight_decay"] == 0.01 and plain["weight_decay"] == 0.0


def test_the_original_schedule_multiplies_warm_up_and_decay():
    settings = ScheduleSettings(kind="original", warmup=10_000)
    rates = [5e-4 * rate_fraction(settings, step, 1_000_000) for step in (0, 4_999, 9_999, 500_000, 999_999)]
    expected = [5e-4 * min(1, (t + 1) / 1e4) * (1 - t / 1e6) for t in (0, 4_999, 9_999, 500_000, 999_999)]
    assert rates == pytest.approx(expected)
    assert max(rate_fraction(settings, step, 1_000_000) for step in range(9_000, 11_000)) == pytest.approx(
        0.99, abs=1e-4
    )


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_the_usual_schedules_reach_their_peak_after_warm_up(kind):
    settings = ScheduleSettings(kind=kind, warmup=100)
    rates = [rate_fraction(settings, step, 1000) for step in range(1000)]
    assert rates[99] == pytest.approx(1.0) and rates[0] == pytest.approx(0.01)
    middle = {"linear": 0.5, "cosine": 0.5, "constant": 1.0}[kind]
    assert rates[550] == pytest.approx(middle, abs=1e-9)
    assert all(rate > 0 and math.isfinite(rate) for rate in rates)
    assert all(later <= earlier for earlier, later in pairwise(rates[100:]))


@pytest.mark.parametrize("kind", ["original", "linear", "cosine", "constant"])
@pytest.mark.parametrize(
    ("warmup", "steps", "power"),
    [(10_000, 20_000, 1.0), (10_000, 1_500, 2.0), (0, 50, 1.0), (40, 50, 1.5), (1, 1, 1.0)],
)
def test_the_highest_fraction_of_the_rate_is_found_without_walking_all_steps(kind, warmup, steps, power):
    settings = ScheduleSettings(kind=kind, warmup=warmup, power=power)
    walked = max(rate_fraction(settings, step, steps) for step in range(steps))
    assert highest_fraction(settings, steps) == pytest.approx(walked, rel=1e-12)


def test_a_warm_up_that_is_too_long_for_the_run_is_told_with_one_that_is_not():
    warning = schedule_warning(ScheduleSettings(warmup=10_000), 20_000)
    assert warning is not None and "never gets above 50% of optimizer.lr" in warning
    assert "warm-up takes 10,000 of 20,000 steps. Use schedule.warmup=0.05, a fraction of them." in warning
    assert schedule_warning(ScheduleSettings(warmup=1_000), 20_000) is None
    assert schedule_warning(ScheduleSettings(), 1_000_000) is None


class Pair(nn.Module):
    """Two networks as objectives hold them."""

    headline = extra_metrics = muted_alarms = ()

    def __init__(self):
        super().__init__()
        self.discriminator, self.corruptor = nn.Linear(4, 4), nn.Linear(4, 4)


def test_decoupled_networks_have_their_own_rate_and_their_own_clipping():
    pair = Pair()
    settings = OptimizerSettings(lr=1e-2, decoupled=True, clip=1.0, generator={"lr": 1e-3, "clip": 0.5})
    optimizer = optimizer_for(settings, pair)
    rates = {id(p): group["peak"] for group in optimizer.param_groups for p in group["params"]}
    assert {rates[id(p)] for p in pair.discriminator.parameters()} == {1e-2}
    assert {rates[id(p)] for p in pair.corruptor.parameters()} == {1e-3}
    Rates(optimizer, CPU).set(0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {5e-3, 5e-4}

    def norm(module):
        return torch.stack([p.grad.norm() for p in module.parameters()]).norm().item()

    for parameter in pair.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    clip_gradients(split_parameters(pair, settings))
    assert norm(pair.discriminator) == pytest.approx(1.0, rel=1e-4)
    assert norm(pair.corruptor) == pytest.approx(0.5, rel=1e-4)

    for parameter in pair.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    clip_gradients(split_parameters(pair, OptimizerSettings(clip=1.0)))
    assert norm(pair) == pytest.approx(1.0, rel=1e-4)


def test_what_does_not_learn_has_no_state():
    pair = Pair()
    pair.corruptor.requires_grad_(False)
    optimizer = optimizer_for(OptimizerSettings(), pair)
    assert len(optimizer.state) == 2
    assert all(name.startswith("discriminator") for name in optimizer_tensors(optimizer, pair))


@pytest.mark.parametrize("value", ["abc", "-1"])
def test_a_weight_decay_that_is_none_gets_one_line_for_each_network(value):
    with pytest.raises(SettingsError) as refused:
        resolve("modern-tiny", ["data=x", f"optimizer.weight_decay={value}"])
    own, generators = str(refused.value).splitlines()
    assert own.startswith('optimizer.weight_decay: must be a number of at least 0, or "auto"')
    assert generators.startswith("optimizer.generator.weight_decay")
