"""What each generator may look at, what it draws from, and what is chosen for it to replace."""

import numpy as np
import pytest
import torch
from scipy import stats

from conftest import SPECIAL, TINY, inputs_for, make_batch
from electra.base.batch import Batch
from electra.base.randomness import uniform
from electra.model.generators import GeneratorSettings, build_pair
from electra.model.modern import ModernEncoderSettings
from electra.objectives import build as build_objective
from electra.objectives.corruption import MaskingSettings, SamplingSettings, choose, mark, sample, span_starts
from electra.objectives.electra import ElectraSettings
from electra.objectives.metrics import summarise

VOCABULARY = 150
QUIET = TINY.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})
MODERN = ModernEncoderSettings(
    layers=4, hidden=32, heads=2, intermediate=48, embedding=16, positions=40, window=6, global_every=2
)
ENCODERS = pytest.mark.parametrize("encoder", [QUIET, MODERN], ids=["electra", "modernbert"])


def build(kind, encoder=QUIET):
    settings = GeneratorSettings(kind=kind, width=0.5, depth=0.5)
    return build_objective(ElectraSettings(), inputs_for(VOCABULARY, encoder, settings))


@ENCODERS
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("kind", "sees_left", "sees_right"), [("two_tower", 1, 1), ("autoregressive", 1, 0)])
def test_generators_that_read_the_text_never_see_the_token_they_predict(kind, sees_left, sees_right, padded, encoder):
    objective = build(kind, encoder).double().eval()
    batch = make_batch(vocabulary=VOCABULARY, padded=padded)
    places = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
    before = objective.corruptor.generator(batch, places)
    assert torch.isfinite(before).all()
    for t in (3, 6):
        ids = batch.ids.clone()
        ids[:, t] = (ids[:, t] + 7) % (VOCABULARY - 5) + 5
        after = objective.corruptor.generator(batch.with_ids(ids), places)
        changed = (after - before).abs().amax(2).gt(1e-9)[0]
        assert not changed[t]
        assert changed[t + 1] == bool(sees_left) and changed[t - 1] == bool(sees_right)


@ENCODERS
def test_padding_changes_nothing_for_one_sided_networks(encoder):
    objective = build("two_tower", encoder).double().eval()
    batch = make_batch(vocabulary=VOCABULARY)
    places = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
    whole = objective.corruptor.generator(batch, places)
    row, real = 3, int(batch.is_real[3].sum())
    other = batch.ids.clone()
    other[row, real:] = 9  # other padding tokens
    again = objective.corruptor.generator(batch.with_ids(other), places)
    torch.testing.assert_close(whole[row, :real], again[row, :real], atol=1e-12, rtol=0)
    rows = (tensor[row : row + 1, :real] for tensor in (batch.ids, batch.segments, batch.is_real))
    alone = objective.corruptor.generator(Batch.of_rows(*rows), places[:1, :real])
    torch.testing.assert_close(whole[row, :real], alone[0], atol=1e-12, rtol=0)


def test_uniform_and_unigram_draw_what_their_names_say():
    batch = make_batch(rows=3000, length=40, vocabulary=VOCABULARY, padded=False)
    counts = 1.0 + torch.arange(VOCABULARY) % 17
    for kind, weights in (("uniform", torch.ones(VOCABULARY)), ("unigram", counts + 1)):
        corrupted = build(kind).corruptor(batch)
        drawn = np.bincount(corrupted.generated.sampled[corrupted.chosen.used].numpy(), minlength=VOCABULARY)
        expected = (weights / weights.sum() * drawn.sum()).numpy().astype(float)
        assert stats.chisquare(drawn, expected * drawn.sum() / expected.sum()).pvalue > 1e-4


def test_a_generator_that_does_not_learn_has_no_gradient_no_dropout_and_no_part_in_the_loss():
    for kind in ("frozen", "uniform", "unigram"):
        settings = GeneratorSettings(kind=kind, width=0.5, sharing="none")
        objective = build_objective(ElectraSettings(), inputs_for(VOCABULARY, TINY, settings)).train()
        batch = make_batch(vocabulary=VOCABULARY)
        torch.manual_seed(0)
        loss = objective(batch)
        loss.total.backward()
        assert all(p.grad is None for p in objective.corruptor.parameters())
        metrics = summarise(loss.sums, objective.extra_metrics)
        assert loss.total.item() == pytest.approx(50 * metrics["rtd_loss"], rel=1e-5)
        first, second = (objective.corruptor(batch).generated.mlm_loss.item() for _ in range(2))
        assert first == second  # dropout would make them differ


@ENCODERS
def test_disentangled_sharing_keeps_the_towers_words_apart_from_the_discriminators(encoder):
    discriminator, generator = build_pair(
        encoder, GeneratorSettings(kind="two_tower", sharing="gdes"), VOCABULARY, torch.zeros(VOCABULARY)
    )
    assert generator.left.embeddings is generator.right.embeddings
    names = {name for name, _ in discriminator.named_parameters() if "embeddings" in name}
    assert "embeddings.delta" in names and "embeddings.words.weight" not in names


def test_a_disentangled_modernbert_reads_the_generators_words_and_never_pulls_at_them():
    objective = build_objective(
        ElectraSettings(generator_weight=0),
        inputs_for(VOCABULARY, MODERN, GeneratorSettings(width=0.5, sharing="gdes")),
    )
    table = objective.corruptor.generator.encoder.embeddings.table
    assert torch.equal(objective.discriminator.embeddings.table, table)
    objective(make_batch(vocabulary=VOCABULARY)).total.backward()
    assert table.grad is None or not table.grad.any()
    assert objective.discriminator.embeddings.delta.grad.any()


@pytest.mark.parametrize(("sharing", "width"), [("none", 0.5), ("tied", 0.5), ("all", 1.0)])
def test_a_modernbert_pair_shares_what_it_is_told_to(sharing, width):
    settings = GeneratorSettings(width=width, sharing=sharing)
    discriminator, generator = build_pair(MODERN, settings, VOCABULARY, torch.zeros(VOCABULARY))
    assert (generator.encoder is discriminator) == (sharing == "all")
    assert (generator.encoder.embeddings is discriminator.embeddings) == (sharing != "none")
    assert generator.encoder.settings.kind == "modernbert"


def test_greedy_takes_the_most_likely_and_top_k_one_of_the_k_most_likely():
    logits = torch.randn(500, 40, generator=torch.Generator().manual_seed(1))
    noise = uniform(0, "sample", torch.arange(500), 2)
    targets = logits.argmax(1)
    assert torch.equal(sample(logits, noise, SamplingSettings(greedy=True), 1.0, targets), targets)
    ranks = lambda drawn: (logits > logits.gather(1, drawn[:, None])).sum(1)  # noqa: E731
    drawn = ranks(sample(logits, noise, SamplingSettings(top_k=3), 1.0, targets))
    assert set(drawn.tolist()) == {0, 1, 2}
    both = SamplingSettings(top_k=3, disallow_correct=True)
    assert set(ranks(sample(logits, noise, both, 1.0, targets)).tolist()) == {1, 2, 3}


def chosen_groups(batch, settings):
    made = inputs_for(VOCABULARY)
    chosen = choose(batch, settings, SPECIAL, made.continues)
    return chosen, mark(chosen), made.continues


def test_whole_words_are_chosen_whole():
    batch = make_batch(rows=300, length=40, vocabulary=VOCABULARY, padded=False)
    chosen, marked, continues = chosen_groups(batch, MaskingSettings(unit="word", share=0.3))
    special = torch.isin(batch.ids, torch.tensor([SPECIAL.cls, SPECIAL.sep, SPECIAL.mask]))
    goes_on = continues[batch.ids] & ~special & ~special.roll(1, 1)
    joints = goes_on[:, 1:]
    assert joints.float().mean() > 0.2
    budget = round(0.3 * 40)
    first_cut = chosen.used.sum(1) == budget  # only a first word that is too long is cut, and it fills the budget
    unequal = (marked[:, 1:] != marked[:, :-1]) & joints
    assert not unequal[~first_cut].any()
    assert not (marked & special).any()
    share = marked.float().mean().item()
    assert 0.25 < share <= 0.3
    words = MaskingSettings(unit="word", share=0.3)
    again, *_ = chosen_groups(batch, words)
    assert torch.equal(again.positions, chosen.positions)


def test_span_lengths_follow_the_geometric_distribution():
    noise = uniform(3, "span", torch.arange(4000), 64)
    starts = span_starts(noise, 0.4, 4)
    assert starts[:, 0].all()
    lengths = []
    for row in starts.numpy():
        begins = np.flatnonzero(row)
        lengths += list(np.diff(begins))  # the last span of a row is cut off and left out
    counts = np.bincount(lengths, minlength=5)[1:]
    wanted = np.array([0.4, 0.24, 0.144, 0.216])
    assert len(counts) == 4
    # Spans that end before the row does are a little shorter than all spans are: a few parts in a hundred.
    np.testing.assert_allclose(counts / counts.sum(), wanted, atol=0.02)
    assert span_starts(noise, 1.0, 4).all()


def test_spans_are_chosen_whole_and_stop_at_special_tokens():
    batch = make_batch(rows=300, length=40, vocabulary=VOCABULARY, padded=False)
    chosen, marked, _ = chosen_groups(batch, MaskingSettings(unit="span", span_stop=0.3, span_limit=5, share=0.3))
    for row in range(300):
        for group in chosen.group[row, marked[row]].unique():
            members = chosen.group[row] == group
            assert marked[row, members].all()
            assert members.sum() <= 5
    special = torch.isin(batch.ids, torch.tensor([SPECIAL.cls, SPECIAL.sep, SPECIAL.mask]))
    assert not (marked & special).any()


def test_an_autoregressive_span_is_written_from_left_to_right():
    """The second token of a span must depend on the first one drawn, not on the one that stood there."""
    masking = MaskingSettings(unit="span", span_stop=0.3, span_limit=4, share=0.3)
    objective = build_objective(
        ElectraSettings(), inputs_for(VOCABULARY, QUIET, GeneratorSettings(kind="autoregressive"), masking)
    )
    calls = []

    def echo(batch, positions):
        """Predicts, with certainty, the token after the one before: x_{t-1} + 1."""
        calls.append(batch.ids)
        wanted = (batch.ids.gather(1, (positions - 1).clamp(min=0)) + 1) % VOCABULARY
        return 200.0 * torch.nn.functional.one_hot(wanted, VOCABULARY).float()

    objective.corruptor.generator.forward = echo
    batch = make_batch(rows=200, length=40, vocabulary=VOCABULARY, padded=False)
    corrupted = objective.corruptor(batch)
    marked, ids, group = mark(corrupted.chosen), corrupted.batch.ids, corrupted.chosen.group
    inside = marked[:, 1:] & marked[:, :-1] & (group[:, 1:] == group[:, :-1])
    assert inside.sum() > 100
    assert torch.equal(ids[:, 1:][inside], (ids[:, :-1][inside] + 1) % VOCABULARY)
    assert len(calls) == 1 + 4  # one pass to learn from, one for each token of the longest span
