"""Muon against the same iteration in numpy, its singular values, batches, saved state, a problem that it solves, and its
place among the settings."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_optim import CPU, optimizer_for, original_adam
from torch import nn, optim

from conftest import TINY, inputs_for, make_batch
from electra.model import encoder_alone
from electra.model.generators import GeneratorSettings
from electra.model.linear import Linear
from electra.model.modern import ModernEncoderSettings
from electra.objectives import build as build_objective
from electra.objectives.electra import ElectraSettings
from electra.train.checkpoint import checkpoint_folders
from electra.train.optimizers import (
    ROUNDS,
    Matrix,
    Muon,
    OptimizerSettings,
    Rates,
    clip_gradients,
    matrices_in_layers,
    optimizer_tensors,
    orthogonalise,
    split_parameters,
)
from helpers import electra


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference_orthogonalise(matrix: np.ndarray) -> np.ndarray:
    x = matrix / np.linalg.norm(matrix)
    for a, b, c in ROUNDS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def reference_muon(weight, gradients, rates, decay, parts, momentum):
    """The update of the docstring in float64, one part at a time."""
    m = np.zeros_like(weight)
    for gradient, rate in zip(gradients, rates, strict=True):
        m = momentum * m + (1 - momentum) * gradient
        ahead = momentum * m + (1 - momentum) * gradient
        pieces = [reference_orthogonalise(piece) for piece in np.split(ahead, parts)]
        size = 0.2 * math.sqrt(max(pieces[0].shape))
        weight = weight - rate * (size * np.concatenate(pieces) + decay * weight)
    return weight


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Lying, standing, square and stacked matrices in layers; an embedding, a head and biases outside of Muon."""
    torch.manual_seed(0)
    model = nn.Module()
    model.words = nn.Embedding(9, 6)
    model.layers = nn.ModuleList(
        nn.ModuleDict({"up": nn.Linear(6, 10), "down": nn.Linear(10, 6), "qkv": Linear(6, 18, stacked=3)})
        for _ in range(2)
    )
    model.output = nn.Linear(6, 2)
    return model.to(dtype)


def build(model: nn.Module, lr: float = 0.02, decay: float = 0.1) -> Muon:
    settings = OptimizerSettings(kind="muon", lr=lr, weight_decay=decay, bias_correction=True)
    optimizer = optimizer_for(settings, model)
    assert isinstance(optimizer, Muon)
    return optimizer


def alone(matrices: list[Matrix], lr: float) -> Muon:
    """With next to nothing for the other optimizer."""
    options = {"lr": lr, "peak": lr, "weight_decay": 0.0, "momentum": 0.95}
    other = optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "peak": lr}], lr=lr)
    return Muon([(matrices, options)], other)


def other_parameters(model: nn.Module) -> list[nn.Parameter]:
    mine = {id(matrix.parameter) for matrix in matrices_in_layers(model)}
    return [parameter for parameter in model.parameters() if id(parameter) not in mine]


def give_gradients(model: nn.Module, step: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = random(*parameter.shape, seed=1000 * step + number, dtype=parameter.dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_update_equals_the_reference_in_numpy(dtype, tolerance):
    model = network(dtype)
    optimizer = build(model)
    matrices = matrices_in_layers(model)
    before = [matrix.parameter.detach().double().numpy().copy() for matrix in matrices]
    rates, gradients = [0.02, 0.01, 0.03], [[] for _ in matrices]
    for step, rate in enumerate(rates):
        give_gradients(model, step)
        for kept, matrix in zip(gradients, matrices, strict=True):
            kept.append(matrix.parameter.grad.double().numpy().copy())
        Rates(optimizer, CPU).set(rate / 0.02)
        optimizer.step()
    for matrix, start, given in zip(matrices, before, gradients, strict=True):
        expected = reference_muon(start, given, rates, 0.1, matrix.parts, 0.95)
        np.testing.assert_allclose(matrix.parameter.detach().double().numpy(), expected, atol=tolerance)


@pytest.mark.parametrize("shape", [(4, 24, 64), (2, 64, 256), (3, 8, 8)])
def test_singular_values_become_one(shape):
    """From a thousandth of the norm upwards, spread over all of it."""
    batch, short, long = shape
    values = torch.logspace(-3, 0, short, dtype=torch.float64)
    values = (values / values.norm()).clamp(min=1.05e-3)
    left, _ = torch.linalg.qr(random(batch, short, short, dtype=torch.float64))
    right, _ = torch.linalg.qr(random(batch, long, short, seed=1, dtype=torch.float64))
    matrices = (left * values @ right.mT).float()
    for scale in (1e-12, 1.0, 1e6):
        result = orthogonalise(scale * matrices)
        found = torch.linalg.svdvals(result)
        assert found.min() >= 0.7 and found.max() <= 1.3
    exact = (left @ right.mT).float()
    assert nn.functional.cosine_similarity(result.flatten(1), exact.flatten(1)).min() > 0.99


def test_the_rounds_bring_every_size_from_a_thousandth_up_near_one():
    sizes = np.geomspace(1e-3, 1.0, 100_000)
    for a, b, c in ROUNDS:
        sizes = a * sizes + b * sizes**3 + c * sizes**5
    assert sizes.min() > 0.83 and sizes.max() < 1.12


def test_singular_values_beyond_one_do_not_run_away():
    """Rounding in bfloat16 makes norms a little more than one."""
    sizes = np.linspace(1.0, 1.02, 100)
    for a, b, c in ROUNDS:
        sizes = a * sizes + b * sizes**3 + c * sizes**5
    assert sizes.min() > 0.7 and sizes.max() < 1.3


def test_a_batch_equals_its_matrices_one_by_one():
    batch = random(5, 12, 20)
    single = torch.cat([orthogonalise(matrix[None]) for matrix in batch])
    torch.testing.assert_close(orthogonalise(batch), single, atol=1e-6, rtol=1e-6)


def test_equal_sizes_lying_or_standing_are_one_batch():
    optimizer = build(network())
    sizes = {matrices[0].sides: len(matrices) for _, matrices in optimizer.batches}
    assert len(optimizer.batches) == 2 and sizes == {(6, 10): 4, (6, 6): 2}


def test_a_matrix_without_gradient_stays_and_one_of_zeros_only_decays():
    model = network()
    optimizer = build(model, lr=0.1, decay=0.5)
    give_gradients(model, 0)
    silent, zero = model.layers[0]["up"].weight, model.layers[1]["up"].weight
    before, still = zero.detach().clone(), silent.detach().clone()
    silent.grad, zero.grad = None, torch.zeros_like(zero)
    optimizer.step()
    assert torch.equal(silent, still)
    torch.testing.assert_close(zero, before * 0.95)


def test_the_update_has_the_size_of_adamws():
    """Root mean square 0.2 * lr, whatever the shape."""
    for shape in ((32, 32), (32, 128), (128, 32)):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = random(*shape)
        alone([Matrix(weight)], lr=1.0).step()
        assert weight.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.15)


def test_embeddings_heads_norms_and_biases_are_adamws():
    objective = build_objective(ElectraSettings(), inputs_for(97, TINY, GeneratorSettings(width=0.5)))
    matrices, rest = matrices_in_layers(objective), other_parameters(objective)
    names = {id(parameter): name for name, parameter in objective.named_parameters()}
    mine = {names[id(matrix.parameter)] for matrix in matrices}
    assert len(mine) == (2 + 2) * 4 and all(".layers." in name for name in mine)
    others = {names[id(parameter)] for parameter in rest}
    assert mine | others == set(names.values()) and not mine & others
    assert "detection_head.output.weight" in others and "discriminator.embeddings.words.weight" in others
    stacked = {names[id(matrix.parameter)].split(".")[-2]: matrix.parts for matrix in matrices}
    assert stacked == {"query_key_value": 3, "attention_output": 1, "expand": 1, "contract": 1}


def test_a_shared_encoder_is_updated_once():
    objective = build_objective(ElectraSettings(), inputs_for(97, TINY, GeneratorSettings(width=1, sharing="all")))
    matrices = matrices_in_layers(objective)
    assert len({id(matrix.parameter) for matrix in matrices}) == len(matrices) == 2 * 4


def test_modernberts_gate_is_a_matrix_of_its_own():
    settings = ModernEncoderSettings(layers=1, hidden=8, heads=2, intermediate=12, embedding=8)
    matrices = matrices_in_layers(encoder_alone(settings, 9))
    assert sorted((matrix.sides, matrix.parts) for matrix in matrices) == [
        ((8, 8), 1), ((8, 8), 3), ((8, 12), 1), ((8, 12), 2),
    ]  # fmt: skip


def test_others_are_updated_as_by_adamw_alone():
    model, twin = network(), network()
    settings = OptimizerSettings(lr=0.02, weight_decay=0.1, bias_correction=True)
    optimizer, adamw = build(model), optimizer_for(settings, twin)
    for step, share in enumerate((1.0, 0.25)):
        give_gradients(model, step)
        give_gradients(twin, step)
        Rates(optimizer, CPU).set(share)
        Rates(adamw, CPU).set(share)
        optimizer.step()
        adamw.step()
    pairs = zip(other_parameters(model), other_parameters(twin), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not any(
        torch.equal(one.parameter, other.parameter)
        for one, other in zip(matrices_in_layers(model), matrices_in_layers(twin), strict=True)
    )
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_going_on_from_saved_state_is_the_same_to_the_bit():
    def advance(model: nn.Module, optimizer: Muon, steps: range) -> None:
        for step in steps:
            give_gradients(model, step)
            optimizer.step()

    model = network()
    optimizer = build(model)
    advance(model, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()}
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert "layers.1.qkv.weight.momentum" in saved and "words.weight.exp_avg_sq" in saved
    advance(model, optimizer, range(3, 6))

    again = network()
    resumed = build(again)
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            parameter.copy_(weights[name])
        for name, tensor in optimizer_tensors(resumed, again).items():
            tensor.copy_(saved[name])
    advance(again, resumed, range(3, 6))
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    first, second = optimizer_tensors(optimizer, model), optimizer_tensors(resumed, again)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_the_rates_may_be_tensors():
    """As a recorded step has them: one for each group, the inner AdamW's too, filled anew before each step."""
    model, twin = network(), network()
    number, tensor = build(model), build(twin)
    rates = torch.zeros(len(tensor.param_groups))
    for group, rate in zip(tensor.param_groups, rates.unbind(), strict=True):
        group["lr"] = rate
    peaks = torch.tensor([group["peak"] for group in tensor.param_groups])
    for step, share in enumerate((0.5, 1.0)):
        give_gradients(model, step)
        give_gradients(twin, step)
        Rates(number, CPU).set(share)
        torch.mul(peaks, share, out=rates)
        number.step()
        tensor.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_least_squares_with_uneven_directions_is_solved():
    """min |XW - Y|² with inputs ten times stronger in some directions than in others."""
    inputs = random(200, 16) * torch.logspace(0, -1, 16)
    truth = random(16, 24, seed=1)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(16, 24, bias=False)])
    model.layers[0] = nn.ModuleDict({"map": model.layers[0]})
    nn.init.zeros_(model.layers[0]["map"].weight)
    optimizer = alone(matrices_in_layers(model), lr=0.1)
    losses = []
    for step in range(300):
        Rates(optimizer, CPU).set(1 - step / 300)
        loss = (model.layers[0]["map"](inputs) - inputs @ truth).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 1e-4 * losses[0]
    assert (model.layers[0]["map"].weight.T - truth).abs().max() < 0.1


def test_electra_learns_with_it():
    objective = build_objective(ElectraSettings(), inputs_for(97, TINY, GeneratorSettings(width=0.5)))
    optimizer, batch = build(objective, lr=3e-3, decay=0.01), make_batch()
    torch.manual_seed(0)
    losses = []
    for _ in range(40):
        loss = objective(batch).total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < 0.85 * sum(losses[:5]) / 5


@pytest.mark.parametrize("sharing", ["tied", "gdes", "all"])
def test_an_objective_is_updated_as_in_numpy_with_a_rate_for_each_network(sharing):
    """Three steps of a whole objective in float64: real gradients, clipped by network, embeddings shared in every way."""
    width = 1.0 if sharing == "all" else 0.5
    objective = build_objective(
        ElectraSettings(), inputs_for(97, TINY, GeneratorSettings(width=width, sharing=sharing))
    )
    objective.double()
    settings = OptimizerSettings(
        kind="muon", momentum=0.9, lr=4e-3, weight_decay=0.1, decoupled=True,
        generator={"lr": 1e-3, "weight_decay": 0.05, "clip": 0.5},
    )  # fmt: skip
    optimizer, parts = optimizer_for(settings, objective), split_parameters(objective, settings)
    names = {id(parameter): name for name, parameter in objective.named_parameters()}
    before = {name: p.detach().numpy().copy() for name, p in objective.named_parameters()}
    gradients, shares, batch = {name: [] for name in before}, (0.5, 1.0, 0.75), make_batch()
    for share in shares:
        objective(batch).total.backward()
        clip_gradients(parts)
        for name, parameter in objective.named_parameters():
            gradients[name].append(parameter.grad.numpy().copy())
        Rates(optimizer, CPU).set(share)
        optimizer.step()
        optimizer.zero_grad()
    stacked = {names[id(matrix.parameter)]: matrix.parts for matrix in matrices_in_layers(objective)}
    for name, parameter in objective.named_parameters():
        adam = settings.generator if name.startswith("corruptor.") else settings
        given = before[name], gradients[name], [share * adam.lr for share in shares]
        decay = adam.weight_decay if parameter.ndim > 1 else 0.0
        if name in stacked:
            expected = reference_muon(*given, decay, stacked[name], 0.9)
        else:
            expected = original_adam(*given, decay)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=1e-9, err_msg=name)
    assert {name.startswith("corruptor.") for name in stacked} == ({False} if sharing == "all" else {False, True})


def test_what_does_not_learn_is_left_alone():
    objective = build_objective(ElectraSettings(), inputs_for(97, TINY, GeneratorSettings(width=0.5, sharing="none")))
    objective.corruptor.requires_grad_(False)
    settings = OptimizerSettings(kind="muon", decoupled=True)
    optimizer = optimizer_for(settings, objective)
    learning = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(parameter) for parameter in learning}
    assert len(held) == len(learning) == len(optimizer.state)


def test_the_recipe_trains_by_the_command_line_and_another_optimizer_is_refused(recipe, prepared, tmp_path):
    words = ("pretrain", f"{recipe}+muon", f"data={prepared}", f"run={tmp_path / 'run'}", "train.steps=6")
    done = electra(*words)
    assert done.returncode == 0, done.stderr
    (*_, folder) = checkpoint_folders(tmp_path / "run" / "checkpoints")
    saved = load_file(folder / "optimizer.safetensors")
    inside = {name.rpartition(".")[2] for name in saved if ".layers.0.expand.weight." in name}
    outside = {name.rpartition(".")[2] for name in saved if ".embeddings.words.weight." in name}
    assert inside == {"momentum"} and outside == {"step", "exp_avg", "exp_avg_sq"}
    assert all(tensor.abs().sum() > 0 for name, tensor in saved.items() if name.endswith("momentum"))
    other = electra(*words, "optimizer.kind=adamw")
    assert other.returncode == 2 and "optimizer.kind: 'muon' -> 'adamw'" in other.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bfloat16_on_the_gpu_is_near_float32_on_the_cpu():
    matrices = random(4, 64, 256)
    expected, found = orthogonalise(matrices), orthogonalise(matrices.cuda()).cpu()
    assert found.dtype == torch.float32
    assert nn.functional.cosine_similarity(found.flatten(1), expected.flatten(1)).min() > 0.99
    values = torch.linalg.svdvals(found)
    assert values.min() >= 0.7 and values.max() <= 1.3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_replays_to_the_same_weights():
    """The rates are tensors, and change between the replays."""
    model, twin = network().cuda(), network().cuda()
    shares, results = (0.5, 1.0, 0.25, 0.75), []
    for net, capture in ((model, False), (twin, True)):
        optimizer = build(net)
        rates = Rates(optimizer, torch.device("cuda"))
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for step, share in enumerate(shares):
            for number, parameter in enumerate(net.parameters()):
                parameter.grad.copy_(random(*parameter.shape, seed=1000 * step + number))
            rates.set(share)
            if not capture or step == 0:
                optimizer.step()
                continue
            if step == 1:
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    optimizer.step()
            graph.replay()
        torch.cuda.synchronize()
        results.append([*net.parameters(), *optimizer_tensors(optimizer, net).values()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
