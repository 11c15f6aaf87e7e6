"""The encoder against transformers' own classes, with random weights, padding and segments, both ways."""

import pytest
import torch

from conftest import SPECIAL, TINY, VOCABULARY, make_batch, noisy
from electra.interop import formats
from electra.interop.formats import network_tensors
from electra.model import build_embeddings, build_encoder, encode, initialise
from electra.model.electra import ElectraEmbeddings, ElectraEncoder, ElectraEncoderSettings
from electra.model.heads import ElectraDetectionHead, TokenHead
from electra.model.modern import ModernEncoderSettings

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

MODERN = ModernEncoderSettings(
    layers=4, hidden=32, heads=2, intermediate=48, embedding=16, positions=40, window=6, global_every=2
)
SAME_WIDTH = TINY.model_copy(update={"embedding": TINY.hidden})


def hf_config(settings: ElectraEncoderSettings, kind: formats.NetworkKind) -> "transformers.ElectraConfig":
    config = formats.config_json(settings, VOCABULARY, SPECIAL, kind)
    return transformers.ElectraConfig(**{key: value for key, value in config.items() if key != "model_type"})


def our_encoder(settings: ElectraEncoderSettings) -> ElectraEncoder:
    encoder = ElectraEncoder(settings, ElectraEmbeddings(settings, VOCABULARY))
    initialise(encoder, settings, seed=1)
    return noisy(encoder)


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor, where: torch.Tensor) -> float:
    return (ours - theirs)[where].abs().max().item()


@pytest.mark.parametrize("settings", [TINY, SAME_WIDTH], ids=["projected", "same width"])
def test_our_weights_in_transformers_give_the_same_states(settings):
    encoder, batch = our_encoder(settings), make_batch()
    theirs = transformers.ElectraModel(hf_config(settings, "discriminator")).eval()
    theirs.load_state_dict(formats.encoder_to_transformers(encoder.settings, encoder.state_dict()))
    with torch.no_grad():
        ours = encoder(batch.ids, batch.segments, batch.is_real)
        expected = theirs(batch.ids, batch.is_real.long(), batch.segments).last_hidden_state
    assert largest_difference(ours, expected, batch.is_real) <= 1e-5


@pytest.mark.parametrize("settings", [TINY, SAME_WIDTH], ids=["projected", "same width"])
def test_transformers_weights_here_give_the_same_states(settings):
    theirs = noisy(transformers.ElectraModel(hf_config(settings, "discriminator")))
    encoder, batch = ElectraEncoder(settings, ElectraEmbeddings(settings, VOCABULARY)).eval(), make_batch()
    encoder.load_state_dict(formats.encoder_from_transformers(encoder.settings, theirs.state_dict()))
    with torch.no_grad():
        ours = encoder(batch.ids, batch.segments, batch.is_real)
        expected = theirs(batch.ids, batch.is_real.long(), batch.segments).last_hidden_state
    assert largest_difference(ours, expected, batch.is_real) <= 1e-5


def test_detection_logits_equal_electra_for_pre_training():
    encoder, head, batch = our_encoder(TINY), noisy(ElectraDetectionHead(TINY)), make_batch()
    theirs = transformers.ElectraForPreTraining(hf_config(TINY, "discriminator")).eval()
    theirs.load_state_dict(network_tensors(encoder, head, "ElectraForPreTraining"))
    with torch.no_grad():
        ours = head(encoder(batch.ids, batch.segments, batch.is_real))
        expected = theirs(batch.ids, batch.is_real.long(), batch.segments).logits
    assert largest_difference(ours, expected, batch.is_real) <= 1e-5


def test_token_logits_equal_electra_for_masked_lm():
    encoder, head, batch = (our_encoder(TINY), noisy(TokenHead(TINY.hidden, TINY.embedding, VOCABULARY)), make_batch())
    theirs = transformers.ElectraForMaskedLM(hf_config(TINY, "generator")).eval()
    missing = theirs.load_state_dict(network_tensors(encoder, head, "ElectraForMaskedLM"), strict=False)
    assert missing.missing_keys == ["generator_lm_head.weight"] and not missing.unexpected_keys
    theirs.tie_weights()
    with torch.no_grad():
        ours = head(encoder(batch.ids, batch.segments, batch.is_real), encoder)
        expected = theirs(batch.ids, batch.is_real.long(), batch.segments).logits
    assert largest_difference(ours, expected, batch.is_real) <= 1e-5


def test_gradients_equal_transformers():
    encoder, batch = our_encoder(TINY), make_batch()
    theirs = transformers.ElectraModel(hf_config(TINY, "discriminator")).eval()
    theirs.load_state_dict(formats.encoder_to_transformers(encoder.settings, encoder.state_dict()))
    weights = torch.randn(TINY.hidden, generator=torch.Generator().manual_seed(0))
    (encoder(batch.ids, batch.segments, batch.is_real) @ weights)[batch.is_real].sum().backward()
    (theirs(batch.ids, batch.is_real.long(), batch.segments).last_hidden_state @ weights)[
        batch.is_real
    ].sum().backward()
    ours = formats.encoder_to_transformers(encoder.settings, {name: p.grad for name, p in encoder.named_parameters()})
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=2e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_constants_are_those_of_the_released_models():
    ours, theirs = hf_config(TINY, "discriminator"), transformers.ElectraConfig()
    for name in ("layer_norm_eps", "hidden_act", "type_vocab_size", "initializer_range", "hidden_dropout_prob"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_padding_does_not_change_real_tokens():
    encoder, batch = our_encoder(TINY), make_batch(rows=1, padded=False)
    longer = torch.nn.functional.pad(batch.ids, (0, 6))
    real = torch.nn.functional.pad(batch.is_real, (0, 6))
    with torch.no_grad():
        alone = encoder(batch.ids, batch.segments, None)
        padded = encoder(longer, torch.nn.functional.pad(batch.segments, (0, 6)), real)
    torch.testing.assert_close(padded[:, :-6], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("direction", ["both", "left", "right"])
@pytest.mark.parametrize("settings", [TINY, MODERN], ids=["electra", "modernbert"])
def test_a_processor_that_learns_nothing_computes_no_padding(settings, direction):
    encoder, batch = build_encoder(settings, build_embeddings(settings, VOCABULARY), direction), make_batch()
    encoder, tokens = noisy(encoder).double().eval(), []
    for layer in encoder.layers:
        layer.expand.register_forward_hook(lambda module, given, out: tokens.append(given[0][..., 0].numel()))
    whole = encode(encoder, batch)
    with torch.no_grad():
        unpadded = encode(encoder, batch)
    all_of_them, real = batch.ids.numel(), int(batch.is_real.sum())
    assert tokens == [all_of_them] * settings.layers + [real] * (settings.layers - 1) + [all_of_them]
    torch.testing.assert_close(unpadded[batch.is_real], whole[batch.is_real], atol=1e-12, rtol=0)


def test_initial_weights_depend_on_the_seed_and_on_nothing_else():
    def weights(seed: int) -> torch.Tensor:
        torch.rand(3)
        encoder = ElectraEncoder(TINY, ElectraEmbeddings(TINY, VOCABULARY))
        initialise(encoder, TINY, seed)
        return torch.cat([parameter.flatten() for parameter in encoder.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_the_original_initialisation_uses_glorot_for_the_projection_and_cuts_the_normal_elsewhere():
    settings = ElectraEncoderSettings(layers=1)
    encoder = ElectraEncoder(settings, ElectraEmbeddings(settings, 2000))
    initialise(encoder, settings, seed=0)
    assert encoder.project.weight.std().item() == pytest.approx(0.072, abs=0.002)  # electra-facts: 128 -> 256
    assert encoder.layers[0].expand.weight.abs().max().item() <= 0.04
    assert encoder.embeddings.words.weight.std().item() == pytest.approx(0.02 * 0.88, abs=0.001)


@pytest.mark.parametrize(
    ("full", "width", "small"),
    [
        (ElectraEncoderSettings(), 0.25, (64, 256, 1, 12)),
        (ElectraEncoderSettings(hidden=768, heads=12, intermediate=3072, embedding=768), 1 / 3, (256, 1024, 4, 12)),
        (
            ElectraEncoderSettings(layers=24, hidden=1024, heads=16, intermediate=4096, embedding=1024),
            0.25,
            (256, 1024, 4, 24),
        ),
    ],
    ids=["small", "base", "large"],
)
def test_generator_sizes_are_the_papers(full, width, small):
    scaled = full.scaled(width, 1.0)
    assert (scaled.hidden, scaled.intermediate, scaled.heads, scaled.layers) == small
    assert scaled.embedding == full.embedding
