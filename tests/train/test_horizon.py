"""A budget of time: when a run ends, and how far it is on the way."""

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest

from electra.base.config import validate
from electra.base.errors import SettingsError
from electra.pretraining.settings import resolve
from electra.train.checkpoint import newest_checkpoint
from electra.train.log import read_metrics
from electra.train.optimizers import AdamSettings
from electra.train.settings import Horizon, ScheduleSettings, TrainSettings, rate_fraction
from electra.train.step import Step
from helpers import Forked, electra

LINEAR = ScheduleSettings(kind="linear", warmup=0.1)
SPEEDS = {
    "even": lambda step: 0.01,
    "slow start": lambda step: 0.5 if step < 3 else 0.01,
    "slower later": lambda step: 0.01 if step < 2000 else 0.03,
    "a stop": lambda step: 6.0 if step == 2000 else 0.01,
    "uneven": lambda step: 0.01 * (1 + step % 7),
}


def simulate(horizon: Horizon, seconds_of, every: int, step: int = 0, clock: float = 0.0) -> tuple[list, int, float]:
    """A run on a device whose step number n takes seconds_of(n), read every so many steps."""
    rates = []
    while step < horizon.steps:
        rates.append(rate_fraction(LINEAR, horizon.place(step), horizon.steps))
        clock += seconds_of(step)
        step += 1
        if step % every == 0 or horizon.is_reading_due(step):
            horizon.read(step, clock)
    return rates, step, clock


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize(
    "seconds_of",
    [
        lambda step: 0.01,
        lambda step: 2.0 if step < 3 else 0.01,  # a slow start
        lambda step: 0.01 if step < 2000 else 0.03,  # somebody else joins
        lambda step: 0.01 * (1 + step % 7),
    ],
    ids=["even", "slow start", "slower later", "uneven"],
)
def test_the_budget_is_used_up_to_a_hundredth_and_the_rate_ends_at_zero(seconds_of, every):
    horizon = Horizon(TrainSettings(minutes=1, steps=5))
    rates, step, clock = simulate(horizon, seconds_of, every)
    assert clock == pytest.approx(60, rel=0.01) and step == horizon.steps > 5
    assert max(rates) > 0.98 and rates[-1] < 0.01
    assert horizon.progress(step) == 1


def test_the_schedule_follows_time_not_steps():
    """Ten times slower in the second half of the budget: half of the budget is still half of the schedule."""
    horizon = Horizon(TrainSettings(minutes=1))
    rates, step, _ = simulate(horizon, lambda step: 0.01 if step < 3000 else 0.1, 10)
    assert step == pytest.approx(3300, abs=20)
    assert rates[3000] == pytest.approx(0.5 / 0.9, abs=0.02) and rates[3150] == pytest.approx(0.25 / 0.9, abs=0.02)


def test_a_plan_that_was_saved_goes_on_with_the_time_left():
    first = Horizon(TrainSettings(minutes=1))
    first.read(1000, 20.0)
    again = Horizon(TrainSettings(minutes=1))
    again.restore(1000, 20.0, int(first.steps))
    assert again.progress(1000) == pytest.approx(1 / 3) and again.steps == 3000
    again.begin(1001, 20.0)  # compiling, which is not counted
    _, step, clock = simulate(again, lambda step: 0.04, 10, 1001, 20.0)
    assert clock == pytest.approx(60, rel=0.01) and step == pytest.approx(2001, abs=5)


def test_a_finished_run_stays_finished():
    again = Horizon(TrainSettings(minutes=1))
    again.restore(777, 59.9, 777)
    assert again.steps == 777 and again.progress(777) == 1


def test_without_a_budget_nothing_is_planned():
    horizon = Horizon(TrainSettings(steps=40))
    assert horizon.steps == 40 and horizon.place(7) == 7 and horizon.progress(10) == 0.25


def test_warm_up_is_a_share_or_a_number_of_steps():
    share, steps = ScheduleSettings(kind="linear", warmup=0.1), ScheduleSettings(kind="linear", warmup=20)
    assert [rate_fraction(share, n, 200) for n in range(200)] == [rate_fraction(steps, n, 200) for n in range(200)]
    with pytest.raises(SettingsError, match=r"warmup: must be a fraction of the run below 1.*got 1.5"):
        validate(ScheduleSettings, {"warmup": 1.5})
    assert ScheduleSettings(warmup=1000.0).warmup == 1000


SECONDS = 2.0
TIMED = (f"train.minutes={SECONDS / 60}", "schedule.warmup=0.1", "schedule.kind=linear", "train.steps=3")


def test_a_run_ends_when_its_minutes_are_over(recipe, prepared, tmp_path, monkeypatch):
    run, progress, step = tmp_path / "run", [], Step.__call__
    monkeypatch.setattr(
        Step, "__call__", lambda it, batch, *rest: progress.append(batch.progress) or step(it, batch, *rest)
    )
    done = electra("pretrain", recipe, f"data={prepared}", f"run={run}", *TIMED)
    assert done.returncode == 0, done.stderr
    assert (
        progress[0] == 0 and progress[-1] > 0.8 and sorted(progress)[len(progress) // 2] == pytest.approx(0.5, abs=0.25)
    )
    records = [record for record in read_metrics(run) if record["kind"] == "train"]
    assert_timed(records)
    assert max(record["lr"] for record in records) > 6e-4
    state = json.loads((run / "run_state.json").read_text())
    assert state["state"] == "finished" and state["seconds"]["train"] == records[-1]["training_seconds"]
    assert state["tokens"] == records[-1]["tokens"] <= records[-1]["step"] * 8 * 24
    assert (run / "export").is_dir()
    assert any(record["kind"] == "heldout" and record["step"] == records[-1]["step"] for record in read_metrics(run))

    again = electra("pretrain", recipe, f"data={prepared}", f"run={run}", *TIMED)
    assert again.returncode == 0 and [r for r in read_metrics(run) if r["kind"] == "train"] == records


def test_a_run_that_was_killed_goes_on_with_the_time_left(recipe, prepared, tmp_path):
    run = tmp_path / "run"
    process = Forked("pretrain", recipe, f"data={prepared}", f"run={run}", *TIMED)
    until = time.monotonic() + 60
    while time.monotonic() < until and not any(spent(record) > SECONDS / 2 for record in read_metrics(run)):
        time.sleep(0.005)
    process.kill()
    process.wait()
    saved = newest_checkpoint(run / "checkpoints")
    assert saved is not None
    before = saved.state["seconds"] - sum(saved.state["pauses"].values())
    assert SECONDS / 3 < before < SECONDS

    assert electra("pretrain", recipe, f"data={prepared}", f"run={run}", *TIMED).returncode == 0
    records = [record for record in read_metrics(run) if record["kind"] == "train"]
    assert_timed(records)
    later = [record["lr"] for record in records if record["step"] > saved.step]
    left = 1 - before / SECONDS
    assert later[0] == pytest.approx(1e-3 * left / 0.9, abs=2e-4)


def assert_timed(records: list[dict]) -> None:
    """On a machine that is busy with other things some steps take long, and no plan knows which."""
    times = [record["training_seconds"] for record in records]
    steps = [record["step"] for record in records]
    longest = max((b - a) / (n - m) for (a, b), (m, n) in zip(pairwise(times), pairwise(steps), strict=True))
    assert steps[-1] > 3
    assert times[-1] == pytest.approx(SECONDS, rel=0.01, abs=2 * longest)
    assert records[-1]["lr"] < 1e-3 * 3 * longest / SECONDS / 0.9


def spent(record: dict) -> float:
    return record.get("training_seconds", 0.0)


def test_a_warm_up_that_fills_the_budget_is_told(recipe, prepared, tmp_path: Path):
    words = (f"data={prepared}", f"run={tmp_path / 'run'}", "train.minutes=0.01", "schedule.warmup=100000")
    done = electra("pretrain", recipe, *words)
    assert done.returncode == 0 and "WARNING: the learning rate never gets above" in done.stderr


@pytest.mark.parametrize("minutes", ["-1", "nan", "inf", "soon"])
def test_minutes_that_are_none_are_refused(recipe, prepared, tmp_path, minutes):
    done = electra("pretrain", recipe, f"data={prepared}", f"run={tmp_path / 'run'}", f"train.minutes={minutes}")
    assert done.returncode == 2 and done.stderr.startswith("electra: train.minutes: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_run_made_longer_does_not_warm_up_to_its_last_step():
    """Also where the first end was before the end of the warm-up."""
    horizon, schedule = Horizon(TrainSettings(steps=140, stages=(40,))), ScheduleSettings(kind="linear", warmup=60)
    rates = [horizon.fraction(schedule, step) for step in range(140)]
    assert rates[40 + 59] == 1 == max(rates) and rates[-1] == pytest.approx(1 / 40)
    assert rates[:40] == [(step + 1) / 60 for step in range(40)]


@pytest.mark.parametrize("kind", ["original", "linear", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 0.03, 0.3, 15, 290])
def test_weight_decay_adds_up_to_the_same_over_any_number_of_steps(kind, warmup):
    schedule = ScheduleSettings(kind=kind, warmup=warmup, power=2.0 if kind == "linear" else 1.0)
    for steps in (300, 3000):
        horizon, adam = Horizon(TrainSettings(steps=steps)), AdamSettings(lr=3e-3, weight_decay="auto", total_decay=1.7)
        decay = adam.decay_over(horizon.steps_at_peak(schedule))
        total = sum(3e-3 * horizon.fraction(schedule, step) * decay for step in range(steps))
        assert total == pytest.approx(1.7, rel=4 / steps)


@pytest.mark.parametrize("every", [1, 50])
@pytest.mark.parametrize("speed", SPEEDS)
def test_weight_decay_adds_up_to_the_same_over_a_budget(speed, every):
    """And where the machine stops for a tenth of the budget, no step makes up for it alone."""
    horizon, step, clock, shares = Horizon(TrainSettings(minutes=1)), 0, 0.0, []
    while step < horizon.steps:
        shares.append(horizon.decay_share(LINEAR, step))
        clock += SPEEDS[speed](step)
        step += 1
        if every == 1 or horizon.is_reading_due(step):
            horizon.read(step, clock)
    assert sum(shares) == pytest.approx(1, rel=0.04)
    assert max(shares[100:]) < 10 / step


def test_a_run_made_longer_goes_on_with_the_weight_decay_that_it_had():
    first, longer = (
        Horizon(TrainSettings(steps=n, stages=s)).steps_at_peak(LINEAR) for n, s in ((40, ()), (60, (40,)))
    )
    assert first == longer == 20


def test_config_show_prints_the_weight_decay_of_the_run():
    def decay(*words: str) -> str:
        lines = electra("config", "show", "modern-small", *words).stdout.splitlines()
        return next(line for line in lines if line.startswith("optimizer.weight_decay")).partition("=")[2].strip()

    assert decay() == '"auto"         # modern-small, 0.04 in this run'
    assert decay("train.steps=3000").endswith("0.387 in this run")
    assert decay("train.steps=3000", "start=x").endswith("0.0387 in this run")
    assert decay("train.minutes=1") == '"auto"         # modern-small'
    assert decay("train.steps=3000", "optimizer.weight_decay=0.8") == "0.8            # command line"


@pytest.mark.parametrize(("size", "decay"), [("tiny", 0.5), ("small", 0.04), ("base", 0.01), ("large", 0.01)])
def test_at_their_own_steps_the_recipes_have_the_weight_decay_they_were_tuned_with(size, decay):
    settings, _ = resolve(f"modern-{size}", ["data=x"])
    assert settings.optimizer_of_run().weight_decay == decay  # to the bit
