"""Every loss against the formula of its paper, in numpy and float64."""

import numpy as np
import pytest
import torch
from reference import sigmoid, softmax

from electra.objectives import losses

ROWS, VOCABULARY = (3, 7), 11


@pytest.fixture
def draws():
    rng = np.random.default_rng(3)
    return {
        "logits": 2 * rng.normal(size=(*ROWS, VOCABULARY)),
        "scores": 2 * rng.normal(size=ROWS),
        "log_q": -np.abs(rng.normal(size=ROWS)),
        "tokens": rng.integers(0, VOCABULARY, ROWS),
        "others": rng.integers(0, 3, ROWS),
        "flags": rng.random(ROWS) < 0.4,
        "where": rng.random(ROWS) < 0.7,
    }


def tensors(draws, *names):
    return [torch.from_numpy(draws[name]) for name in names]


def by_position(draws):
    for place in np.ndindex(ROWS):
        if draws["where"][place]:
            yield place


def test_masked_lm(draws):
    nll = [-np.log(softmax(draws["logits"][at])[draws["tokens"][at]]) for at in by_position(draws)]
    found = losses.masked_lm_loss(*tensors(draws, "logits", "tokens", "where"))
    assert found.item() == pytest.approx(np.mean(nll), abs=1e-10)


def test_detection(draws):
    p = sigmoid(draws["scores"])
    expected = [-np.log(p[at] if draws["flags"][at] else 1 - p[at]) for at in by_position(draws)]
    found = losses.detection_loss(*tensors(draws, "scores", "flags", "where"))
    assert found.item() == pytest.approx(np.mean(expected), abs=1e-10)


def test_copying(draws):
    draws["tokens"] %= 3  # so that input and original agree at some positions and differ at others
    expected = []
    for at in by_position(draws):
        copy = 1 - sigmoid(draws["scores"][at])
        named = softmax(draws["logits"][at])[draws["tokens"][at]]
        same = draws["others"][at] == draws["tokens"][at]
        expected.append(-np.log(copy * same + (1 - copy) * named))
    found = losses.copying_loss(*tensors(draws, "logits", "scores", "others", "tokens", "where"))
    assert found.item() == pytest.approx(np.mean(expected), abs=1e-10)
    agree = (draws["others"] == draws["tokens"])[draws["where"]]
    assert agree.any() and not agree.all()


@pytest.mark.parametrize("share", [0.15, 0.4])
def test_noise_contrast(draws, share):
    """P(noise) = k q / (k q + (1 - k) exp(-E)), written as probabilities instead of logits."""
    expected = []
    for at in by_position(draws):
        noise = share * np.exp(draws["log_q"][at])
        data = (1 - share) * np.exp(-draws["scores"][at])
        p = noise / (noise + data)
        expected.append(-np.log(p if draws["flags"][at] else 1 - p))
    logits = losses.noise_logits(*tensors(draws, "scores", "log_q"), share)
    found = losses.detection_loss(logits, *tensors(draws, "flags", "where"))
    assert found.item() == pytest.approx(np.mean(expected), abs=1e-10)


def test_policy_and_its_baseline(draws):
    reward, baseline = np.abs(draws["scores"]), np.abs(draws["log_q"])
    log_p = draws["log_q"]
    expected = [-(reward[at] - baseline[at]) * log_p[at] for at in by_position(draws)]
    found = losses.policy_loss(*map(torch.from_numpy, (log_p, reward, baseline, draws["where"])))
    assert found.item() == pytest.approx(np.mean(expected), abs=1e-10)

    right = np.exp(-reward)
    guess = sigmoid(draws["scores"])
    expected = [-right[at] * np.log(guess[at]) - (1 - right[at]) * np.log(1 - guess[at]) for at in by_position(draws)]
    found = losses.baseline_loss(*map(torch.from_numpy, (draws["scores"], reward, draws["where"])))
    assert found.item() == pytest.approx(np.mean(expected), abs=1e-10)


def test_the_policy_gradient_is_that_of_the_expected_reward():
    """Over a vocabulary of four the expectation can be written out: its gradient is what the samples' must average to."""
    logits = torch.tensor([0.3, -0.5, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    reward = torch.tensor([0.2, 1.5, 0.7, 2.0], dtype=torch.float64)
    (exact,) = torch.autograd.grad(-(logits.softmax(0) * reward).sum(), logits)
    found = torch.zeros(4, dtype=torch.float64)
    for token, probability in enumerate(logits.detach().softmax(0)):
        log_p = logits.log_softmax(0)[token][None]
        loss = losses.policy_loss(log_p, reward[token][None], torch.tensor([0.9]).double(), torch.tensor([True]))
        found += probability * torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(found, exact, atol=1e-12, rtol=0)


def test_nothing_flows_through_rewards_baselines_and_the_proposal(draws):
    log_p, reward, baseline = (torch.from_numpy(np.abs(draws["log_q"])).requires_grad_() for _ in range(3))
    where, flags = tensors(draws, "where", "flags")
    losses.policy_loss(log_p, reward, baseline, where).backward()
    assert log_p.grad is not None and reward.grad is None and baseline.grad is None
    guess = torch.from_numpy(draws["scores"]).requires_grad_()
    losses.baseline_loss(guess, reward, where).backward()
    assert guess.grad is not None and reward.grad is None
    energy, log_q = (torch.from_numpy(draws["scores"].copy()).requires_grad_() for _ in range(2))
    losses.detection_loss(losses.noise_logits(energy, log_q, 0.15), flags, where).backward()
    assert energy.grad is not None and log_q.grad is None


def test_selection(draws):
    expected = [-np.log(softmax(draws["logits"][at])[0]) for at in by_position(draws)]
    found = losses.selection_loss(*tensors(draws, "logits", "where"))
    assert found.item() == pytest.approx(np.mean(expected), abs=1e-10)


def test_half_precision_is_widened_before_every_loss(draws):
    logits = torch.from_numpy(draws["logits"]).bfloat16()
    tokens, where, flags = tensors(draws, "tokens", "where", "flags")
    assert losses.masked_lm_loss(logits, tokens, where).dtype == torch.float32
    assert losses.detection_loss(logits[..., 0], flags, where).dtype == torch.float32
    assert losses.selection_loss(logits, where).dtype == torch.float32


def test_nothing_to_learn_from_is_a_loss_of_zero(draws):
    logits, tokens = tensors(draws, "logits", "tokens")
    assert losses.masked_lm_loss(logits, tokens, torch.zeros(ROWS, dtype=torch.bool)).item() == 0
