"""electra speedrun: minutes in, scores and a report out; killed, it goes on."""

import json
import random
import runpy
import shutil
import time
from pathlib import Path

import pytest

from electra.finetuning.report import GLUE
from electra.finetuning.speedrun import FIVE, RECIPE, SpeedrunSettings, beside_table, page, refuse_other_tokenizer
from electra.pretraining.settings import resolve
from electra.train.log import read_metrics
from helpers import Forked, electra, write_corpus

SECONDS = 2.0
METHOD = ("finetune.epochs=1", "finetune.evaluations=1", "finetune.length=24", "finetune.batch=16")
OPTIONS = ("--minutes", SECONDS / 60, "--seeds", 2)


def write_glue(folder: Path, copied: str) -> Path:
    """The five tasks, small; the first dev row of each is a text of the corpus."""
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("dre", "mul", "fos") for b in ("ak", "ute", "in", "owa")]
    for name in FIVE:
        columns = ("sentence",) if name in ("cola", "sst2") else ("sentence1", "sentence2")
        labels = {"rte": ("entailment", "not_entailment"), "stsb": (1.5, 3.0, 4.5)}.get(name, ("0", "1"))
        (folder / name).mkdir(parents=True)
        for split, count in (("train", 24), ("dev", 12)):
            rows = [
                {column: " ".join(rng.choices(words, k=9 + split.count("dev"))) for column in columns}
                | {"label": labels[number % len(labels)]}
                for number in range(count)
            ]
            if split == "dev":
                rows[0][columns[-1]] = copied
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / name / f"{split}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = write_corpus(tmp_path_factory.mktemp("text") / "text.txt").read_text()
    line = text.split("\n\n")[1].splitlines()[0]  # eleven words, in no held-out document by luck of the hash
    return write_glue(tmp_path_factory.mktemp("glue"), line)


@pytest.mark.timeout(240)
def test_a_speedrun_is_killed_and_goes_on_and_reports_everything(recipe, prepared, glue, tmp_path):
    out = tmp_path / "out"
    words = ("speedrun", recipe, f"data={prepared}", f"glue={glue}", *METHOD, *OPTIONS, "--out", out)
    words += ("train.save_minutes=0.002",)
    process = Forked(*words)
    until = time.monotonic() + 90
    while time.monotonic() < until and not any(spent(record) > SECONDS / 2 for record in read_metrics(out / "run")):
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (out / "speedrun.json").exists()

    done = electra(*words)
    assert done.returncode == 0, done.stderr
    assert "resuming at step" in done.stderr and "mean of five" in done.stdout
    result = json.loads((out / "speedrun.json").read_text())
    assert result["minutes"] == SECONDS / 60 and result["seeds"] == 2
    last = [record for record in read_metrics(out / "run") if record["kind"] == "train"][-1]
    assert result["tokens"] == last["tokens"] and result["steps"] == last["step"] > 3
    assert result["wall_clock"]["train"] == pytest.approx(last["training_seconds"], abs=0.01)
    assert last["training_seconds"] == pytest.approx(SECONDS, rel=0.2)  # of few steps, on a busy machine
    assert last["lr"] < 0.2 * 1e-3
    assert result["paper_flops"] > 0 and result["flops"] > 0 and result["tokens_per_second"] > 0

    stored = json.loads((out / "finetune" / "results.json").read_text())["tasks"]
    medians = [100 * stored[name]["median"] for name in FIVE]
    assert result["glue5_median"] == pytest.approx(sum(medians) / 5)
    assert [len(result["tasks"][name]["seeds"]) for name in FIVE] == [2] * 5
    for name in FIVE:
        overlap = result["overlap"][name]
        assert (overlap["rows"], overlap["with_ngram"], overlap["whole_text"]) == (12, 1, 1), name
    report = (out / "report.md").read_text()
    for text in (
        f"{result['glue5_median']:.1f}",
        "| STS-B* | spearman |",
        "| 1 (8.3%) | 1 (8.3%) |",
        "| train | pre-training |",
        "79.9",
    ):
        assert text in report, text
    assert "nothing was selected on dev" in report
    assert f"pooling {result['method']['pooling']}, " in report
    best = page(result | {"method": result["method"] | {"keep": "best"}})
    assert "Weights are chosen on dev" in best and "nothing was selected" not in best
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    for official, cells in ((True, ("–", "44.5", "79.9")), (False, ("–", "44.5*", "79.9"))):
        files = [{"split": "train", "official": official}, {"split": "test", "official": False}]
        eight = {name: {"median": 41.0 + number, "files": files} for number, name in enumerate(GLUE)}
        tables = [beside_table(result).rows, beside_table(result | {"tasks": eight}).rows]
        assert (tables[0][0][-1], tables[1][0][-1], tables[1][-1][-1]) == cells

    assert electra(*words).returncode == 0
    again = json.loads((out / "speedrun.json").read_text())
    clocks = result.pop("wall_clock"), again.pop("wall_clock")
    assert again == result and clocks[1]["total"] == pytest.approx(clocks[0]["total"], rel=0.05)


def spent(record: dict) -> float:
    return record.get("training_seconds", 0.0)


def test_text_is_prepared_first_and_tasks_can_be_chosen(recipe, glue, tmp_path):
    text, out = write_corpus(tmp_path / "text.txt", documents=120), tmp_path / "out"
    vocabulary = tmp_path / "vocab.txt"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz.,", "the", "and", "back"]
    vocabulary.write_text("\n".join([*pieces, *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]) + "\n")
    words = (f"data={text}", f"glue={glue}", f"tokenizer={vocabulary}", "tasks=rte", "--seeds", 1, "--minutes", 0.01)
    done = electra("speedrun", recipe, *words, *METHOD, "finetune.min_steps=9", "--out", out)
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "speedrun.json").read_text())
    assert list(result["tasks"]) == ["rte"] and result["glue5_median"] is None
    assert result["tasks"]["rte"]["steps"] == 10 and "12 rows, 10 steps, seeds: " in (out / "report.md").read_text()
    assert result["wall_clock"]["prepare"] > 0 and (out / "shards" / "manifest.json").is_file()
    assert "not known, since tasks are missing" in (out / "report.md").read_text()

    refuse_other_tokenizer(SpeedrunSettings(text, glue, out, tokenizer=vocabulary), out / "shards")  # the same
    vocabulary.write_text(vocabulary.read_text() + "walks\n")
    done = electra("speedrun", recipe, *words, *METHOD, "--out", out)
    assert done.returncode == 2 and "was started with a tokenizer other than" in done.stderr


def test_more_tasks_are_looked_for_in_the_corpus_and_the_stored_result_keeps_the_rest(
    prepared, glue, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    import machine

    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    stored = {"gpu": "another machine's", "runs": [{"tokens": 7, "overlap": {"cola": {"rows": 3}}}]}
    (tmp_path / "speedrun.json").write_text(json.dumps(stored))
    script = runpy.run_path(str(Path(machine.__file__).parent / "speedrun.py"))
    monkeypatch.setattr("sys.argv", ["speedrun.py", "--overlap", str(prepared), str(glue), "rte", "mrpc"])
    script["main"]()
    result = json.loads((tmp_path / "speedrun.json").read_text())
    overlap = result["runs"][0].pop("overlap")
    assert result == {"gpu": "another machine's", "runs": [{"tokens": 7}]} and overlap.pop("cola") == {"rows": 3}
    assert {name: (it["rows"], it["whole_text"]) for name, it in overlap.items()} == {"rte": (12, 1), "mrpc": (12, 1)}


def test_warm_up_keeps_its_share_of_the_recipe():
    settings = SpeedrunSettings(Path("x"), Path("y"), recipe="tiny", minutes=3)
    assert settings.pretraining(Path("x")).schedule.warmup == 0.1  # 360 of 3,600
    given = SpeedrunSettings(Path("x"), Path("y"), recipe="tiny", words=["schedule.warmup=7"])
    assert given.pretraining(Path("x")).schedule.warmup == 7 and given.pretraining(Path("x")).train.minutes == 10


def test_the_default_recipe_is_one_that_is_shipped():
    settings = SpeedrunSettings(Path("x"), Path("y")).pretraining(Path("x"))
    assert settings.encoder == resolve(RECIPE, ["data=x"])[0].encoder and 0 < settings.schedule.warmup < 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["glue={glue}"], 2, "data is not set. Give it as data=…."),
        (["data={data}"], 2, "glue is not set. Give it as glue=…."),
        (["data={data}", "glue=nowhere"], 3, "nowhere is not a folder."),
        (["data=nowhere", "glue={glue}"], 3, "nowhere does not exist."),
        (["data={data}", "glue={data}"], 3, "has no folder of a GLUE task"),
        (["data={data}", "glue={glue}", "tasks=cola,golf"], 2, "there is no task 'golf'"),
        (["data={data}", "glue={glue}", "tiny", "electra-small"], 2, "one recipe at a time"),
        (
            ["data={data}", "glue={glue}", "train.minutes=3"],
            2,
            "is an option of the command, not a setting: --minutes 3",
        ),
        (
            ["data={data}", "glue={glue}", "train.steps=100"],
            2,
            "here the time ends the run. Set it, as in --minutes 10.",
        ),
        (["data={data}", "glue={glue}", "tokenizer={data}"], 2, "are token shards, which have their tokenizer."),
        (["data={data}", "glue={glue}", "optimiser.lr=1"], 2, "unknown key optimiser. Did you mean optimizer.lr?"),
        (["data={data}", "glue={glue}", "finetune.lrr=1"], 2, "unknown key lrr. Did you mean lr?"),
        (["data={data}", "glue={glue}", "finetune.num_train_epochs=1"], 2, "num_train_epochs. Did you mean epochs?"),
        (["data={data}", "glue={glue}", "train.processes=2"], 2, "train.processes is for a single pre-training run."),
        (["data={data}", "glue={glue}", "--minutes", "0"], 2, "minutes (0.0) must be above 0"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_is_done(words, code, message, prepared, glue, tmp_path):
    filled = [word.format(data=prepared, glue=glue) for word in words]
    done = electra("speedrun", *filled, "--out", tmp_path / "out")
    assert done.returncode == code and message in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_table_that_cannot_be_used_is_refused_before_the_minutes_are_spent(recipe, prepared, glue, tmp_path):
    other = shutil.copytree(glue, tmp_path / "glue")
    (other / "rte" / "dev.jsonl").write_text((other / "rte" / "train.jsonl").read_text())
    done = electra("speedrun", recipe, f"data={prepared}", f"glue={other}", *OPTIONS, "--out", tmp_path / "out")
    assert done.returncode == 3 and "rte: dev row 1" in done.stderr and "shared_rows=allow" in done.stderr
    assert not (tmp_path / "out" / "run").exists()
    words = (f"glue={glue}", "tasks=stsb", "finetune.metric=mse")
    done = electra("speedrun", recipe, f"data={prepared}", *words, *OPTIONS, "--out", tmp_path / "out")
    assert done.returncode == 2 and "stsb: mse is better the lower it is" in done.stderr, done.stderr
    assert not (tmp_path / "out" / "run").exists()
