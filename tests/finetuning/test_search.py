"""A search for settings: by halving, on dev alone, kept when it is interrupted."""

import json
import random
from pathlib import Path

import pytest

from electra.base.jobs import Signals
from electra.finetuning import search as searching
from electra.finetuning.seeds import load_start, plan_item, prepare_task
from electra.finetuning.training import ExampleBatches
from helpers import electra

FAST = ("batch=16", "evaluations=1", "length=24", "min_steps=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Which being walks? With train, dev and a test that has answers."""
    folder, rng = tmp_path_factory.mktemp("beings"), random.Random(0)
    for split, count in (("train", 48), ("dev", 16), ("test", 16)):
        lines = ["text,label"]
        for row in range(count):
            being = rng.choice(["barak", "lonute"])
            lines.append(f"{being} {' '.join(rng.choices(['reads', 'jumps', 'the'], k=4))} {split}{row},{being[:3]}")
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def searched(tmp_path_factory, toy_model, folder) -> Path:
    out = tmp_path_factory.mktemp("searched") / "out"
    done = electra("finetune", toy_model, folder, *FAST, "--search", "--trials", 5, "--seeds", 2, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "the first line was chosen" in done.stdout and "ETA of the search" in done.stderr
    return out


def result_of(out: Path) -> dict:
    (result,) = json.loads((out / "results.json").read_text())["tasks"].values()
    return result


def test_half_of_the_trials_go_on_and_the_default_always(searched):
    found = result_of(searched)["search"]
    rounds = {it["trial"]: len(it["scores"]) for it in found["trials"]}
    assert sorted(rounds) == [1, 2, 3, 4, 5] and rounds[1] == 3
    counts = [sum(count >= place for count in rounds.values()) for place in (1, 2, 3)]
    assert counts[0] == 5 and counts[1] in (3, 4) and counts[2] in (2, 3)
    assert found["winner"] == found["trials"][0]["trial"]
    last = [it["scores"][-1] for it in found["trials"] if len(it["scores"]) == 3]
    assert last[0] == max(last)


def test_the_winner_is_trained_over_seeds_and_only_it_meets_the_test_set(searched, folder):
    result = result_of(searched)
    assert result["runs"] == 2 and set(result["scores"]) == {"dev", "test"}
    (name,) = [path.parent.name for path in searched.glob("*/settings.json")]
    method = json.loads((searched / name / "settings.json").read_text())["method"]
    winner = result["search"]["trials"][0]["settings"]
    assert method["lr"] == winner["lr"] and method["layer_decay"] == winner["layer_decay"]
    trials = list(searched.glob("*/search/*/trial.json"))
    assert len(trials) >= 8 and not any("test" in path.read_text() for path in trials)
    assert not list(searched.glob("*/search/**/model.safetensors"))
    page = (searched / "results.md").read_text()
    assert "chosen on dev by a search, so dev scores are optimistic" in page and "| trial | lr | epochs |" in page
    for card in searched.glob("*/seed-*/README.md"):
        text = card.read_text()
        assert (
            "chosen on dev by a search, so dev scores are optimistic" in text
            and "Text beyond 24 tokens is cut." in text
        )
    # the last round is what the winner's first seed is
    assert result["search"]["trials"][0]["scores"][-1] == result["scores"]["dev"]["seed 0"]["accuracy"]


def test_the_same_search_again_trains_nothing(searched, toy_model, folder, monkeypatch):
    monkeypatch.setattr(searching, "train_seed", lambda *_: pytest.fail("a finished trial was trained again"))
    words = (*FAST, "--search", "--trials", 5, "--seeds", 2, "--out", searched)
    again = electra("finetune", toy_model, folder, *words)
    assert again.returncode == 0 and "2 finished runs kept" in again.stderr, again.stderr


def test_what_the_user_has_set_is_not_searched(toy_model, folder, tmp_path):
    (planned,) = plan_item(str(folder), {"lr": 1e-3, "epochs": 4}, load_start(toy_model))
    trials = searching.first_trials(planned, 12)
    assert len(trials) == 8 and all(set(it.settings) == {"layer_decay", "pooling"} for it in trials)
    words = ("lr=1e-3", "epochs=4", "layer_decay=1", "pooling=cls")
    done = electra("finetune", toy_model, folder, *words, "--search", "--out", tmp_path / "out")
    assert done.returncode == 2 and "nothing to search" in done.stderr
    done = electra("finetune", toy_model, folder, "--trials", 4, "--out", tmp_path / "out")
    assert done.returncode == 2 and "--trials 4 is for a search. Add --search" in done.stderr


def test_all_candidates_differ_and_the_first_is_the_default_with_its_steps(toy_model, folder):
    (planned,) = plan_item(str(folder), {"batch": 16}, load_start(toy_model))
    trials = searching.first_trials(planned, 12)
    assert len({str(it.settings) for it in trials}) == 12 and trials[0].number == 1
    first = trials[0].settings
    assert first["lr"] == planned.plan.method.lr and first["epochs"] == 84  # of 3 steps: min_steps=250


def test_the_first_trial_has_the_default_s_steps_where_a_text_is_several_examples(toy_model, tmp_path):
    rows = [f"{being} {'the ' * count},{being[:3]}" for count in range(24) for being in ("barak", "lonute")]
    (tmp_path / "long.csv").write_text("\n".join(["text,label", *rows]))
    (planned,) = plan_item(
        str(tmp_path / "long.csv"), {"batch": 16, "length": 8, "long": "windows"}, load_start(toy_model)
    )
    prepared = prepare_task(planned)
    assert len(prepared.train.examples) > 48
    assert searching.first_trials(planned, 1)[0].settings["epochs"] == ExampleBatches(prepared, 0).epochs


def test_what_the_user_s_own_task_file_sets_is_not_searched(toy_model, folder, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'data = "{folder}"\nlabels = ["bar", "lon"]\nepochs = 2\nlr = 1e-3\n')
    (planned,) = plan_item(str(recipe), {}, load_start(toy_model))
    assert set(searching.first_trials(planned, 1)[0].settings) == {"layer_decay", "pooling"}


def test_trials_that_are_alike_in_a_round_are_trained_once(toy_model, folder, tmp_path, monkeypatch):
    """A quarter of two epochs and one of three are one, and two processes would write the same checkpoints."""
    (planned,) = plan_item(str(folder), {"batch": 16, "length": 24}, load_start(toy_model))
    settings = [(1e-3, 3), (1e-3, 2), (2e-3, 2), (2e-3, 3)]
    trials = [searching.Trial(number, {"lr": lr, "epochs": epochs}) for number, (lr, epochs) in enumerate(settings, 1)]
    trained = []

    def run_trial(_prepared, job, *_):
        trained.append((job.settings["lr"], job.settings["epochs"]))
        return {"settings": job.settings, "metric": "accuracy", "score": job.settings["epochs"] / 10}

    monkeypatch.setattr(searching, "first_trials", lambda *_: trials)
    monkeypatch.setattr(searching, "run_trial", run_trial)
    found = searching.search(planned, 4, 1, tmp_path, Signals())
    assert trained == [(1e-3, 1), (2e-3, 1), (1e-3, 2), (1e-3, 1)]
    assert {it.number: it.scores for it in found.trials} == {1: (0.1, 0.2), 2: (0.1, 0.1), 3: (0.1,), 4: (0.1,)}


def test_a_trial_that_diverges_loses_and_ends_nothing(toy_model, folder, tmp_path, monkeypatch):
    (planned,) = plan_item(str(folder), {"batch": 16, "epochs": 1, "length": 24}, load_start(toy_model))
    given = [searching.Trial(n, {"lr": lr}) for n, lr in enumerate((1e-3, 1e30), 1)]
    monkeypatch.setattr(searching, "first_trials", lambda *_: given)
    found = searching.search(planned, 2, 1, tmp_path, Signals())
    assert found.winner.number == 1 and found.trials[1].scores == (None,)


@pytest.mark.slow
def test_trials_in_other_processes_are_the_same(searched, toy_model, folder, tmp_path):
    words = (*FAST, "--search", "--trials", 5, "--jobs", 2, "--out", tmp_path / "out")
    done = electra("finetune", toy_model, folder, *words)
    assert done.returncode == 0, done.stderr
    assert result_of(tmp_path / "out")["search"] == result_of(searched)["search"]


def test_tasks_that_are_trained_together_are_not_searched(toy_model, folder, tmp_path):
    one = tmp_path / "one.csv"
    one.write_text((folder / "train.csv").read_text())
    done = electra("finetune", toy_model, f"{one}+{folder / 'train.csv'}", "--search", "--out", tmp_path / "out")
    assert done.returncode == 2 and "one task only" in done.stderr
