"""The ModernBERT encoder against transformers' own classes; what a local layer sees; first weights."""

from itertools import product

import numpy as np
import pytest
import torch

from conftest import SPECIAL, TINY, VOCABULARY, inputs_for, make_batch, noisy
from electra.interop import formats as export
from electra.interop.formats import network_tensors
from electra.model import (
    build_token_head,
    compatibility_settings,
    encoder_alone,
    gather_rows,
    initialise,
    readable_length,
)
from electra.model.generators import GeneratorSettings
from electra.model.modern import (
    ModernDetectionHead,
    ModernEncoder,
    ModernEncoderSettings,
    nearby_mask,
    rotate,
    rotation,
)
from electra.objectives import build
from electra.objectives.electra import ElectraSettings
from electra.objectives.electric import ElectricSettings

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

SMALL = ModernEncoderSettings(
    layers=5, hidden=32, heads=2, intermediate=48, embedding=32, positions=40, window=8, global_every=3
)
PROJECTED = SMALL.model_copy(update={"embedding": 12})
TIED = PROJECTED.model_copy(update={"token_head": "tied"})

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["sdpa", "eager"])
SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        SMALL,
        PROJECTED,
        SMALL.model_copy(update={"global_every": 1}),
        SMALL.model_copy(update={"window": 4, "global_every": 2, "local_theta": 500.0, "global_theta": 3e4}),
        SMALL.model_copy(update={"window": 44}),
        SMALL.model_copy(update={"window": 100}),
        SMALL.model_copy(update={"global_from": "last"}),
    ],
    ids=[
        "local and global",
        "projected",
        "all global",
        "other window, other angles",
        "all but the ends",
        "beyond the row",
        "the last is global",
    ],
)


def ours(settings: ModernEncoderSettings) -> ModernEncoder:
    encoder = encoder_alone(settings, VOCABULARY)
    initialise(encoder, settings, seed=1)
    return noisy(encoder)


def theirs(settings: ModernEncoderSettings, implementation: str = "sdpa") -> "transformers.ModernBertModel":
    config = export.config_json(settings, VOCABULARY, SPECIAL, "ModernBertModel")
    config = transformers.ModernBertConfig(**{k: v for k, v in config.items() if k != "model_type"})
    config._attn_implementation = implementation
    return transformers.ModernBertModel(config).eval()


@SETTINGS
@IMPLEMENTATIONS
@pytest.mark.parametrize("padded", [True, False])
def test_our_weights_in_transformers_give_the_same_states(settings, implementation, padded):
    encoder, batch = ours(settings), make_batch(padded=padded)
    model = theirs(settings, implementation)
    model.load_state_dict(export.encoder_to_transformers(encoder.settings, encoder.state_dict()))
    with torch.no_grad():
        states = encoder(batch.ids, batch.segments, batch.is_real if padded else None)
        expected = model(batch.ids, batch.is_real.long()).last_hidden_state
    assert (states - expected)[batch.is_real].abs().max() <= 1e-5
    assert states.isfinite().all()


@IMPLEMENTATIONS
def test_transformers_weights_here_give_the_same_states(implementation):
    model = noisy(theirs(SMALL, implementation))
    encoder, batch = encoder_alone(SMALL, VOCABULARY).eval(), make_batch()
    encoder.load_state_dict(export.encoder_from_transformers(SMALL, model.state_dict()))
    with torch.no_grad():
        states = encoder(batch.ids, batch.segments, batch.is_real)
        expected = model(batch.ids, batch.is_real.long()).last_hidden_state
    assert (states - expected)[batch.is_real].abs().max() <= 1e-5


@IMPLEMENTATIONS
def test_gradients_equal_transformers(implementation):
    encoder, batch, model = ours(SMALL), make_batch(), theirs(SMALL, implementation)
    model.load_state_dict(export.encoder_to_transformers(encoder.settings, encoder.state_dict()))
    weights = torch.randn(SMALL.hidden, generator=torch.Generator().manual_seed(0))
    (encoder(batch.ids, batch.segments, batch.is_real) @ weights)[batch.is_real].sum().backward()
    expected = model(batch.ids, batch.is_real.long()).last_hidden_state
    (expected @ weights)[batch.is_real].sum().backward()
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    renamed = export.encoder_to_transformers(SMALL, gradients)
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max().item()
        assert (renamed[name] - parameter.grad).abs().max().item() <= 1e-5 * max(1.0, scale), name


def their_token_logits(encoder, head, batch):
    config = export.config_json(encoder.settings, VOCABULARY, SPECIAL, "ModernBertForMaskedLM")
    config = transformers.ModernBertConfig(**{k: v for k, v in config.items() if k != "model_type"})
    model = transformers.ModernBertForMaskedLM(config).eval()
    missing = model.load_state_dict(network_tensors(encoder, head, "ModernBertForMaskedLM"), strict=False)
    assert missing.missing_keys == ["decoder.weight"] and not missing.unexpected_keys
    model.tie_weights()
    with torch.no_grad():
        return model(batch.ids, batch.is_real.long()).logits


@pytest.mark.parametrize("settings", [SMALL, TIED], ids=["words as wide as layers", "tied to narrower words"])
def test_token_logits_equal_modernbert_for_masked_lm(settings):
    encoder, head, batch = ours(settings), noisy(build_token_head(settings, VOCABULARY)), make_batch()
    with torch.no_grad():
        logits = head(encoder(batch.ids, batch.segments, batch.is_real), encoder)
    expected = their_token_logits(encoder, head, batch)
    assert (logits - expected)[batch.is_real].abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("sharing", ["none", "tied", "gdes", "all"])
def test_a_generator_with_a_tied_head_is_modernbert_however_it_shares(sharing):
    """Also where likelihoods come without logits."""
    scale = {"width": 1.0, "depth": 1.0} if sharing == "all" else {"width": 0.5, "depth": 0.4}
    objective = build(ElectraSettings(), inputs_for(VOCABULARY, TIED, GeneratorSettings(sharing=sharing, **scale)))
    encoder, head, _ = noisy(objective).networks()["generator"]
    assert (encoder.settings.hidden != TIED.hidden) == (sharing != "all")
    assert encoder.settings.embedding != encoder.settings.hidden
    batch, positions = make_batch(), torch.tensor([[1, 2, 7]] * 6)
    targets = batch.ids.gather(1, positions)
    noise = torch.rand(targets.numel(), 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        generator = objective.corruptor.generator
        logits = generator(batch, positions)
        filled = generator.fill(batch, positions, targets, noise, 1.0, False)
    expected = gather_rows(their_token_logits(encoder, head, batch), positions)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    likelihood = expected.log_softmax(2).gather(2, targets[:, :, None]).flatten()
    assert (filled.log_likelihood - likelihood).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["two_tower", "autoregressive"])
def test_generators_that_score_every_position_have_a_tied_head_too(kind):
    generator = GeneratorSettings(kind=kind, width=0.5)
    objective = noisy(build(ElectricSettings(), inputs_for(VOCABULARY, TIED, generator)))
    objective(make_batch()).total.backward()
    tower = objective.corruptor.generator.left if kind == "two_tower" else objective.corruptor.generator.encoder
    assert tower.project.weight.grad.abs().max() > 0
    assert objective.corruptor.generator.head.dense.out_features == 16


@pytest.mark.parametrize("settings", [SMALL, PROJECTED], ids=["not projected", "projected"])
def test_under_autocast_the_residual_stream_is_float32_and_as_exact_as_transformers(settings):
    encoder, batch = ours(settings), make_batch()
    model = theirs(settings)
    model.load_state_dict(export.encoder_to_transformers(settings, encoder.state_dict()))
    kinds = []
    for layer in encoder.layers:
        layer.register_forward_hook(lambda layer, given, result: kinds.extend((given[0].dtype, result.dtype)))

    def error(network, *given):
        with torch.no_grad():
            exact = network(*given)
            with torch.autocast("cpu", torch.bfloat16):
                rounded = network(*given)
        return (rounded - exact)[batch.is_real].square().mean().sqrt().item()

    ours_error = error(encoder, batch.ids, batch.segments, batch.is_real)
    assert kinds == [torch.float32] * 4 * settings.layers
    theirs_error = error(lambda *given: model(*given).last_hidden_state, batch.ids, batch.is_real.long())
    assert 0 < ours_error < 1.5 * theirs_error


def test_a_float64_encoder_is_float64_throughout():
    """Finite differences find any rounding on the way."""
    settings = SMALL.model_copy(update={"layers": 2, "hidden": 8, "embedding": 4, "intermediate": 6, "global_every": 2})
    encoder = noisy(encoder_alone(settings, 12)).double()
    ids = torch.tensor([[2, 9, 8, 7, 6, 5, 11, 3]])

    def states(words):
        tensors = {"embeddings.words.weight": words}
        return torch.func.functional_call(encoder, tensors, (ids, torch.zeros_like(ids), None))

    assert torch.autograd.gradcheck(states, encoder.embeddings.words.weight.detach().clone().requires_grad_())
    cos, sin = rotation(torch.tensor([1_000_000]), 8, 100.0, torch.float64)
    angles = 1e6 / 100.0 ** (np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos[0, 0, :4].numpy(), np.cos(angles), atol=1e-9)
    np.testing.assert_allclose(sin[0, 0, 4:].numpy(), np.sin(angles), atol=1e-9)


def test_rows_beyond_its_positions_are_read_as_transformers_reads_them():
    encoder, model = ours(SMALL), theirs(SMALL)
    model.load_state_dict(export.encoder_to_transformers(SMALL, encoder.state_dict()))
    batch = make_batch(length=3 * SMALL.positions)
    with torch.no_grad():
        states = encoder(batch.ids, batch.segments, batch.is_real)
        expected = model(batch.ids, batch.is_real.long()).last_hidden_state
    assert (states - expected)[batch.is_real].abs().max() <= 1e-5
    assert readable_length(SMALL, 120) == 120 and readable_length(TINY, 120) == TINY.positions == 40


def test_layers_count_from_the_first_or_from_the_last():
    def whole(**more):
        settings = ModernEncoderSettings(**more)
        return [layer for layer in range(settings.layers) if not settings.is_local(layer)]

    assert whole() == [0, 3, 6, 9]
    assert whole(global_from="last") == [2, 5, 8, 11]
    assert whole(layers=13) == whole(layers=13, global_from="last") == [0, 3, 6, 9, 12]
    assert whole(layers=2, global_from="last") == [1]


def test_every_pattern_of_layers_is_read_back_from_the_config():
    for layers, every, start in product(range(1, 8), range(1, 6), ("first", "last")):
        settings = SMALL.model_copy(update={"layers": layers, "global_every": every, "global_from": start})
        again = export.settings_from_config(export.config_json(settings, VOCABULARY, SPECIAL, "ModernBertModel"))
        assert compatibility_settings(again) == compatibility_settings(settings)
        assert [*map(again.is_local, range(layers))] == [*map(settings.is_local, range(layers))]


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("layers", [3, 4], ids=["the last layer is local", "the last layer is global"])
def test_the_first_vector_alone_is_the_first_of_all(padded, layers):
    encoder, batch = ours(SMALL.model_copy(update={"layers": layers})), make_batch(padded=padded)
    given = batch.ids, batch.segments, batch.is_real if padded else None
    with torch.no_grad():
        whole, first = encoder(*given), encoder(*given, True)
    assert first.shape == (6, 1, SMALL.hidden)
    torch.testing.assert_close(first, whole[:, :1], atol=1e-6, rtol=1e-6)


def test_detection_logits_equal_modernbert_for_token_classification():
    encoder, head, batch = ours(PROJECTED), noisy(ModernDetectionHead(PROJECTED)), make_batch()
    config = export.config_json(PROJECTED, VOCABULARY, SPECIAL, "ModernBertForTokenClassification")
    config = transformers.ModernBertConfig(**{k: v for k, v in config.items() if k != "model_type"})
    model = transformers.ModernBertForTokenClassification(config).eval()
    model.load_state_dict(network_tensors(encoder, head, "ModernBertForTokenClassification"))
    with torch.no_grad():
        logits = head(encoder(batch.ids, batch.segments, batch.is_real))
        expected = model(batch.ids, batch.is_real.long()).logits
    assert not expected[..., 0].any()
    assert (logits - expected[..., 1])[batch.is_real].abs().max() <= 1e-5


def test_every_token_sees_something_in_a_local_layer():
    batch = make_batch()
    mask = nearby_mask(batch.is_real[:, None, None, :], 24, 2, torch.device("cpu"))
    assert mask.any(-1).all()
    row = mask[5, 0]  # 14 real tokens
    assert row[12].nonzero().flatten().tolist() == [10, 11, 12, 13]
    assert row[20].nonzero().flatten().tolist() == [20]


def test_positions_are_relative():
    """The product of a rotated query and a rotated key depends on how far apart they are, not on where."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=generator)

    def score(first: int, second: int) -> float:
        q = rotate(query, rotation(torch.tensor([first]), 8, 100.0))
        k = rotate(key, rotation(torch.tensor([second]), 8, 100.0))
        return (q * k).sum().item()

    assert score(3, 7) == pytest.approx(score(23, 27), abs=1e-5)
    assert score(3, 7) != pytest.approx(score(3, 8), abs=1e-3)


def test_a_layer_that_is_local_sees_no_further_than_its_window():
    settings = SMALL.model_copy(update={"layers": 2, "global_every": 2})
    layer, length, reach = ours(settings).layers[1], 24, 4
    assert layer.is_local
    x = torch.randn(1, length, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    by = rotation(torch.arange(length), 16, 100.0)

    layer(x, by, nearby_mask(None, length, reach, x.device))[0, 10].sum().backward()
    touched = x.grad[0].abs().sum(1).nonzero().flatten().tolist()
    assert touched == list(range(6, 15))


def test_initial_weights_depend_on_the_seed_and_on_nothing_else():
    def weights(seed: int) -> torch.Tensor:
        torch.rand(3)
        encoder = encoder_alone(PROJECTED, VOCABULARY)
        initialise(encoder, PROJECTED, seed)
        return torch.cat([parameter.flatten() for parameter in encoder.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_what_is_added_up_starts_smaller_the_more_layers_there_are():
    settings = ModernEncoderSettings(layers=8, embedding=64)
    encoder = encoder_alone(settings, 500)
    initialise(encoder, settings, seed=0)
    inward, outward = encoder.layers[3].expand.weight, encoder.layers[3].contract.weight
    # cut at two deviations, a normal distribution has 0.88 of its deviation
    assert inward.std().item() == pytest.approx(0.02 * 0.88, rel=0.03)
    assert outward.std().item() == pytest.approx(0.02 * 0.88 / 4, rel=0.03)
    words = encoder.project(encoder.embeddings.words.weight)
    assert words.square().mean().item() > 10 * 1e-5  # the norm's epsilon does not swallow them


@pytest.mark.parametrize("width", [0.1, 0.25, 0.3, 1 / 3, 0.77, 1.0])
def test_scaled_sizes_are_valid_at_every_width(width):
    settings = ModernEncoderSettings(hidden=264, heads=6).scaled(width, 0.5)
    assert ModernEncoderSettings(**settings.model_dump()) == settings
    assert settings.layers == 6 and settings.embedding == 256
    assert settings.hidden == pytest.approx(264 * width, abs=settings.heads)


def test_a_head_of_an_odd_number_of_units_is_refused():
    with pytest.raises(ValueError, match=r"hidden \(30\) must be an even multiple of heads \(2\)"):
        ModernEncoderSettings(hidden=30, heads=2)


def test_an_odd_window_is_refused():
    with pytest.raises(ValueError, match=r"window \(7\) must be an even number: half of it lies on either side"):
        ModernEncoderSettings(window=7)


def test_dropout_is_off_in_evaluation_and_on_in_training():
    settings = SMALL.model_copy(update={"dropout": 0.3, "attention_dropout": 0.3})
    encoder, batch = ours(settings), make_batch()
    with torch.no_grad():
        still = [encoder(batch.ids, batch.segments, batch.is_real) for _ in range(2)]
        encoder.train()
        moving = [encoder(batch.ids, batch.segments, batch.is_real) for _ in range(2)]
    assert torch.equal(*still)
    assert not torch.equal(*moving)
