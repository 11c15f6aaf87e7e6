"""The ModernBERT encoder against transformers' own classes, padded and packed; the kernel against the reference."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from conftest import SPECIAL, VOCABULARY, make_batch
from electra.base.batch import Batch
from electra.interop import formats as export
from electra.interop.formats import network_tensors
from electra.model import packed
from electra.model.modern import (
    Embeddings,
    ModernBert,
    ModernBertSettings,
    initialise,
    rotate,
    rotation,
)
from electra.model.modern_heads import DetectionHead, TokenHead

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

SMALL = ModernBertSettings(
    layers=5, hidden=32, heads=2, intermediate=48, embedding=32, positions=40, window=8, global_every=3
)
PROJECTED = SMALL.model_copy(update={"embedding": 12})

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
    ],
    ids=[
        "local and global",
        "projected",
        "all global",
        "other window, other angles",
        "all but the ends",
        "beyond the row",
    ],
)


def noisy(module: torch.nn.Module) -> torch.nn.Module:
    """Every weight random, norms too: ones hide mistakes."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def ours(settings: ModernBertSettings) -> ModernBert:
    encoder = ModernBert(settings, Embeddings(settings, VOCABULARY))
    initialise(encoder, settings, seed=1)
    return noisy(encoder)


def theirs(settings: ModernBertSettings, implementation: str = "sdpa") -> "transformers.ModernBertModel":
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
    encoder, batch = ModernBert(SMALL, Embeddings(SMALL, VOCABULARY)).eval(), make_batch()
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


def test_token_logits_equal_modernbert_for_masked_lm():
    encoder, head, batch = ours(SMALL), noisy(TokenHead(SMALL, VOCABULARY)), make_batch()
    config = export.config_json(SMALL, VOCABULARY, SPECIAL, "ModernBertForMaskedLM")
    config = transformers.ModernBertConfig(**{k: v for k, v in config.items() if k != "model_type"})
    model = transformers.ModernBertForMaskedLM(config).eval()
    missing = model.load_state_dict(network_tensors(encoder, head, "ModernBertForMaskedLM"), strict=False)
    assert missing.missing_keys == ["decoder.weight"] and not missing.unexpected_keys
    model.tie_weights()
    with torch.no_grad():
        hidden = encoder(batch.ids, batch.segments, batch.is_real)
        logits = head(hidden, encoder.embeddings.words.weight)
        expected = model(batch.ids, batch.is_real.long()).logits
    assert (logits - expected)[batch.is_real].abs().max() <= 1e-5


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
    encoder, head, batch = ours(PROJECTED), noisy(DetectionHead(PROJECTED)), make_batch()
    config = export.config_json(PROJECTED, VOCABULARY, SPECIAL, "ModernBertForTokenClassification")
    config = transformers.ModernBertConfig(**{k: v for k, v in config.items() if k != "model_type"})
    model = transformers.ModernBertForTokenClassification(config).eval()
    model.load_state_dict(network_tensors(encoder, head, "ModernBertForTokenClassification"))
    with torch.no_grad():
        logits = head(encoder(batch.ids, batch.segments, batch.is_real))
        expected = model(batch.ids, batch.is_real.long()).logits.squeeze(-1)
    assert (logits - expected)[batch.is_real].abs().max() <= 1e-5


def pack(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, int]:
    lengths = batch.is_real.sum(1)
    starts = functional.pad(lengths.cumsum(0), (1, 0))
    return batch.ids[batch.is_real], starts, int(lengths.max())


@SETTINGS
def test_packed_rows_equal_padded_rows_in_states_and_gradients(settings):
    encoder, batch = ours(settings), make_batch()
    padded = encoder(batch.ids, batch.segments, batch.is_real)[batch.is_real]
    ids, starts, longest = pack(batch)
    rows = encoder.encode_packed(ids, starts, longest)
    torch.testing.assert_close(rows, padded, atol=1e-5, rtol=1e-5)
    weights = torch.randn(settings.hidden, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad((rows @ weights).sum(), list(encoder.parameters()))
    expected = torch.autograd.grad((padded @ weights).sum(), list(encoder.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_packed_rows_do_not_see_each_other():
    encoder, batch = ours(SMALL), make_batch()
    ids, starts, longest = pack(batch)
    other = ids.clone()
    other[: starts[1]] = 7
    with torch.no_grad():
        before, after = (encoder.encode_packed(x, starts, longest) for x in (ids, other))
    assert torch.equal(before[starts[1] :], after[starts[1] :])
    assert not torch.allclose(before[: starts[1]], after[: starts[1]])


def kernel_in_plain_torch(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1)):
    """What torch documents of its variable-length kernel, with one big mask."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q >= max(end - start for start, end in pairwise(cu_seq_q.tolist()))
    places = torch.arange(len(query))
    row = torch.bucketize(places, cu_seq_q, right=True)
    distance = places[None, :] - places[:, None]
    seen = row[:, None] == row[None, :]
    left, right = window_size
    seen &= (distance >= -left) if left >= 0 else True
    seen &= (distance <= right) if right >= 0 else True
    parts = (part.transpose(0, 1) for part in (query, key, value))
    return functional.scaled_dot_product_attention(*parts, attn_mask=seen).transpose(0, 1)


def test_the_kernel_is_asked_for_what_the_reference_does(monkeypatch):
    monkeypatch.setattr(packed, "varlen_attn", kernel_in_plain_torch)
    encoder, batch = ours(SMALL), make_batch()
    with torch.no_grad():
        expected = encoder.encode_packed(*pack(batch))
        monkeypatch.setattr("electra.model.modern.has_varlen", lambda *_: True)
        monkeypatch.setattr("electra.model.modern.mix_row_by_row", None)
        found = encoder.encode_packed(*pack(batch))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_positions_start_anew_in_every_packed_row(monkeypatch):
    """Angles are relative, so that going on would give the same numbers, until float32 runs out of digits."""
    asked = []
    honest = rotation
    monkeypatch.setattr(
        "electra.model.modern.rotation",
        lambda places, *more: asked.append(places) or honest(places, *more),
    )
    encoder, batch = ours(SMALL), make_batch()
    encoder.encode_packed(*pack(batch))
    assert asked[0].tolist() == [place for row in batch.is_real for place in range(int(row.sum()))]


def test_a_kernel_without_dropout_is_not_used_where_there_is_dropout(monkeypatch):
    monkeypatch.setattr("electra.model.modern.has_varlen", lambda *_: True)
    monkeypatch.setattr("electra.model.modern.mix_varlen", None)
    encoder = ours(SMALL.model_copy(update={"attention_dropout": 0.1})).train()
    assert encoder.encode_packed(*pack(make_batch())).isfinite().all()


def test_every_token_sees_something_in_a_local_layer():
    batch = make_batch()
    mask = packed.nearby_mask(batch.is_real[:, None, None, :], 24, 2, torch.device("cpu"))
    assert mask.any(-1).all()
    row = mask[5, 0]  # 14 real tokens
    assert row[12].nonzero().flatten().tolist() == [10, 11, 12, 13]
    assert row[20].nonzero().flatten().tolist() == [20]


def test_the_kernel_is_for_gpus_and_half_precision_and_windows_where_torch_has_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu, half = torch.device("cuda"), torch.bfloat16
    assert packed.has_varlen(gpu, half, windowed=True) == packed.KERNEL_HAS_WINDOWS
    assert packed.has_varlen(gpu, half, windowed=False)
    assert not packed.has_varlen(torch.device("cpu"), half, windowed=False)
    assert not packed.has_varlen(gpu, torch.float32, windowed=False)
    monkeypatch.setattr(packed, "KERNEL_HAS_WINDOWS", False)
    assert not packed.has_varlen(gpu, half, windowed=True) and packed.has_varlen(gpu, half, windowed=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert not packed.has_varlen(gpu, half, windowed=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("reach", [-1, 4])
def test_the_kernel_on_the_gpu_equals_the_reference(reach):
    if not packed.has_varlen(torch.device("cuda"), torch.bfloat16, windowed=reach >= 0):
        pytest.skip("this torch or this GPU has no such kernel")
    starts = torch.tensor([0, 17, 18, 64, 100], device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    parts = torch.randn(3, 100, 2, 32, device="cuda", generator=generator).bfloat16()
    one, other = (parts.clone().requires_grad_() for _ in range(2))
    found = packed.mix_varlen(*one, starts, 46, reach)
    expected = packed.mix_row_by_row(*other.float(), starts.tolist(), reach, 0.0)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
    found.float().square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(one.grad.float(), other.grad.float(), atol=6e-2, rtol=6e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packed_bfloat16_on_the_gpu_is_near_padded_float32():
    encoder, batch = ours(SMALL).cuda(), make_batch().to("cuda")
    with torch.no_grad():
        expected = encoder(batch.ids, batch.segments, batch.is_real)[batch.is_real]
        with torch.autocast("cuda", torch.bfloat16):
            found = encoder.encode_packed(*pack(batch))
    assert functional.cosine_similarity(found.float(), expected, dim=-1).min() > 0.999


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

    def mix(q, k, v, is_local):
        return packed.mix_row_by_row(q[0], k[0], v[0], [0, length], reach if is_local else -1, 0.0)[None]

    layer(x, by, mix)[0, 10].sum().backward()
    touched = x.grad[0].abs().sum(1).nonzero().flatten().tolist()
    assert touched == list(range(6, 15))


def test_initial_weights_depend_on_the_seed_and_on_nothing_else():
    def weights(seed: int) -> torch.Tensor:
        torch.rand(3)
        encoder = ModernBert(PROJECTED, Embeddings(PROJECTED, VOCABULARY))
        initialise(encoder, PROJECTED, seed)
        return torch.cat([parameter.flatten() for parameter in encoder.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_what_is_added_up_starts_smaller_the_more_layers_there_are():
    settings = ModernBertSettings(layers=8, embedding=64)
    encoder = ModernBert(settings, Embeddings(settings, 500))
    initialise(encoder, settings, seed=0)
    inward, outward = encoder.layers[3].expand.weight, encoder.layers[3].contract.weight
    # cut at two deviations, a normal distribution has 0.88 of its deviation
    assert inward.std().item() == pytest.approx(0.02 * 0.88, rel=0.03)
    assert outward.std().item() == pytest.approx(0.02 * 0.88 / 4, rel=0.03)
    words = encoder.project(encoder.embeddings.words.weight)
    assert words.square().mean().item() > 10 * 1e-5  # the norm's epsilon does not swallow them


@pytest.mark.parametrize("width", [0.1, 0.25, 0.3, 1 / 3, 0.77, 1.0])
def test_scaled_sizes_are_valid_at_every_width(width):
    settings = ModernBertSettings(hidden=264, heads=6).scaled(width, 0.5)
    assert ModernBertSettings(**settings.model_dump()) == settings
    assert settings.layers == 6 and settings.embedding == 256
    assert settings.hidden == pytest.approx(264 * width, abs=settings.heads)


def test_a_head_of_an_odd_number_of_units_is_refused():
    with pytest.raises(ValueError, match=r"hidden \(30\) must be an even multiple of heads \(2\)"):
        ModernBertSettings(hidden=30, heads=2)


def test_an_odd_window_is_refused():
    with pytest.raises(
        ValueError, match=r"window \(7\) must be an even number: half of it is on either side"
    ):
        ModernBertSettings(window=7)


def test_dropout_is_off_in_evaluation_and_on_in_training():
    settings = SMALL.model_copy(update={"dropout": 0.3, "attention_dropout": 0.3})
    encoder, batch = ours(settings), make_batch()
    with torch.no_grad():
        still = [encoder(batch.ids, batch.segments, batch.is_real) for _ in range(2)]
        encoder.train()
        packed_rows = [encoder.encode_packed(*pack(batch)) for _ in range(2)]
        moving = [encoder(batch.ids, batch.segments, batch.is_real) for _ in range(2)]
    assert torch.equal(*still)
    assert not torch.equal(*moving) and not torch.equal(*packed_rows)
