"""The paper's comparisons (bench/claim.py), from what is typed to bench/results/claim.json. Training itself is elsewhere: here runs are made up,
but for the slow test."""

import json
import logging
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from electra.data.shards import read_manifest
from electra.inspector import load
from electra.inspector.compare import ComparedRun, Yardsticks, with_steps
from electra.pretraining.settings import resolve

BENCH = Path(__file__).parents[1] / "bench"
sys.path.append(str(BENCH))
import claim  # noqa: E402
import claim_rows  # noqa: E402
import cola_ranking  # noqa: E402
import machine  # noqa: E402
import robust  # noqa: E402
import screens  # noqa: E402


def write_glue(folder: Path) -> Path:
    nouns = "barak", "selin", "timute", "gorowa"
    for split, first in (("train", 0), ("dev", 1000)):
        numbers = range(first, first + 24)
        good = [{"sentence": f"The {nouns[n % 4]} walks {n}.", "label": 1, "source": "x"} for n in numbers]
        bad = [{"sentence": f"The {nouns[n % 4]} the {n}.", "label": 0, "source": "x"} for n in numbers]
        pairs = [
            {"sentence1": f"a {n}", "sentence2": "b", "label": ("entailment", "not_entailment")[n % 2]} for n in numbers
        ]
        for task, rows in (("cola", good + bad), ("rte", pairs)):
            path = folder / task / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def bench(tmp_path, prepared, monkeypatch, capsys, caplog):
    """Types a command; returns what claim.json holds then, and what was said. `trained` has the jobs that were run."""
    monkeypatch.setattr(machine, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # the log is pytest's
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(claim, "ranking", lambda *_: {"auc_mean": 0.6, "pairs": 0.7})
    monkeypatch.setattr(claim, "run_jobs", lambda function, jobs, *_: (function(*job) for job in jobs))
    monkeypatch.setattr(claim, "plot_comparison", lambda *_: None)
    glue, trained = write_glue(tmp_path / "glue"), []

    def run_job(job):
        """The best rate is 0.02, twice the recipe's; BERT's is a third of that; scores grow with the budget."""
        trained.append(job)
        settings = resolve(job.variant.recipe, [*job.variant.overrides, "run=x"])[0]
        best = 0.005 if settings.objective.kind == "masked_lm" else 0.02
        value = 50 - 5 * abs(math.log2(settings.optimizer.lr / best)) + job.seed + math.log2(job.variant.budget.amount)
        tasks = (
            {name: [value] * job.yardsticks.tasks.seeds for name in job.yardsticks.tasks.names}
            if job.yardsticks.tasks
            else {}
        )
        amount = job.variant.budget.amount
        flops = {"series": job.variant.series, "paper_flops": 2 * amount, "tasks": tasks}
        return ComparedRun(job.variant.name, job.seed, 5, amount, 1.0, {"auc": 0.7}, None, **flops)

    monkeypatch.setattr(claim, "run_job_if_it_fits", run_job)

    def call(*words: object, out: str = "out"):
        trained.clear()
        caplog.clear()
        places = "--data", prepared, "--glue", glue, "--out", tmp_path / out, "--base", "modern-tiny"
        tasks = *(() if "--tasks" in words else ("--tasks", "cola", "rte")), "--more-tasks"
        monkeypatch.setattr(sys, "argv", ["claim.py", *map(str, (*words, *places, *tasks))])
        claim.main()
        path = tmp_path / "results" / "claim.json"
        return json.loads(path.read_text()) if path.is_file() else {}, "".join((*capsys.readouterr(), caplog.text))

    call.trained = trained
    return call


@pytest.mark.parametrize("names", ["table5,compute,training", "training,compute,table5"])
def test_several_families_are_one_queue(names, bench, capsys):
    sides = "ELECTRA", "BERT", "joint"
    stored, _ = bench(names, "--budget", "6 steps", "--seeds", "2", "--only", *sides)
    assert sorted((job.variant.recipe, job.seed, job.yardsticks.tasks.seeds) for job in bench.trained) == [
        (recipe, seed, 2) for recipe in ("modern-tiny", "modern-tiny+masked-lm") for seed in (0, 1)
    ]  # once, with the two seeds of fine-tuning that table5 asks for
    shown = {family: [row["side"] for row in rows] for family, rows in stored["families"].items()}
    assert shown == {"table5": ["ELECTRA", "BERT"], "compute": ["ELECTRA", "BERT"], "training": ["joint"]}
    bench(names, "--budget", "6 steps", "--seeds", "2", "--only", *sides)
    assert not bench.trained
    with pytest.raises(SystemExit, match="has no Bart"):
        bench(names, "--only", "Bart")
    with pytest.raises(SystemExit):
        bench(f"{names},sideways")
    assert "there is no family sideways" in capsys.readouterr().err


def test_every_run_is_trained_once_whatever_family_and_machine_asks_for_it(bench, tmp_path):
    bench("table5", "--budget", "6 steps", "--only", "ELECTRA", "BERT")
    assert len(bench.trained) == 4
    stored, said = bench("compute", "--budget", "6 steps", "--seeds", "2", out="elsewhere")
    assert not bench.trained and "4 of 4 runs are in claim.json already" in said
    assert [row["variant"] for row in stored["families"]["compute"]] == ["ELECTRA, 6 steps", "BERT, 6 steps"]
    stored, _ = bench("training", "--only", "joint", "--budget", "6 steps", "--seeds", "2", out="elsewhere")
    assert (
        not bench.trained
        and stored["families"]["training"][0]["mean"]["seeds"]
        == [it["mean"]["seeds"] for it in stored["families"]["table5"] if it["side"] == "ELECTRA"].pop()
    )
    bench("generators", "--only", "width 0.25, depth 0.25", "--budget", "6 steps", "--seeds", "2")
    assert not bench.trained
    # other settings, seeds of tasks or budgets are other runs
    bench("training", "--only", "joint", "--budget", "6 steps", "--seeds", "2", "train.batch=8")
    assert len(bench.trained) == 2
    bench("training", "--only", "joint", "--budget", "6 steps", "--seeds", "2", "--task-seeds", "4")
    assert len(bench.trained) == 2
    stored, _ = bench("training", "--only", "joint", "--budget", "7 steps", "--seeds", "3")
    assert len(bench.trained) == 3
    variants = ["joint, 6 steps", "joint, 6 steps, train.batch=8", "joint, 7 steps"]  # other settings stand beside
    assert [row["variant"] for row in stored["families"]["training"]] == variants


def test_the_best_rate_of_a_screen_is_that_of_later_runs(bench):
    stored, said = bench("table5", "--rates", "--budget", "3 steps", "--only", "ELECTRA", "BERT", "--seeds", "1")
    assert [row["variant"] for row in stored["families"]["table5-rates"]][:3] == [
        f"ELECTRA, {rate}" for rate in ("0.005", "0.01", "0.02")
    ]
    best = {it["side"]: (it["best"], it["edge"]) for it in stored["screens"]}
    assert best == {"ELECTRA": (0.02, "highest"), "BERT": (0.005, "lowest")}
    assert '--only "ELECTRA" --rates 0.04' in said and '--only "BERT" --rates 0.0025' in said
    _, said = bench("table5", "--rates", "0.04", "--budget", "3 steps", "--only", "ELECTRA", "--seeds", "1")
    assert len(bench.trained) == 1 and '--only "ELECTRA"' not in said

    stored, _ = bench("table5", "--budget", "9 steps", "--seeds", "1", out="another-machine")
    rows = {row["side"]: (row["rate"], row["rate_from"]) for row in stored["families"]["table5"]}
    screen = "screen at 3 steps by the mean of cola, rte"
    assert rows["ELECTRA"] == (0.02, f"{screen} of 4")
    assert rows["BERT"] == (0.005, f"{screen}, the lowest of 3")
    assert rows["Replace MLM"] == (0.02, f"ELECTRA's {screen} of 4") and rows["BERT 30 %"][1].startswith(
        "BERT's screen"
    )
    rates = {f"optimizer.lr={rate:g}" for rate in (0.02, 0.005)}
    assert all(rates & {*job.variant.overrides} for job in bench.trained)
    stored, _ = bench("table5", "--budget", "9 steps", "--seeds", "1", "--only", "BERT", "--rate", "BERT=0.001")
    assert {it["side"]: it["rate_from"] for it in stored["families"]["table5"]}["BERT"] == "given"


def test_a_budget_by_the_papers_count_is_the_same_for_all_sides(prepared):
    asked = claim.Claim("table5", "modern-tiny", (f"data={prepared}",), {}, {}, {}, None)
    vocabulary = read_manifest(prepared).vocab_size
    for side in ("ELECTRA", "BERT", "All-Tokens MLM"):
        (arm,) = asked.arms(side, "1e12 paper flops")
        settings = asked.settings(arm.stages[0].recipe)
        assert claim.paper_flops(with_steps(settings, arm.steps), vocabulary) == pytest.approx(1e12, rel=1e-2)
        assert arm.flops != pytest.approx(1e12, rel=0.1)


def test_two_stages_have_a_first_one_for_each_seed_and_budget_with_its_own_decay(bench):
    stored, _ = bench(
        "training", "--only", "two-stage", "--rates", "--budget", "6e12 flops, 3e12 flops", "--seeds", "2"
    )
    firsts = [job for job in bench.trained if job.yardsticks == Yardsticks()]
    assert len(bench.trained) == 24 and len(firsts) == 12  # of which the rates of a screen share one
    assert len({job.folder for job in firsts}) == 4 and {job.seed for job in firsts} == {0, 1}
    assert {job.variant.budget.amount for job in bench.trained} == {3e12, 1.5e12}
    by_settings = {}
    for job in bench.trained:
        (decay,) = (word for word in job.variant.overrides if word.startswith("optimizer.weight_decay="))
        by_settings.setdefault((job in firsts, job.variant.budget.amount), set()).add(decay)
    assert by_settings[True, 3e12].isdisjoint(by_settings[False, 3e12] | by_settings[True, 1.5e12])
    sources = [word for job in bench.trained for word in job.variant.overrides if word.startswith("start=")]
    assert sorted({f'start="{job.folder}/run"' for job in firsts}) == sorted({*sources})
    row = stored["families"]["training-rates"][-1]
    assert (row["flops"], row["paper_flops"], row["steps"]) == (6e12, 12e12, 10)


def test_what_is_refused_publishes_nothing(bench, tmp_path):
    before, _ = bench("table5", "--only", "BERT", "--budget", "6 steps")
    for words in (
        ["--budget", "2m"],
        ["--budget", "9 steps", "--only", "RoBERTa"],
        ["--budget", "x"],
        ["--rate", "BERT=1", "optimizer.lr=2"],
    ):
        with pytest.raises(SystemExit) as refused:
            bench("table5", *words)
        assert refused.value.code not in (0, None)
    assert json.loads((tmp_path / "results" / "claim.json").read_text()) == before


def test_a_call_that_is_stopped_keeps_what_is_finished(bench, tmp_path, monkeypatch):
    real = claim.run_job_if_it_fits

    def stopped(job):
        if job.seed == 1:
            raise claim.ElectraError("stopped")
        return real(job)

    monkeypatch.setattr(claim, "run_job_if_it_fits", stopped)
    with pytest.raises(SystemExit):
        bench("compute", "--budget", "6 steps", "--seeds", "2")
    monkeypatch.setattr(claim, "run_job_if_it_fits", real)
    stored, said = bench("compute", "--budget", "6 steps", "--seeds", "2", out="elsewhere")
    assert [job.seed for job in bench.trained] == [1, 1] and "2 of 4 runs" in said
    assert [row["seeds"] for row in stored["families"]["compute"]] == [2, 2]


def test_a_cut_file_is_kept_aside_and_two_calls_lose_nothing(bench, tmp_path):
    path = tmp_path / "results" / "claim.json"
    bench("compute", "--budget", "6 steps", "--seeds", "2", "--only", "BERT")
    other = tmp_path / "other.json"
    shutil.copy(path, other)
    path.write_text(path.read_text()[:300])
    stored, said = bench("compute", "--budget", "6 steps", "--seeds", "2", "--only", "ELECTRA")
    assert "Kept as claim.json.damaged-1" in said and len(path.with_name("claim.json.damaged-1").read_text()) == 300
    assert [row["side"] for row in stored["families"]["compute"]] == ["ELECTRA"]

    # what another machine, or a call at the same time, has measured
    claim.merge("claim", [str(other)])
    merged = json.loads(path.read_text())
    assert [row["side"] for row in merged["families"]["compute"]] == ["ELECTRA", "BERT"] and len(merged["runs"]) == 4
    assert not list(path.parent.glob(".*"))


def test_the_papers_count_of_bert_at_30_percent_has_a_softmax_at_30_percent(bench, prepared):
    stored, _ = bench("table5", "--only", "BERT", "BERT 30 %", "--budget", "3 steps", "--seeds", "1")
    _, row = stored["families"]["table5"]
    (record,) = (it for it in stored["runs"].values() if it["arm"] == row["runs"][0].split("-")[0])
    assert record["side"] == "BERT 30 %"
    words = [*bench.trained[1].variant.overrides, "run=x"]
    more, fewer = (
        resolve("modern-tiny+masked-lm", [it.replace("0.3", share) for it in words])[0] for share in ("0.3", "0.15")
    )
    counts = [
        claim.paper_flops(with_steps(it, 5), read_manifest(prepared).vocab_size, corrected=True) for it in (more, fewer)
    ]
    assert row["paper_flops"] == counts[0] > counts[1]


def test_a_plan_says_what_is_missing_and_trains_nothing(bench):
    bench("table5", "--budget", "6 steps", "--only", "BERT", "--seeds", "1")
    _, said = bench("table5", "--budget", "6 steps", "--plan", "--seeds", "1", "--jobs", "3")
    assert not bench.trained and "5 runs are missing, about" in said and "with 3 at a time" in said
    # 6 steps of 32 rows of 64
    assert said.count("| 12,288 |") == 5 and "| BERT |" not in said


def test_compute_grows_budget_by_budget_and_says_what_electra_saves(bench):
    for budget in ("5.0e+10flops", "1e11 flops", "2e11 flops"):
        stored, said = bench("compute", "--budget", budget, "--rate", "ELECTRA=0.02", "BERT=0.01", "--seeds", "1")
    names = [row["variant"] for row in stored["families"]["compute"]]
    assert names == [
        f"{side}, {budget}" for side in ("ELECTRA", "BERT") for budget in ("5e10 flops", "1e11 flops", "2e11 flops")
    ]
    # doubling the budget is worth a point, and BERT's rate costs it five
    assert stored["saving"]["crossings"] == "none within the measured range"
    assert stored["saving"]["factor"]["2e+11"] == "at least 4"
    assert "ELECTRA and BERT cross: none within the measured range." in said


def test_crossings_and_factors_are_those_of_straight_lines_over_the_logarithm():
    def row(side, flops, value):
        return {"side": side, "flops": flops, "mean": {"median": value}}

    rows = [row("BERT", 10, 50), row("BERT", 1000, 70), row("ELECTRA", 10, 40), row("ELECTRA", 1000, 80)]
    saved = claim_rows.saving(rows)
    (crossing,) = saved["crossings"]
    assert crossing["flops"] == pytest.approx(100) and crossing["then_ahead"] == "ELECTRA"
    # BERT's 70 is reached 3/4 of the way; its 50 at a quarter
    assert saved["factor"]["1e+03"] == pytest.approx(1000 / 10**2.5)
    assert saved["factor"]["10"] == pytest.approx(10 / 10**1.5)
    behind = claim_rows.saving([*rows[:2], row("ELECTRA", 10, 40), row("ELECTRA", 1000, 60)])
    assert behind["crossings"] == behind["factor"]["1e+03"] == "none within the measured range"
    assert claim_rows.saving(rows[:3]) is None


def test_a_screen_is_judged_by_the_yardstick_where_there_are_no_tasks():
    def record(rate, auc, diverged=False, objective="electra"):
        run = ComparedRun("a", 0, 1, 1.0, 1.0, {"mlm_loss": 10 - auc}, None, diverged)
        measured = {} if diverged or objective == "masked_lm" else {"yardstick": {"auc": auc}}
        stored = {
            "run": vars(run),
            "identity": "i",
            "budget": "3 steps",
            "rate": rate,
            "objective": objective,
            "mean_of": [],
        }
        return stored | measured

    runs = {str(rate): record(rate, auc) for rate, auc in ((1.0, 0.6), (2.0, 0.8))}
    assert claim_rows.screen_of(runs, "i") is None
    runs["3"] = record(3.0, 0.9, diverged=True)
    screen = claim_rows.screen_of(runs, "i")
    assert (screen.best, screen.edge, screen.measure, screen.rates[3.0]) == (2.0, "", "the yardstick's AUC", None)
    masked = {str(rate): record(rate, auc, objective="masked_lm") for rate, auc in ((1.0, 0.9), (2.0, 0.8), (3.0, 0.7))}
    assert claim_rows.screen_of(masked, "i").best == 1.0


def test_rows_that_were_fine_tuned_otherwise_stand_beside_the_others_and_in_no_saving(bench):
    budgets = "--budget", "6 steps, 60 steps", "--seeds", "1"
    before, _ = bench("compute", *budgets)
    assert len(before["saving"]["ELECTRA"]) == 2
    stored, _ = bench("compute", *budgets, "--only", "BERT", "--finetune", "epochs=30")
    assert len(bench.trained) == 2 and stored["saving"] == before["saving"]
    *_, first, other, _, last = (row["variant"] for row in stored["families"]["compute"])
    assert first == "BERT, 6 steps, finetune.evaluations=1" and other == f"{first}, finetune.epochs=30"
    assert last == "BERT, 60 steps, finetune.evaluations=1, finetune.epochs=30"


def test_a_mean_is_of_the_same_tasks_for_all_seeds_and_none_where_one_diverged(bench, monkeypatch):
    real = claim.run_job_if_it_fits
    bench("table5", "--budget", "6 steps", "--only", "ELECTRA", "--seeds", "1")
    stored, _ = bench("table5", "--budget", "6 steps", "--only", "ELECTRA", "--seeds", "2", "--tasks", "cola")
    (row,) = stored["families"]["table5"]
    assert row["mean_of"] == ["cola"] and row["mean"]["seeds"] == row["cola"]["seeds"] and row["seeds"] == 2

    def without_cola(job):
        run = real(job)
        return claim.replace(run, tasks={name: it for name, it in run.tasks.items() if name != "cola"})

    monkeypatch.setattr(claim, "run_job_if_it_fits", without_cola)
    stored, _ = bench("table5", "--budget", "6 steps", "--only", "BERT", "--seeds", "1")
    _, row = stored["families"]["table5"]
    assert "mean" not in row and row["rte"]["median"] > 0
    words = "--budget", "3 steps", "--only", "ELECTRA", "--seeds", "1"
    bench("table5", *words, "--rates", "0.01", "0.02")
    monkeypatch.setattr(claim, "run_job_if_it_fits", real)
    stored, _ = bench("table5", *words, "--rates", "0.04", "0.001")
    assert [screen["rates"]["0.01"] for screen in stored["screens"]] == [None]


def test_other_scripts_keep_what_was_asked_for_alike(tmp_path):
    path, asked = tmp_path / "a.json", {"settings": {"method": "paper"}, "seeds": 3}
    assert robust.kept_row(path, asked) is None
    path.write_text(json.dumps({"score": 1} | asked))
    assert robust.kept_row(path, asked)["score"] == 1
    with pytest.raises(SystemExit, match="measured with another settings"):
        robust.kept_row(path, asked | {"settings": {}})
    path.write_text(json.dumps({"arm": {"name": "a", "model": "one"}, "seconds": 1}))
    for model, expected in (("one", {"seconds": 1}), ("two", {})):
        arm = {"name": "a", "model": model}
        assert screens.Screens([arm], tmp_path, tmp_path, tmp_path, 9).measure(arm) == {"arm": arm, **expected}


def test_the_papers_own_row_is_its_recipe_but_for_the_steps(prepared):
    asked = claim.Claim("paper", "electra-small", (f"data={prepared}",), {}, {}, {}, None)
    (arm,) = asked.arms("ELECTRA-Small", claim.DEFAULTS["paper"].budget)
    (variant,) = arm.stages
    settings = with_steps(resolve(variant.recipe, [*variant.overrides, "run=x"])[0], arm.steps)
    shipped = resolve("electra-small", [f"data={prepared}", "run=x"])[0]
    assert (arm.steps, settings.train.steps, settings.schedule.warmup) == (62_500, 62_500, 10_000)
    assert (settings.optimizer, settings.schedule, settings.encoder) == (
        shipped.optimizer,
        shipped.schedule,
        shipped.encoder,
    )


def test_minimal_pairs_differ_by_one_word_of_one_source():
    rows = [
        ("He ran.", 1, "a"),
        ("He runned.", 0, "a"),
        ("He the ran.", 0, "a"),
        ("He runned.", 0, "b"),
        ("He ran home fast.", 0, "a"),
    ]
    named = [dict(zip(("sentence", "label", "source"), row, strict=True)) for row in rows]
    assert cola_ranking.minimal_pairs(named) == [("He ran.", "He runned."), ("He ran.", "He the ran.")]
    assert cola_ranking.words_apart("a b c", "a x y") == 2 and cola_ranking.words_apart("a b", "a b") == 0


def test_a_masked_language_model_scores_each_token_behind_a_mask(finished_run, tmp_path):
    """As the game of the inspector fills in one place at a time."""
    model = load(finished_run)
    masked = type(model)(model.path, model.generator)
    texts = ["The barak walks the selin.", "The lonute reads."]
    for text, scores in zip(texts, cola_ranking.masked_scores(masked, texts), strict=True):
        tokens = cola_ranking.encode_texts(masked.tokenizer, [text])[0].tokens
        assert len(scores) == len(tokens)
        for place, token in enumerate(tokens):
            ((*proposals,),) = masked.fill(text, [place], top=1000)
            expected = next(it.probability for it in proposals if it.token == token)
            assert np.exp(scores[place]) == pytest.approx(expected, rel=1e-4)


def test_ranking_is_by_what_a_network_knows(finished_run, tmp_path):
    found = cola_ranking.ranking(finished_run, str(write_glue(tmp_path / "glue")))
    assert found["sentences"] == 48 and found["minimal_pairs"] == 48
    assert all(0 <= found[name] <= 1 for name in ("auc", "auc_mean", "pairs", "pairs_mean"))


@pytest.mark.slow
def test_a_real_comparison_goes_on_from_the_file_alone(tmp_path, prepared):
    """Processes, a kill in the middle, another folder of runs."""
    shutil.copytree(BENCH, tmp_path / "bench", ignore=shutil.ignore_patterns("results", "__pycache__"))
    glue, yardstick = write_glue(tmp_path / "glue"), tmp_path / "yardstick"
    electra = [
        sys.executable,
        "-m",
        "electra",
        "pretrain",
        "modern-tiny+masked-lm",
        f"data={prepared}",
        f"run={yardstick}",
    ]
    subprocess.run([*electra, "train.steps=4", "train.batch=4"], check=True)

    def command(out, *words):
        places = [
            "--data",
            prepared,
            "--glue",
            glue,
            "--out",
            tmp_path / out,
            "--base",
            "modern-tiny",
            "--yardstick",
            yardstick,
        ]
        limits = [
            "--tasks",
            "cola",
            "rte",
            "--finetune",
            "epochs=1",
            "--jobs",
            "2",
            "--seeds",
            "1",
            "--budget",
            "6 steps",
        ]
        return [
            sys.executable,
            str(tmp_path / "bench" / "claim.py"),
            *map(str, (*words, "train.batch=4", *places, *limits)),
        ]

    killed = subprocess.run(command("one", "training", "--seconds", "25"), capture_output=True, text=True)
    assert killed.returncode in (0, 75, -15), killed.stderr  # -15: between two runs
    done = subprocess.run(command("two", "training"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stored = json.loads((tmp_path / "bench" / "results" / "claim.json").read_text())
    rows = {row["side"]: row for row in stored["families"]["training"]}
    assert list(rows) == list(claim.families("")["training"])
    assert rows["two-stage"]["steps"] == 6 and all(0 <= row["yardstick"][0]["auc"] <= 1 for row in rows.values())
    after = subprocess.run(command("three", "after"), capture_output=True, text=True)
    assert after.returncode == 0 and "1 of 7 runs are in claim.json already" in after.stderr, after.stderr
    stored = json.loads((tmp_path / "bench" / "results" / "claim.json").read_text())
    ranked = {row["side"] for row in stored["families"]["after"] if "ranking" in row}
    assert {"ELECTRA", "BERT", "electric"} <= ranked
