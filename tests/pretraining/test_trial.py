"""FLOPs against rules worked out by hand, the paper's numbers to the last digit, peaks of devices, and the verb."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from electra.pretraining import trial
from electra.pretraining.settings import resolve
from electra.train.log import read_metrics
from helpers import electra

# What google-research/electra's flops_computation.py prints.
PRINTED = {
    "elmo": 3.4114394716164127e18,
    "xlnet": 3.856582065028608e21,
    "gpt": 3.968752230785352e19,
    "bert_small": 1.4187399146496e18,
    "bert_base": 6.428335104e19,
    "bert_large": 1.91720905883648e20,
    "electra_small": 1.293743798272e18,
    "electra_base": 6.424541834277683e19,
    "electra_400k": 7.117606040895488e20,
    "electra_1.75M": 3.113952642891776e21,
    "roberta": 3.187221435776e21,
    "albert": 3.113923955392512e22,
    "t5_11b": 4.581900124212429e22,
}
BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def published():
    return runpy.run_path(str(BENCH / "published_flops.py"))["published"]


def test_every_number_of_the_original_is_reproduced_to_the_last_digit(published):
    assert list(published().items()) == list(PRINTED.items())
    assert PRINTED["bert_base"] == trial.PAPER_BERT_BASE


@pytest.mark.parametrize(
    ("recipe", "words", "name"),
    [
        ("electra-small", [], "electra_small"),
        ("electra-base", [], "electra_base"),
        ("electra-large", [], "electra_400k"),
        ("electra-large", ["train.steps=1750000"], "electra_1.75M"),
    ],
)
def test_a_recipe_of_the_paper_costs_what_the_paper_says(recipe, words, name, published):
    settings, _ = resolve(recipe, ["data=x", *words])
    assert trial.paper_flops(settings, trial.PAPER_VOCABULARY) == PRINTED[name]
    assert trial.paper_flops(settings, trial.PAPER_VOCABULARY, True) == published(corrected=True)[name]


@pytest.mark.parametrize(("size", "recipe"), [("small", "electra-small"), ("modern-small", "modern-small")])
def test_the_benches_count_what_the_recipe_does(size, recipe, monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    case = runpy.run_path(str(BENCH / "pretraining_steps.py"))["Case"](size, rows=128, length=128, dropout=0.1)
    settings, _ = resolve(recipe, ["data=x", "run=x", "train.batch=128", "rows.length=128"])
    assert case.flops_per_token() == trial.flops_per_token(settings, trial.PAPER_VOCABULARY)


def test_the_corrections_are_of_the_size_that_they_should_be(published):
    forgotten = 5 * (1023 + 255) * 24 * 512  # five operations per hidden unit instead of five per token
    sizes = resolve("electra-large", ["data=x"])[0].encoder.scaled(0.25, 1.0)
    head = trial.paper_head(sizes, 512, trial.PAPER_VOCABULARY, 1.0)
    more = 2 * 2048 * 400_000 * ((0.25 - trial.PAPER_OUTPUT_SHARE) * head + forgotten)
    difference = published(corrected=True)["electra_400k"] - published()["electra_400k"]
    assert difference == pytest.approx(more, rel=1e-9)


TINY = ["layers=2", "hidden=32", "heads=2", "intermediate=64", "embedding=16"]
SMALL = ["data=x", *(f"encoder.{size}" for size in TINY), "rows.length=24", "train.batch=6"]
# By hand, per token: 3 (2 (layers (4h² + 2hi + 2hs) + eh)) for an encoder, 3 · 2e (h + V) for a token head at the chosen
# positions (4 of 24), 3 · 2h (h + 1) for a detection head; V = 300; the generator has a quarter of the width.
BY_HAND = {
    "masked-lm": 125120,
    "electra-15": 142592,
    "replace-mlm": 141568,
    "all-tokens": 174464,
    "corrective": 147904,
    "electric": 179520,  # two towers that name every token
    "adversarial": 142597 + 1 / 3,  # a baseline of one output
    "replaced-span": 214122 + 2 / 3,  # spans are written in eight passes
    "selection": 143184,
    "whole-word": 142592,
    "gdes": 142592,
    "generator-uniform": 126144,
    "generator-unigram": 126144,
    "generator-two-tower": 179520,
    "generator-autoregressive": 167232,
    "frozen-generator": 131626 + 2 / 3,  # forward alone
}


@pytest.mark.parametrize("name", BY_HAND)
def test_every_objective_costs_what_it_does_by_hand(name):
    more = ["generator.source=x"] if name == "frozen-generator" else []
    settings, _ = resolve(name, [*SMALL, *more])
    assert trial.flops_per_token(settings, 300) == pytest.approx(BY_HAND[name], rel=1e-9)


# As the paper counts a row of 24: forward through the encoder (E, of the generator e), a detection head at each position (D), a token
# head there (T, t; over two towers t2); all of it twice. The chosen positions are 15.625 % of them, 3.75.
E, D, T = 24 * (10608 + 1056 + 2 * (8256 + 3781 + 4672 + 4448)), 75 * 32, 78 * 16 + 39 * 300
e, t, t2 = 24 * (10608 + 264 + 2 * (1032 + 565 + 400 + 344)), 30 * 16 + 39 * 300, 46 * 16 + 39 * 300
ELECTRA = E + 24 * D + e + 3.75 * t
PAPER_BY_HAND = {
    "masked-lm": E + 3.75 * T,
    "electra-15": ELECTRA,
    "whole-word": ELECTRA,
    "gdes": ELECTRA,
    "replace-mlm": E + 3.75 * T + e + 3.75 * t,
    "all-tokens": ELECTRA + 24 * T,
    "corrective": ELECTRA + 3.75 * T,
    "selection": ELECTRA + 3.75 * (78 * 16 + 39 * 5),
    "adversarial": ELECTRA + 3.75 * 17,
    "generator-uniform": E + 24 * D,
    "generator-unigram": E + 24 * D,
    "generator-two-tower": E + 24 * D + 2 * e + 24 * t2,
    "electric": E + 24 * D + 2 * e + 24 * t2,
    "generator-autoregressive": E + 24 * D + e + 24 * t,
    "replaced-span": E + 24 * (D + 139 * 64) + e + 24 * t + 4 * (e + 3.75 * t) / 2,  # four passes forward alone
    "frozen-generator": E + 24 * D + (e + 3.75 * t) / 2,
}


@pytest.mark.parametrize("name", PAPER_BY_HAND)
def test_every_objective_costs_what_it_does_by_the_papers_rules(name):
    more = ["generator.source=x"] if name == "frozen-generator" else []
    settings, _ = resolve(name, [*SMALL, "train.steps=10", *more])
    assert trial.paper_flops(settings, 300) == pytest.approx(2 * 60 * PAPER_BY_HAND[name], rel=1e-9)


# Of a tied head the dense layer is as wide as the layers, and the projection from words to layers maps its states back.
WIDER_T, WIDER_t = 78 * (32 - 16) + 2 * 32 * 16, 30 * (8 - 16) + 2 * 8 * 16


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("masked-lm", 3.75 * WIDER_T),
        ("electra-15", 3.75 * WIDER_t),
        ("selection", 3.75 * WIDER_t),
        ("all-tokens", 3.75 * WIDER_t + 24 * WIDER_T),
    ],
)
def test_a_tied_token_head_costs_what_it_does_by_the_papers_rules(name, more):
    """The head of selection, which scores candidates, ends at the width of the words in either case."""
    words = [*SMALL, "train.steps=10", "encoder.kind=modernbert"]
    ends = [resolve(name, [*words, f"encoder.token_head={kind}"])[0] for kind in ("narrow", "tied")]
    narrow, tied = (trial.paper_flops(settings, 300) for settings in ends)
    assert tied - narrow == pytest.approx(2 * 60 * more, rel=1e-9)


def test_parts_are_the_encoders_and_all_heads():
    settings, _ = resolve("electra-15", SMALL)
    expected = {"generator": 11520, "discriminator": 119808, "heads": 4928 + 6336}
    assert trial.count_flops(settings, 300) == pytest.approx(expected)
    as_wide = [word.replace("embedding=16", "embedding=32") for word in SMALL]  # the discriminator needs no projection
    settings, _ = resolve("electra-15", as_wide)
    expected = {"generator": 11520 + 768, "discriminator": 119808 - 3072, "heads": 2 * 4928 + 6336}
    assert trial.count_flops(settings, 300) == pytest.approx(expected)
    settings, _ = resolve("electra-15", [*SMALL, "generator.sharing=all", "generator.width=1"])
    (shared,) = trial.count_flops(settings, 300).keys() - {"heads"}
    assert trial.count_flops(settings, 300)[shared] == pytest.approx(2 * 119808)


@pytest.mark.parametrize("window", [2, 6, 12, 46, 300])
def test_a_local_layer_costs_the_keys_of_its_window(window):
    """Two products of 2h for each pair of tokens, three times each, that are too far apart in one of the two layers."""
    words = [*SMALL, f"encoder.window={window}"]
    settings, _ = resolve("modernbert", [*words, "encoder.global_every=2"])
    everywhere, _ = resolve("modernbert", [*words, "encoder.global_every=1"])
    spared = sum(abs(i - j) > window // 2 for i in range(24) for j in range(24))
    for name, hidden in (("generator", 8), ("discriminator", 32)):
        expected = trial.count_flops(everywhere, 300)[name] - 3 * 2 * 2 * hidden * spared / 24
        assert trial.count_flops(settings, 300)[name] == pytest.approx(expected, rel=1e-12)


def test_electra_small_costs_seventy_million_operations_per_token():
    settings, _ = resolve("electra-small", ["data=x"])
    assert trial.flops_per_token(settings, 30522) == pytest.approx(70.19e6, rel=1e-4)


def test_parts_of_a_batch_do_not_change_the_count():
    settings, _ = resolve("electra-15", SMALL)
    halved, _ = resolve("electra-15", [*SMALL, "train.accumulate=2"])
    assert trial.count_flops(halved, 300) == pytest.approx(trial.count_flops(settings, 300), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A10G", 70),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 0),
        ("Some New Thing 3000", 0),
    ],
)
def test_devices_are_known_by_torchs_name_for_them(monkeypatch, name, tera):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert trial.device_peak(torch.device("cuda")) == tera * 1e12


def test_the_verb_counts_a_recipe_and_the_time_it_takes():
    done = electra("flops", "electra-small", "train.steps=1000", "--device", "A100", "--utilisation", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["run"] == pytest.approx(70.19e6 * 128 * 128 * 1000, rel=1e-4)
    assert result["paper_run"] == pytest.approx(PRINTED["electra_small"] / 1000)
    assert result["devices"]["a100"]["hours"] * 3600 == pytest.approx(result["run"] / 156e12)


def test_the_verb_takes_the_vocabulary_of_the_data(prepared, recipe):
    done = electra("flops", recipe, f"data={prepared}", "--tflops", 1, "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((prepared / "manifest.json").read_text())
    assert json.loads(done.stdout)["vocabulary"] == manifest["vocab_size"]


def test_the_verb_shows_tables_for_people(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    done = electra("flops", "electra-small")
    assert done.returncode == 0
    for text in ("discriminator", "70.19 M", "1.294e+18", "0.0201 times its BERT-Base", "h200", "790 measured"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--device", "abacus"], "no device 'abacus'"), (["--utilisation", "0"], "--utilisation 0.0 must be above 0")],
)
def test_a_wrong_device_or_utilisation_is_refused(words, says):
    done = electra("flops", "tiny", *words)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("peak", [1e9, 0.0], ids=["known", "unknown"])
def test_the_log_says_which_share_of_the_peak_is_used_where_that_is_known(
    peak, recipe, prepared, tmp_path, monkeypatch
):
    from electra.pretraining import run as pretrain

    monkeypatch.setattr(pretrain, "device_peak", lambda device: peak)
    settings, _ = resolve(str(recipe), [f"data={prepared}", f"run={tmp_path / 'run'}", "train.steps=5"])
    pretrain.pretrain(settings)
    (record,) = (entry for entry in read_metrics(tmp_path / "run") if entry["kind"] == "train")
    manifest = json.loads((prepared / "manifest.json").read_text())
    per_token = trial.flops_per_token(settings, manifest["vocab_size"])
    expected = pytest.approx(record["tokens_per_second"] * per_token / 1e9) if peak else None
    assert record.get("mfu") == expected


def test_no_peak_is_known_of_a_processor():
    assert trial.device_peak(torch.device("cpu")) == 0
    assert trial.measured_cpu(seconds=0.02, size=64) > 1e6


def test_a_run_of_so_many_minutes_has_as_many_steps_as_the_device_makes_of_them():
    words = ("flops", "electra-small", "train.steps=1000", "--device", "A100")
    by_steps = json.loads(electra(*words, "--json").stdout)
    timed = json.loads(electra(*words, "train.minutes=30", "--json").stdout)
    hours = by_steps["devices"]["a100"]["hours"]
    assert timed["devices"]["a100"]["steps"] == pytest.approx(1000 * 0.5 / hours)
    assert timed["minutes"] == 30 and not {"steps", "run", "tokens", "paper_run"} & timed.keys()
    shown = electra(*words, "train.minutes=30").stdout
    assert "30 minutes of 128 rows" in shown and "steps │" in shown and "1,000,000" not in shown


def test_a_slow_start_and_a_lucky_step_do_not_count_for_what_a_step_takes(monkeypatch):
    clock, costs = [0.0], [9.0, 5.0, 0.2, 0.1, 0.3, 0.2, 0.4, 60.0]
    monkeypatch.setattr("electra.pretraining.trial.time.monotonic", lambda: clock[0])

    class Slow:
        captured = SimpleNamespace(graphs={})
        execution = SimpleNamespace(device=torch.device("cpu"))

        def __call__(self, batch, number, progress):
            clock[0] += costs[number]
            return {"total": torch.zeros(())}, None

    assert trial.try_step(Slow(), None, seconds=1.0)[0] == pytest.approx(0.2)  # of the five that a second has room for
