"""What a run remembers; what its curves show, read from the figures before they are closed."""

import json

import pytest

from electra.inspector.compare import ComparedRun, plot_comparison
from electra.train.log import RunLog, plot_run, plot_scores, read_metrics
from electra.train.trackers import Tracked


@pytest.fixture
def figure(monkeypatch):
    import matplotlib.pyplot as plt

    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    yield lambda: kept.pop()
    monkeypatch.undo()
    plt.close("all")


def test_the_curves_of_a_run_show_learning_rate_and_temperature(tmp_path, figure):
    records = [
        {"kind": "train", "step": n, "seconds": n, "lr": n / 10, "temperature": 2 - n / 10, "auc": 0.5}
        for n in range(10)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plot_run(tmp_path, tmp_path / "curves.png")
    *_, rates, temperatures = figure().axes
    assert list(rates.lines[0].get_ydata()) == [record["lr"] for record in records]
    assert list(temperatures.lines[0].get_ydata()) == [record["temperature"] for record in records]
    assert {text.get_text() for text in rates.get_legend().get_texts()} == {
        "learning rate",
        "sampling temperature (right)",
    }


@pytest.mark.parametrize(("values", "low"), [([0.0, 0.0], -0.01), ([0.91, 0.912], 0.9), ([-0.2, -0.2], -0.3)])
def test_a_flat_score_is_drawn_flat_and_never_on_an_axis_of_negative_scores(values, low, tmp_path, figure):
    curves = {"seed 0": [{"step": step, "f1": value} for step, value in enumerate(values)]}
    plot_scores(curves, {}, {}, "f1", tmp_path / "curves.png")
    bottom, top = figure().axes[0].get_ylim()
    assert bottom >= low and top - bottom > 0.099 and bottom <= min(values) <= max(values) < top


def test_the_curves_of_fine_tuning_show_its_loss_and_its_baselines(tmp_path, figure):
    curves = {f"seed {seed}": [{"step": 5, "accuracy": 0.6}, {"step": 10, "accuracy": 0.7}] for seed in (0, 1)}
    losses = {"seed 0": [(1, 0.7), (10, 0.1)], "seed 1": [(1, 0.8), (10, 0.2)]}
    plot_scores(curves, {"majority": 0.5, "words": 0.65}, losses, "accuracy", tmp_path / "curves.png")
    scores, beside = figure().axes
    across = {line.get_label(): set(line.get_ydata()) for line in scores.lines}
    assert across["majority"] == {0.5} and across["words"] == {0.65} and across["seed 1"] == {0.6, 0.7}
    assert [list(line.get_ydata()) for line in beside.lines] == [[0.7, 0.1], [0.8, 0.2]]


def test_no_dot_of_a_comparison_lies_on_the_frame(tmp_path, figure):
    runs = [
        ComparedRun(name, seed, 10, 1e9, 1.0, {"auc": 0.5 + seed / 10}, None, series=name)
        for name in ("one", "two", "three")
        for seed in range(3)
    ]
    plot_comparison(tmp_path / "comparison.png", runs)
    (axis,) = figure().axes
    bottom, top = axis.get_ylim()
    assert (bottom, top) == (2.5, -0.5)  # the first on top, half a line of room at both ends
    left, right = axis.get_xlim()
    assert left < 0.5 and right > 0.7


@pytest.mark.parametrize(("flops", "ticks"), [((4e15, 8e15, 3.2e16), 3), ((1e12, 1e16), 3), ((1e15, 1.2e15), 2)])
def test_a_comparison_over_flops_has_ticks_that_can_be_read_and_four_panels_in_a_row(flops, ticks, tmp_path, figure):
    tasks = {name: [50.0] for name in ("cola", "sst2", "mrpc", "stsb", "rte", "mnli")}
    runs = [
        ComparedRun(f"{side}, {it}", seed, 10, it, 1.0, {"auc": 0.5}, None, series=side, tasks=tasks)
        for side in ("one", "$two")
        for it in flops
        for seed in range(2)
    ]
    plot_comparison(tmp_path / "comparison.png", runs)
    first, *others = figure().axes
    assert first.get_ylabel() == "GLUE, five" and [axis.get_ylabel() for axis in others] == ["RTD AUC", *tasks]
    low, high = first.get_xlim()
    shown = [it.get_text() for it in first.get_xticklabels() if low <= it.get_position()[0] <= high]
    assert len(shown) >= ticks and all(low <= float(text) <= high for text in shown)
    assert len(first.lines[1].get_xdata()) == 2 * len(flops)  # all points of a side
    assert {len([axis for axis in others if axis.get_subplotspec().rowspan.start == row]) for row in (1, 2)} == {4, 3}


def test_a_run_remembers_every_evaluation_and_the_newest_line_of_training(tmp_path):
    log = RunLog(Tracked(tmp_path, "run", {}, 0), ())
    for step in range(1, 5):
        log.write("train", step, {"loss": 1 / step})
        log.write("heldout", step, {"auc": 0.5})
    assert [it["step"] for it in log.of_kind("train")] == [log.last("train")["step"]] == [4]
    assert [it["step"] for it in log.of_kind("heldout")] == [1, 2, 3, 4]
    log.close()
    assert [it["loss"] for it in read_metrics(tmp_path, "train")] == [1, 1 / 2, 1 / 3, 1 / 4]
