"""Texts beyond the length: cut, or read in windows whose logits are averaged."""

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from electra.data.tokenizer import load_tokenizer
from electra.finetuning.classification import ClassificationSettings, places_of
from electra.finetuning.folder import load_task_folder
from electra.finetuning.training import infer
from helpers import electra


@pytest.fixture(scope="module")
def build(toy_model):
    def build(**settings):
        return ClassificationSettings(labels=("a", "b"), **settings).build(load_tokenizer(toy_model), 16, {})

    return build


@pytest.mark.parametrize("size", [0, 1, 13, 14, 15, 27, 28, 100])
def test_windows_hold_every_token_and_overlap_by_half(size):
    places, is_cut = places_of([size], 14, "windows")
    read = [list(range(size))[part] for (part,) in places]
    assert not is_cut and sorted({token for tokens in read for token in tokens}) == list(range(size))
    assert all(len(tokens) <= 14 for tokens in read) and (size > 14 or len(places) == 1)
    assert all(first[7:] == second[: len(first[7:])] for first, second in pairwise(read))


def test_of_a_pair_the_longer_text_is_read_in_windows_and_the_shorter_is_in_every_one():
    places, is_cut = places_of([3, 40], 13, "windows")
    assert not is_cut and all(first == slice(0, 3) for first, _ in places) and places[0][1] == slice(0, 10)
    assert places[-1][1].stop >= 40
    places, is_cut = places_of([30, 40], 13, "windows")
    assert is_cut and places[0] == (slice(0, 6), slice(0, 7))  # both are long: the shorter is cut at half
    assert places_of([3, 40], 13, "cut") == ([(slice(0, 3), slice(0, 10))], True)
    assert places_of([3, 4], 13, "windows") == places_of([3, 4], 13, "cut") == ([(slice(0, 3), slice(0, 4))], False)


def test_the_logits_of_a_row_are_the_mean_over_its_windows(build):
    task = build(long="windows")
    rows = [{"text": "the barak walks " * count, "label": "a"} for count in (1, 12, 2)]
    examples, cut = task.encode(rows)
    numbers = [example.row for example in examples]
    assert cut == 0 and numbers.count(0) == numbers.count(2) == 1 < numbers.count(1)
    assert all(len(example.ids) <= 16 and example.target == 0 for example in examples)
    logits = np.random.default_rng(0).normal(size=(len(examples), 2))
    answers = task.predict(rows, examples, [{"logits": it} for it in logits])
    mean = logits[[place for place, number in enumerate(numbers) if number == 1]].mean(0)
    share = np.exp(mean) / np.exp(mean).sum()
    assert answers[1]["probability_b"] == pytest.approx(share[1]) and len(answers) == 3
    assert build().encode(rows)[1] == 1  # without windows the second row is cut


@pytest.fixture(scope="module")
def trained(tmp_path_factory, toy_model) -> tuple[Path, Path]:
    """The word that decides is far behind the length."""
    folder, rng = tmp_path_factory.mktemp("long"), random.Random(0)
    lines = ["text,label"]
    for row in range(90):
        being = rng.choice(["barak", "lonute"])
        lines.append(f"{row} {' '.join(rng.choices(['reads', 'jumps', 'the', 'back'], k=24))} {being},{being[:3]}")
    table = folder / "my.csv"
    table.write_text("\n".join(lines) + "\n")
    words = ("length=16", "long=windows", "epochs=6", "lr=4e-3", "batch=16", "evaluations=1")
    done = electra("finetune", toy_model, table, *words, "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    return folder / "out" / "my" / "seed-0", table


def test_what_cutting_cannot_see_is_learned_in_windows(trained):
    model, table = trained
    result = json.loads((model / "result.json").read_text())
    assert result["scores"]["dev"]["accuracy"] >= 0.7 and result["cut"]["dev"] == [0, 9]
    (score, cut) = (
        json.loads(electra("evaluate", model, table, *more, "--json").stdout) for more in ((), ("--long", "cut"))
    )
    assert score["cut"] == 0 and cut["cut"] == 90 and score["scores"]["accuracy"] > cut["scores"]["accuracy"]


def test_a_folder_that_was_trained_on_cut_texts_can_read_windows_when_asked(trained, tmp_path):
    model, table = trained
    text = table.read_text().splitlines()[1].split(",")[0]
    loaded = load_task_folder(model)
    examples, _ = loaded.task.encode([{"text": text}])
    logits = np.mean([it["logits"] for it in infer(loaded.model, loaded.task, examples, loaded.method)], 0)
    answer = json.loads(electra("predict", model, text, "--long", "windows", "--probabilities").stdout)
    assert answer["probability_lon"] == pytest.approx(np.exp(logits[1]) / np.exp(logits).sum(), abs=1e-5)
    done = electra("predict", model, table, "--long", "cut", "--out", tmp_path / "cut.csv")
    assert done.returncode == 0 and "90 longer than 16 tokens and cut" in done.stdout


def test_the_alarm_names_the_way_out(toy_model, tmp_path):
    table = tmp_path / "my.csv"
    lines = [f"{row} {'the barak walks ' * 9},{'ab'[row % 2]}" for row in range(20)]
    table.write_text("\n".join(["text,label", *lines]) + "\n")
    done = electra("finetune", toy_model, table, "length=16", "epochs=1", "--out", tmp_path / "out")
    assert done.returncode == 0 and "say long=windows to read all of it" in done.stdout
