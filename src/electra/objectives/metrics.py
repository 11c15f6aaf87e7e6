"""Metrics that tell the truth about replaced token detection, and alarms in plain words.

A step returns only sums and counts, so they can be added up over steps, micro-batches and processes, and read later.
The area under the ROC curve comes from two histograms of the logits (bins of 0.02): exact except for ties within a bin.
"""

import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from electra.objectives.losses import Loss, Sums, count, detection_loss

Metrics = dict[str, float]
Counts = NDArray[np.int64]


class Ratio(NamedTuple):
    """A metric that is one of `Loss.sums` divided by another, both by name."""

    name: str
    numerator: str
    denominator: str


RATIOS = (
    Ratio("mlm_loss", "mlm_loss", "chosen"),
    Ratio("mlm_accuracy", "mlm_correct", "chosen"),
    Ratio("sampled_accuracy", "sampled_correct", "chosen"),
    Ratio("rtd_loss", "rtd_loss", "real"),
    Ratio("replaced_share", "replaced", "real"),
    Ratio("precision", "caught", "flagged"),
    Ratio("recall", "caught", "replaced"),
    Ratio("flagged_share", "flagged", "real"),
)

# Metrics of the generator: they say nothing about a discriminator that is tested on another network's replacements.
OF_GENERATOR = ("mlm_loss", "mlm_accuracy", "mlm_baseline", "sampled_accuracy", "sampled_variety", "target_variety")

# Names of alarms, for objectives that mute one.
ONE_CLASS = "one class"
GENERATOR_STALLS = "generator stands still"
DEGENERATE_SAMPLING = "degenerate sampling"
NEITHER_LEARNS = "neither learns"
ONE_SCORE = "one score"
FORGETS = "generator forgets"
BY_HEART = "learns by heart"

BINS = 1200
PATIENCE, PART = 500, 100  # steps
LOGIT_LIMIT = 12.0
WARM = 1.1  # sampling temperature above which AUCs do not compare: one was 0.80 at 1.5 and 0.64 at 1
LEAST_VARIANCE = 1e-3  # of energies within a batch; trained networks have 0.1 and more


def histogram(values: Int[Tensor, "*shape"], where: Bool[Tensor, "*shape"], size: int) -> Int[Tensor, "{size}"]:
    """How often each of 0 … size-1 occurs at `where`. Integer adds give the same bits in any order."""
    counts = torch.zeros(size, dtype=torch.long, device=values.device)
    return counts.scatter_add(0, values.flatten(), where.flatten().long())


def generator_sums(
    is_best: Bool[Tensor, "batch count"], used: Bool[Tensor, "batch count"], loss: Float[Tensor, ""]
) -> Sums:
    """The sums of the generator's metrics. `is_best`: the target is the most likely token."""
    return {"chosen": used.sum(), "mlm_loss": loss.detach() * count(used), "mlm_correct": (is_best & used).sum()}


def detection(
    logits: Float[Tensor, "batch seq"], is_replaced: Bool[Tensor, "batch seq"], is_real: Bool[Tensor, "batch seq"]
) -> Loss:
    """L_Disc with the sums of its metrics."""
    loss = detection_loss(logits, is_replaced, is_real)
    bins = ((logits.detach().float() + LOGIT_LIMIT) * (BINS / (2 * LOGIT_LIMIT))).long().clamp(0, BINS - 1)
    caught = logits.detach() > 0
    sums = {
        "real": is_real.sum(),
        "rtd_loss": loss.detach() * count(is_real),
        "replaced": is_replaced.sum(),
        "flagged": (caught & is_real).sum(),
        "caught": (caught & is_replaced).sum(),
        "replaced_scores": histogram(bins, is_replaced, BINS),
        "original_scores": histogram(bins, is_real & ~is_replaced, BINS),
    }
    return Loss(loss, sums)


def summarise(sums: Mapping[str, Tensor], extra: Sequence[Ratio] = ()) -> Metrics:
    """Metrics from added-up sums, including the `extra` ones of an objective. A ratio whose denominator is zero is nan,
    never a flattering 0 or 1."""
    value = {name: total.item() for name, total in sums.items() if total.ndim == 0}
    counts = {name: total.cpu().numpy() for name, total in sums.items() if total.ndim == 1}
    metrics = {name: ratio(value[above], value[below]) for name, above, below in (*RATIOS, *extra) if above in value}
    for name in ("sampled", "target"):
        if f"{name}_counts" in counts:
            metrics[f"{name}_variety"] = effective_number(counts[f"{name}_counts"])
    if "target_counts" in counts:
        metrics["mlm_baseline"] = ratio(float(counts["target_counts"].max()), float(counts["target_counts"].sum()))
    if "real" in value:
        wrong = value["flagged"] - value["caught"] + value["replaced"] - value["caught"]
        metrics |= {
            "rtd_accuracy": 1 - ratio(wrong, value["real"]),
            "majority_baseline": max(metrics["replaced_share"], 1 - metrics["replaced_share"]),
            "auc": area_under_curve(counts["replaced_scores"], counts["original_scores"]),
        }
    return metrics


def ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def effective_number(counts: Counts) -> float:
    """exp(entropy): the number of equally frequent tokens that would be as varied."""
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return float(np.exp(-(shares * np.log(shares)).sum()))


def area_under_curve(positives: Counts, negatives: Counts) -> float:
    """P(score of a replaced token > score of an original one), ties counted half."""
    below = np.cumsum(negatives) - negatives
    pairs = float(positives.sum()) * float(negatives.sum())
    return ratio(float((positives * (below + negatives / 2)).sum()), pairs)


class Watch:
    """The history that alarms look at: training metrics averaged over parts of 100 steps or more, however often they are logged."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Metrics]] = [(0, {})]
        self.lines: list[Mapping[str, float]] = []

    def add(self, step: int, line: Mapping[str, float]) -> None:
        self.lines.append(line)
        if step - self.parts[-1][0] >= PART:
            self.parts.append((step, mean_metrics(self.lines)))
            self.lines = []

    def means(self, steps: float) -> tuple[Metrics, Metrics]:
        """Mean metrics over the last twentieth of a run of `steps` steps, and over as many steps a fifth of the run ago (maybe none)."""
        (before, _), (end, _) = self.parts[-2:]
        width, ends = max(end - before, steps / 20), (end, end - steps / 5)
        now, earlier = ([it for step, it in self.parts if 0 <= last - width < step <= last] for last in ends)
        wanted = sum(step > end - 2 * width - steps / 5 for step, _ in self.parts)
        self.parts = self.parts[-max(2, wanted) :]  # drop what later calls do not need: runs may be long
        return mean_metrics(now), mean_metrics(earlier)


def mean_metrics(lines: Sequence[Mapping[str, float]]) -> Metrics:
    """The mean of each metric over the lines in which it is not nan."""
    keys = {key for line in lines for key in line}
    columns = {key: [line[key] for line in lines if not math.isnan(line.get(key, math.nan))] for key in keys}
    return {key: ratio(sum(values), len(values)) for key, values in columns.items()}


def alarms(watch: Watch, progress: float, muted: Container[str] = (), sounded: Container[str] = ()) -> dict[str, str]:
    """Warnings for known failures, by name, without those already `sounded`. `progress` is the fraction of the run that is done.
    There are none in the first tenth of a run and its first 500 steps: no network has left its plateau by then."""
    step, _ = watch.parts[-1]
    if watch.lines or progress < 0.1 or step < PATIENCE:
        return {}
    now, earlier = watch.means(step / progress)
    warnings: dict[str, str] = {}
    detects_nothing = now.get("auc", 1) < 0.6 and ONE_CLASS not in muted
    if detects_nothing and not 0.001 < now["flagged_share"] < 0.999:
        answer = "original" if now["flagged_share"] < 0.5 else "replaced"
        warnings[ONE_CLASS] = (
            f'the discriminator answers "{answer}" for every token (recall {now["recall"]:.3f}, AUC {now["auc"]:.2f}): '
            "its accuracy is only the majority baseline. Lower optimizer.lr, lengthen schedule.warmup or use a smaller "
            "generator (generator.width)."
        )
    before = earlier.get("mlm_loss", math.nan)
    if progress < 0.8 and now.get("mlm_accuracy", 1) < 0.3 and now["mlm_loss"] > 0.99 * before:
        warnings[GENERATOR_STALLS] = (
            f"the generator has stalled: MLM loss {now['mlm_loss']:.2f}, was {before:.2f} a fifth of the run "
            "earlier. Raise optimizer.lr, use a wider or shallower generator (generator.width, generator.depth) or a "
            "smaller batch."
        )
    if now.get("sampled_variety", 1) < 0.1 * now.get("target_variety", 0):
        warnings[DEGENERATE_SAMPLING] = (
            f"sampling is degenerate: the generator's samples have the variety of {now['sampled_variety']:.0f} "
            f"tokens, the text that of {now['target_variety']:.0f}. Check sampling.temperature; lower optimizer.lr."
        )
    if now.get("energy_variance", 1) < LEAST_VARIANCE:
        warnings[ONE_SCORE] = (
            f"every token has the same score (variance of the energies {now['energy_variance']:.1g}): the network ignores "
            "its text. Lengthen schedule.warmup or lower optimizer.lr, and start a new run."
        )
    if "reward" in now and now["mlm_accuracy"] < now["mlm_baseline"]:  # whatever else is wrong follows from it
        warnings = {
            FORGETS: f"the generator is worse than always guessing the most frequent token (MLM accuracy {now['mlm_accuracy']:.3f}, of "
            f"that guess {now['mlm_baseline']:.3f}): a discriminator that misses most replacements rewards wrong tokens, not "
            "likely ones. Start a new run with objective.likelihood_weight=1."
        }
    warnings = {name: text for name, text in warnings.items() if name not in muted}

    # if both networks fail, the two remedies contradict each other
    both = all(name in warnings or name in sounded for name in (ONE_CLASS, GENERATOR_STALLS))
    if both or (detects_nothing and GENERATOR_STALLS in warnings) or NEITHER_LEARNS in sounded:
        pair = [warnings.pop(name) for name in (ONE_CLASS, GENERATOR_STALLS) if name in warnings]
        if pair:
            warnings[NEITHER_LEARNS] = (
                f"neither network learns: MLM loss {now['mlm_loss']:.2f}, AUC {now['auc']:.2f}. The learning rate is too high "
                "or too low, or the run too short: try short runs with a third and with three times this optimizer.lr "
                "(electra compare varies it), and a longer schedule.warmup."
            )
    return {name: text for name, text in warnings.items() if name not in sounded}


def by_heart(training: Mapping[str, float], heldout: Mapping[str, float]) -> dict[str, str]:
    """An alarm if text that is trained on looks far better than `heldout` text, both at about the same step. A score that falls on held-out
    text says less: a generator that improves makes detection harder. AUCs compare at about the same temperature of sampling."""
    for name, title, sign, far in (("auc", "AUC", 1, 0.1), ("mlm_loss", "MLM loss", -1, 1.0)):
        is_hot = name == "auc" and training.get("temperature", 1) > WARM
        if not is_hot and sign * (training.get(name, math.nan) - heldout.get(name, math.nan)) > far:
            scores = f"{title} {training[name]:.2f} in training, {heldout[name]:.2f} on held-out text"
            return {
                BY_HEART: f"the network learns its text by heart ({scores}). More text will teach it more than more steps."
            }
    return {}
