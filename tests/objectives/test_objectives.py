"""Every objective: its whole loss against numpy in float64, and who learns from what."""

import numpy as np
import pytest
import reference
import torch

from conftest import SPECIAL, TINY, inputs_for, make_batch
from electra.base.randomness import uniform
from electra.model.generators import GeneratorSettings
from electra.objectives import build as build_objective
from electra.objectives.adversarial import AdversarialSettings
from electra.objectives.corruption import MaskingSettings, SamplingSettings
from electra.objectives.electra import ElectraSettings
from electra.objectives.electric import ElectricSettings
from electra.objectives.masked_lm import MaskedLMSettings
from electra.objectives.metrics import summarise
from electra.objectives.replaced_span import ReplacedSpanSettings
from electra.objectives.selection import SelectionSettings
from electra.objectives.token_recovery import TokenRecoverySettings

VOCABULARY = 150
QUIET = TINY.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0})
HALF = GeneratorSettings(width=0.5, depth=0.5)
TOWERS = HALF.model_copy(update={"kind": "two_tower"})
LEFT = HALF.model_copy(update={"kind": "autoregressive"})
SPANS = MaskingSettings(unit="span", span_stop=0.4, span_limit=4, share=0.3)


def build(settings, generator=HALF, masking=None, sampling=None, encoder=QUIET):
    objective = build_objective(settings, inputs_for(VOCABULARY, encoder, generator, masking, sampling))
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():  # a fresh network samples almost uniformly: larger weights make every part matter
        for parameter in objective.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=draws))
    return objective


class Numpy:
    """The main network's side of an objective, from its weights alone."""

    def __init__(self, objective):
        self.w = {name: t.detach().double().numpy() for name, t in objective.state_dict().items()}
        self.objective = objective

    def hidden(self, batch, ids=None, network="discriminator"):
        ids = (batch.ids if ids is None else ids).numpy()
        return reference.encode(
            self.w,
            network,
            f"{network}.embeddings",
            QUIET.layers,
            QUIET.heads,
            ids,
            batch.segments.numpy(),
            batch.is_real.numpy(),
        )

    @property
    def table(self):
        return self.w["discriminator.embeddings.words.weight"]


def pieces(corrupted):
    """(row, slot, position) of every chosen token."""
    positions, used = corrupted.chosen.positions.numpy(), corrupted.chosen.used.numpy()
    return [(row, slot, positions[row, slot]) for row, slot in zip(*used.nonzero(), strict=True)]


def bce(logit, label):
    p = reference.sigmoid(logit)
    return -np.log(p if label else 1 - p)


def nll(logits, token):
    return -np.log(reference.softmax(logits)[token])


def test_masked_lm_equals_numpy():
    objective = build(MaskedLMSettings()).double()
    batch = make_batch(vocabulary=VOCABULARY)
    loss = objective(batch)
    length = batch.ids.shape[1]
    noise = {
        name: uniform(batch.seed, name, batch.samples, width).numpy()
        for name, width in (("choose", length), ("mask", round(0.15 * length)))
    }
    masked, chosen = batch.ids.clone(), []
    for row in range(len(batch.ids)):
        can = [t for t in range(length) if batch.is_real[row, t] and batch.ids[row, t] not in (2, 3, 4)]
        wanted = max(1, round(0.15 * batch.is_real[row].sum().item()))
        for slot, t in enumerate(sorted(can, key=lambda t, r=row: -noise["choose"][r, t])[:wanted]):
            chosen.append((row, t))
            if noise["mask"][row, slot] < 0.85:
                masked[row, t] = SPECIAL.mask
    side = Numpy(objective)
    hidden = side.hidden(batch, masked, "encoder")
    logits = reference.token_logits(side.w, "token_head", side.w["encoder.embeddings.words.weight"], hidden)
    expected = np.mean([nll(logits[row, t], batch.ids[row, t]) for row, t in chosen])
    assert loss.total.item() == pytest.approx(expected, abs=1e-10)


def test_berts_random_words_take_the_place_of_some_tokens_that_stay():
    masking = MaskingSettings(mask_token_share=0.8)
    batch = make_batch(rows=600, length=40, vocabulary=VOCABULARY, padded=False)
    seen = []
    for share in (0.0, 0.1):
        objective = build(MaskedLMSettings(random_share=share), masking=masking)
        objective.encoder.forward = lambda ids, *rest: seen.append(ids) or torch.zeros(*ids.shape, QUIET.hidden)
        objective(batch)
    chosen = 600 * 6
    for ids, random in zip(seen, (0, 0.1), strict=True):
        masks, other = (ids == SPECIAL.mask), (ids != batch.ids) & (ids != SPECIAL.mask)
        assert masks.sum().item() / chosen == pytest.approx(0.8, abs=0.02)
        assert other.sum().item() / chosen == pytest.approx(random, abs=0.02)


def test_electra_15_percent_equals_numpy():
    objective = build(ElectraSettings(loss_at="chosen", generator_weight=2.0, detection_weight=7.0)).double()
    batch = make_batch(vocabulary=VOCABULARY)
    loss, corrupted = objective(batch), objective.corruptor(batch)
    side = Numpy(objective)
    logits = reference.detection_logits(side.w, "detection_head", side.hidden(batch, corrupted.batch.ids))
    rtd = np.mean([bce(logits[row, t], corrupted.is_replaced[row, t]) for row, _, t in pieces(corrupted)])
    assert loss.total.item() == pytest.approx(2 * corrupted.generated.mlm_loss.item() + 7 * rtd, abs=1e-10)
    assert loss.sums["real"] == batch.is_real.sum()  # metrics are over all tokens, to compare with other objectives
    expected = np.mean(
        [bce(logits[at], corrupted.is_replaced[at]) for at in zip(*batch.is_real.numpy().nonzero(), strict=True)]
    )
    assert summarise(loss.sums, objective.extra_metrics)["rtd_loss"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("predict", ["chosen", "all", "corrective"])
def test_token_recovery_equals_numpy(predict):
    objective = build(TokenRecoverySettings(predict=predict, copy_weight=3.0, recovery_weight=2.0)).double()
    batch = make_batch(vocabulary=VOCABULARY)
    loss, corrupted = objective(batch), objective.corruptor(batch)
    side = Numpy(objective)
    hidden = side.hidden(batch, corrupted.batch.ids)
    named = reference.token_logits(side.w, "token_head", side.table, hidden)
    expected = corrupted.generated.mlm_loss.item()

    def copied(replaced, row, t):
        copy = 1 - reference.sigmoid(replaced[row, t])
        same = corrupted.batch.ids[row, t] == batch.ids[row, t]
        return -np.log(copy * same.item() + (1 - copy) * reference.softmax(named[row, t])[batch.ids[row, t]])

    real = list(zip(*batch.is_real.numpy().nonzero(), strict=True))
    if predict == "chosen":
        expected += 2 * np.mean([nll(named[row, t], batch.ids[row, t]) for row, _, t in pieces(corrupted)])
    else:
        replaced = reference.detection_logits(side.w, "detection_head", hidden)
        if predict == "all":
            expected += 2 * np.mean([copied(replaced, row, t) for row, t in real])
        else:
            expected += 3 * np.mean([bce(replaced[at], corrupted.is_replaced[at]) for at in real])
            expected += 2 * np.mean([copied(replaced, row, t) for row, _, t in pieces(corrupted)])
    assert loss.total.item() == pytest.approx(expected, abs=1e-10)


def test_electric_equals_numpy_proposal_and_all():
    objective = build(ElectricSettings(), TOWERS).double()
    batch = make_batch(vocabulary=VOCABULARY)
    loss, corrupted = objective(batch), objective.corruptor(batch)
    side, small = Numpy(objective), objective.corruptor.generator.left.settings
    arrays = batch.ids.numpy(), batch.segments.numpy(), batch.is_real.numpy()
    towers = {
        direction: reference.encode(
            side.w,
            f"corruptor.generator.{direction}",
            "discriminator.embeddings",
            small.layers,
            small.heads,
            *arrays,
            direction,
        )
        for direction in ("left", "right")
    }
    nothing = np.zeros_like(towers["left"][:, :1])
    before = np.concatenate([nothing, towers["left"][:, :-1]], 1)
    right = towers["right"] * arrays[2][:, :, None]  # behind the last token of a row stands nothing
    after = np.concatenate([right[:, 1:], nothing], 1)
    both = np.concatenate([before, after], 2)
    q = reference.token_logits(side.w, "corruptor.generator.head", side.table, both)

    real = list(zip(*batch.is_real.numpy().nonzero(), strict=True))
    maskable = [at for at in real if batch.ids[at] not in (2, 3, 4)]
    mlm = np.mean([nll(q[at], batch.ids[at]) for at in maskable])
    energies = reference.detection_logits(side.w, "detection_head", side.hidden(batch, corrupted.batch.ids))
    noise = {(row, t) for row, _, t in pieces(corrupted)}
    prior = np.log(0.15 / 0.85)
    nce = np.mean([bce(energies[at] - nll(q[at], corrupted.batch.ids[at]) + prior, at in noise) for at in real])
    assert corrupted.generated.mlm_loss.item() == pytest.approx(mlm, abs=1e-10)
    assert loss.total.item() == pytest.approx(mlm + 50 * nce, abs=1e-9)
    flagged = sum(energies[at] - nll(q[at], corrupted.batch.ids[at]) + prior > 0 for at in real)
    assert loss.sums["flagged"] == flagged


def test_for_electric_a_sample_that_equals_the_original_is_noise_all_the_same():
    objective, batch = (build(ElectricSettings(), TOWERS), make_batch(rows=2000, vocabulary=VOCABULARY, padded=False))
    corrupted = objective.corruptor(batch)
    correct = corrupted.chosen.used.sum() - corrupted.is_replaced.sum()
    assert correct > 0
    assert objective(batch).sums["replaced"] == corrupted.chosen.used.sum()


def test_adversarial_equals_numpy():
    sampling = SamplingSettings(temperature=1.3)
    objective = build(AdversarialSettings(likelihood_weight=0.5), sampling=sampling).double()
    batch = make_batch(vocabulary=VOCABULARY)
    loss, corrupted = objective(batch), objective.corruptor(batch)
    side = Numpy(objective)
    logits = reference.detection_logits(side.w, "detection_head", side.hidden(batch, corrupted.batch.ids))
    states = objective.corruptor.generator.states(corrupted.masked, corrupted.chosen.positions).detach().numpy()
    guesses = states @ side.w["baseline.weight"][0] + side.w["baseline.bias"][0]
    policy, fit = [], []
    for row, slot, t in pieces(corrupted):
        reward = bce(logits[row, t], corrupted.is_replaced[row, t])
        log_p = -nll(
            corrupted.generated.logits[row, slot].detach().numpy() / 1.3, corrupted.generated.sampled[row, slot]
        )
        baseline = -np.log(reference.sigmoid(guesses[row, slot]))
        policy.append(-(reward - baseline) * log_p)
        right = np.exp(-reward)
        fit.append(right * bce(guesses[row, slot], True) + (1 - right) * bce(guesses[row, slot], False))
    real = zip(*batch.is_real.numpy().nonzero(), strict=True)
    rtd = np.mean([bce(logits[at], corrupted.is_replaced[at]) for at in real])
    expected = 50 * rtd + np.mean(policy) + np.mean(fit) + 0.5 * corrupted.generated.mlm_loss.item()
    assert loss.total.item() == pytest.approx(expected, abs=1e-9)


def test_the_baseline_reads_the_states_that_the_samples_came_from():
    """With dropout a second pass would give other ones."""
    objective = build(AdversarialSettings(), encoder=TINY).train()
    batch, generator = make_batch(vocabulary=VOCABULARY), objective.corruptor.generator
    corrupted = objective.corruptor(batch)
    assert torch.equal(generator.logits(corrupted.generated.states), corrupted.generated.logits)
    assert not torch.equal(generator(corrupted.masked, corrupted.chosen.positions), corrupted.generated.logits)
    encoded = []
    generator.encoder.register_forward_hook(lambda *_: encoded.append(1))
    objective(batch)
    assert len(encoded) == 1


def test_selection_equals_numpy():
    objective = build(SelectionSettings(candidates=4, selection_weight=2.0)).double()
    batch = make_batch(vocabulary=VOCABULARY)
    loss, corrupted = objective(batch), objective.corruptor(batch)
    candidates = objective.candidates(batch, corrupted)
    side = Numpy(objective)
    hidden = side.hidden(batch, corrupted.batch.ids)
    w = side.w | {"selection_head.bias": 0.0}
    picks = []
    for row, slot, t in pieces(corrupted):
        scores = reference.token_logits(w, "selection_head", side.table[candidates[row, slot]], hidden[row, t])
        picks.append(nll(scores, 0))
        assert candidates[row, slot, 0] == batch.ids[row, t]
        assert (candidates[row, slot, 1:] != batch.ids[row, t]).all()
    logits = reference.detection_logits(side.w, "detection_head", hidden)
    real = zip(*batch.is_real.numpy().nonzero(), strict=True)
    rtd = np.mean([bce(logits[at], corrupted.is_replaced[at]) for at in real])
    expected = corrupted.generated.mlm_loss.item() + 50 * rtd + 2 * np.mean(picks)
    assert loss.total.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("generator", [HALF, LEFT], ids=["masked", "autoregressive"])
def test_replaced_span_detection_equals_numpy(generator):
    objective = build(ReplacedSpanSettings(), generator, SPANS).double()
    batch = make_batch(vocabulary=VOCABULARY)
    loss, corrupted = objective(batch), objective.corruptor(batch)
    side = Numpy(objective)
    hidden = side.hidden(batch, corrupted.batch.ids)
    logits = reference.detection_logits(side.w, "detection_head", hidden)
    real = list(zip(*batch.is_real.numpy().nonzero(), strict=True))
    rtd = np.mean([bce(logits[at], corrupted.is_replaced[at]) for at in real])
    spans = {}
    for row, t in real:
        if batch.ids[row, t] not in (2, 3, 4):
            spans.setdefault((row, corrupted.chosen.group[row, t].item()), []).append(t)
    answers = []
    for (row, _), places in spans.items():
        assert places == list(range(places[0], places[-1] + 1)) and len(places) <= 4
        ends = np.concatenate([hidden[row, places[0]], hidden[row, places[-1]]])
        replaced = corrupted.is_replaced[row, places].any().item()
        answers.append(bce(reference.detection_logits(side.w, "span_head", ends), replaced))
    expected = corrupted.generated.mlm_loss.item() + 50 * rtd + 10 * np.mean(answers)
    assert loss.total.item() == pytest.approx(expected, abs=1e-9)
    assert loss.sums["spans"] == len(spans)


def learners(objective, batch=None):
    objective.zero_grad()
    objective(batch if batch is not None else make_batch(vocabulary=VOCABULARY)).total.backward()
    return {name for name, p in objective.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}


def touches(names, *prefixes):
    return any(name.startswith(prefixes) for name in names)


GENERATOR = ("corruptor.generator.encoder.layers", "corruptor.generator.head", "corruptor.generator.left.layers")
UNSHARED = HALF.model_copy(update={"sharing": "none"})


each_objective = pytest.mark.parametrize(
    ("settings", "generator", "masking"),
    [
        (ElectraSettings(), HALF, None),
        (ElectraSettings(loss_at="chosen"), HALF, None),
        (MaskedLMSettings(), HALF, None),
        (TokenRecoverySettings(predict="chosen"), HALF, None),
        (TokenRecoverySettings(predict="all"), HALF, None),
        (TokenRecoverySettings(predict="corrective"), HALF, None),
        (ElectricSettings(), TOWERS, None),
        (AdversarialSettings(), HALF, None),
        (SelectionSettings(), HALF, None),
        (ReplacedSpanSettings(), LEFT, SPANS),
    ],
    ids=lambda it: getattr(it, "kind", None),
)


@each_objective
def test_metrics_hold_on_to_no_graph(settings, generator, masking):
    loss = build(settings, generator, masking)(make_batch(vocabulary=VOCABULARY))
    assert loss.total.requires_grad
    assert not [name for name, value in loss.sums.items() if value.requires_grad]


def assert_finite(objective, batch, dtype):
    objective.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        total = objective(batch).total
    total.backward()
    assert total.isfinite()
    gradients = [parameter.grad for parameter in objective.parameters() if parameter.grad is not None]
    assert torch.nn.utils.get_total_norm(gradients).isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_objective
def test_loss_and_gradients_are_finite_in_the_worst_case(settings, generator, masking, dtype):
    """A variance of exactly zero in each norm in turn, whose gradient then grows by 1/sqrt(eps); nothing to choose in any
    row; logits and attention scores so large that every probability is 0 or 1."""
    objective, batch = build(settings, generator, masking), make_batch(vocabulary=VOCABULARY)
    for norm in [part for part in objective.modules() if isinstance(part, torch.nn.LayerNorm)]:
        hook = norm.register_forward_pre_hook(lambda _, inputs: (inputs[0] - inputs[0].detach(),))
        assert_finite(objective, batch, dtype)
        hook.remove()
    assert_finite(objective, batch.with_ids(torch.full_like(batch.ids, SPECIAL.sep)), dtype)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.mul_(30)
    assert_finite(objective, batch, dtype)


@pytest.mark.parametrize(
    ("settings", "generator", "masking"),
    [
        (ElectraSettings(generator_weight=0), UNSHARED, None),
        (ElectraSettings(generator_weight=0, loss_at="chosen"), UNSHARED, None),
        (TokenRecoverySettings(generator_weight=0, predict="chosen"), UNSHARED, None),
        (TokenRecoverySettings(generator_weight=0, predict="all"), UNSHARED, None),
        (TokenRecoverySettings(generator_weight=0, predict="corrective"), UNSHARED, None),
        (ElectricSettings(generator_weight=0), TOWERS.model_copy(update={"sharing": "none"}), None),
        (SelectionSettings(generator_weight=0), UNSHARED, None),
        (ReplacedSpanSettings(generator_weight=0), LEFT.model_copy(update={"sharing": "none"}), SPANS),
        (AdversarialSettings(generator_weight=0), UNSHARED, None),
    ],
    ids=lambda it: getattr(it, "kind", None),
)
def test_nothing_flows_from_the_main_network_into_the_generator(settings, generator, masking):
    names = learners(build(settings, generator, masking))
    assert touches(names, "discriminator.layers")
    assert not touches(names, "corruptor")


def test_the_adversarial_generator_learns_from_its_reward_and_the_baseline_pulls_at_nothing():
    objective = build(AdversarialSettings(detection_weight=0), UNSHARED)
    names = learners(objective)
    assert touches(names, *GENERATOR) and touches(names, "baseline")
    assert not touches(names, "discriminator", "detection_head")
    objective = build(AdversarialSettings(detection_weight=0, generator_weight=0), UNSHARED)
    assert learners(objective) == {"baseline.weight", "baseline.bias"}


def test_the_generators_likelihood_never_reaches_the_main_network():
    for settings in (
        ElectraSettings(detection_weight=0),
        TokenRecoverySettings(recovery_weight=0, copy_weight=0, predict="corrective"),
        SelectionSettings(detection_weight=0, selection_weight=0),
    ):
        names = learners(build(settings, UNSHARED))
        assert touches(names, *GENERATOR) and not touches(names, "discriminator", "detection_head", "token_head")


def test_correcting_teaches_nothing_about_when_to_copy():
    objective = build(TokenRecoverySettings(predict="corrective", copy_weight=0), UNSHARED)
    names = learners(objective)
    assert touches(names, "token_head", "discriminator.layers") and not touches(names, "detection_head")


def test_naming_every_token_teaches_when_to_copy():
    names = learners(build(TokenRecoverySettings(predict="all"), UNSHARED))
    assert touches(names, "detection_head") and touches(names, "token_head")


@pytest.mark.parametrize("settings", [ElectraSettings(), SelectionSettings()], ids=lambda it: it.kind)
def test_a_disentangled_discriminator_reads_the_generators_words_and_never_pulls_at_them(settings):
    gdes = HALF.model_copy(update={"sharing": "gdes"})
    only_main = settings.model_copy(update={"generator_weight": 0.0})
    objective = build(only_main, gdes)
    words = objective.corruptor.generator.encoder.embeddings.words.weight
    assert torch.equal(objective.discriminator.embeddings.table, words + objective.discriminator.embeddings.delta)
    names = learners(objective)
    assert "discriminator.embeddings.delta" in names and not touches(names, "corruptor")
    fresh = build_objective(settings, inputs_for(VOCABULARY, QUIET, gdes))
    assert fresh.discriminator.embeddings.delta.abs().sum() == 0


@pytest.mark.parametrize("predict", ["chosen", "all"])
def test_the_recovery_loss_of_unequal_parts_is_that_of_the_whole(predict):
    """Like every metric it is a mean over tokens, not over parts: padded rows make the parts unequal."""
    objective = build(TokenRecoverySettings(predict=predict))
    batch = make_batch(vocabulary=VOCABULARY)
    whole = summarise(objective(batch).sums, objective.extra_metrics)["recovery_loss"]
    sums = [objective(part).sums for part in batch.split(3)]
    added = {name: sum(part[name] for part in sums) for name in sums[0]}
    assert summarise(added, objective.extra_metrics)["recovery_loss"] == pytest.approx(whole, rel=1e-5)
