"""Questions and contexts as people have them: SQuAD's JSON or rows in, the official answer files out."""

import json
import random
from pathlib import Path

import pytest

from electra.data.tables import read_rows
from electra.finetuning.folder import load_task_folder
from electra.finetuning.plan import make_plan
from electra.finetuning.predict import load_predictor
from electra.finetuning.questions import squad1
from helpers import electra, write_table

FAST = ("epochs=6", "lr=4e-3", "batch=16", "evaluations=2", "length=40", "max_query_length=8", "doc_stride=12")
NOUNS = ("barak", "lonute", "timin", "gorowa")


def questions(count: int, seed: int, unanswerable: bool = False) -> list[dict]:
    """Who walks? The word before "walks"; some contexts have none."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        words = [rng.choice(["the", "and", "back", *NOUNS]) for _ in range(rng.randint(3, 20))]
        place = rng.randrange(len(words))
        answered = not (unanswerable and number % 3 == 0)
        if answered:
            words[place : place + 1] = [rng.choice(NOUNS), "walks"]
        context = " ".join(["The", *words, f"{seed}{number}."])
        start = len(" ".join(["The", *words[:place], ""]))
        answers = [{"text": words[place], "answer_start": start}] if answered else []
        row = {"id": f"{seed}-{number}", "question": "who walks", "context": context, "answers": answers}
        made.append({**row, "is_impossible": not answered} if unanswerable else row)
    return made


def nested(rows: list[dict]) -> dict:
    def paragraph(row: dict) -> dict:
        return {"context": row["context"], "qas": [{key: row[key] for key in row if key != "context"}]}

    return {"version": "2.0", "data": [{"title": "t", "paragraphs": [paragraph(row) for row in rows]}]}


def write_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def out(toy_model, tmp_path_factory) -> Path:
    """The shipped task, its files called as the official ones."""
    folder = tmp_path_factory.mktemp("squad")
    write_json(folder / "train-v1.1.json", nested(questions(100, 1)))
    write_json(folder / "dev-v1.1.json", nested(questions(30, 2)))
    out = folder / "out"
    done = electra("finetune", toy_model, "squad1", f"data={folder}", *FAST, "--seeds", 2, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "dev: dev-v1.1.json, 30 rows, NOT the official set of 10,570" in done.stderr
    return out


@pytest.fixture(scope="module")
def model(out) -> Path:
    return out / "squad1" / "seed-0"


@pytest.fixture(scope="module", params=["plain", "joint"])
def second(request, toy_model, tmp_path_factory) -> Path:
    """SQuAD 2.0 with a threshold that is fitted on dev: a task of one's own in one TOML file."""
    folder = tmp_path_factory.mktemp("squad2")
    write_table(folder / "train.jsonl", questions(100, 1, True))
    write_json(folder / "dev.json", nested(questions(40, 2, True)))
    toml = folder / "mine.toml"
    toml.write_text(
        f'kind = "span"\nhas_unanswerable = true\nhead = "{request.param}"\nnull_threshold = "dev"\nmetric = "exact"\n'
    )
    out = folder / "out"
    done = electra("finetune", toy_model, toml, f"data={folder}", *FAST, "--seeds", 2, "--out", out)
    assert done.returncode == 0, done.stderr
    said = "mine: transformers has no class for this head; it reads the encoder, electra reads all"
    assert (said in done.stderr) == (request.param == "joint")
    return out


def test_results_have_exact_match_and_f1(out):
    results = json.loads((out / "results.json").read_text())["tasks"]["squad1"]
    assert results["metric"] == "f1" and results["median"] > 0.4
    assert results["ensemble"].keys() == {"f1", "exact"}


def test_the_folder_loads_in_transformers_with_the_logits_of_ours(model):
    """transformers 5 has given up its question-answering pipeline: what is compared is what it decoded."""
    import torch

    from electra.finetuning.training import infer

    transformers = pytest.importorskip("transformers")
    network = transformers.AutoModelForQuestionAnswering.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ours = load_task_folder(model)
    for row in questions(6, 3):
        given = tokenizer(row["question"], row["context"], return_tensors="pt")
        examples, _ = ours.task.encode([row])
        if len(examples) > 1:
            continue
        outputs = infer(ours.model, ours.task, examples, ours.method)
        assert list(examples[0].ids) == given["input_ids"][0].tolist()
        with torch.no_grad():
            theirs = network(**given)
        for name in ("start_logits", "end_logits"):
            assert outputs[0][name] == pytest.approx(theirs[name][0].numpy(), abs=1e-5)


def test_answers_to_squad_files_are_what_the_official_evaluator_reads(model, tmp_path):
    rows = questions(25, 4)
    file = write_json(
        tmp_path / "test.json", nested([{k: v for k, v in row.items() if k != "answers"} for row in rows])
    )
    done = electra("predict", model, file, "--probabilities", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = ", ".join(str(tmp_path / f"test.predictions.{name}") for name in ("json", "nbest.json"))
    assert f"{written}: 25 rows" in done.stdout
    (tmp_path / "test.predictions.json").rename(tmp_path / "said.json")
    again = electra("predict", model, file, "--probabilities")
    assert again.returncode == 2 and "test.predictions.nbest.json is there already" in again.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert list(said) == [row["id"] for row in rows]
    best = json.loads((tmp_path / "test.predictions.nbest.json").read_text())
    assert all(best[name][0]["text"] == text and best[name][0]["probability"] <= 1 for name, text in said.items())
    scores = squad1(list(said.values()), [[answer["text"] for answer in row["answers"]] for row in rows])
    with_answers = write_json(tmp_path / "gold.json", nested(rows))
    figures = electra("evaluate", model, with_answers, "--json")
    assert json.loads(figures.stdout)["scores"] == {"f1": scores["f1"], "exact": scores["exact"]}
    assert electra("predict", model, file, "--out", tmp_path / "x.jsonl").returncode == 2


def test_two_questions_with_one_id_are_refused_where_answers_go_by_id(model, tmp_path):
    rows = questions(3, seed=6)
    file = write_json(tmp_path / "test.json", nested([*rows, {**rows[0], "question": "who jumps"}]))
    done = electra("predict", model, file)
    assert done.returncode == 3 and "test.json row 4 has the id '6-0' of test.json row 1" in done.stderr, done.stderr
    assert not (tmp_path / "test.predictions.json").exists()


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_rows_come_back_as_rows(model, tmp_path, kind, monkeypatch):
    monkeypatch.setattr("electra.finetuning.predict.CHUNK", 4)
    rows = questions(10, 4)
    file = write_table(tmp_path / f"new.{kind}", rows)
    done = electra("predict", model, file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = list(read_rows(tmp_path / f"new.predictions.{kind}"))
    assert [list(row) for row in found] == 10 * [["id", "question", "context", "answers", "prediction", "score"]]
    assert all(row["prediction"] in row["context"] for row in found)
    flat = json.loads(electra("evaluate", model, file, "--json").stdout)
    official = json.loads(electra("evaluate", model, write_json(tmp_path / "o.json", nested(rows)), "--json").stdout)
    assert flat == official


def test_the_threshold_is_fitted_on_dev_saved_with_the_model_and_used(second, tmp_path):
    results = json.loads((second / "results.json").read_text())["tasks"]["mine"]
    for page in (second / "results.md", second / "mine" / "seed-0" / "README.md"):
        assert "null_threshold that is best for dev: they are optimistic" in page.read_text()
    for scores in results["scores"]["dev"].values():
        assert scores["exact"] == scores["best_exact"] >= 1 / 3
    model = second / "mine" / "seed-1"
    threshold = json.loads((model / "task.json").read_text())["task"]["null_threshold"]
    assert threshold == results["scores"]["dev"]["seed 1"]["best_exact_threshold"]
    rows = questions(12, 5, True)
    done = electra("predict", model, write_json(tmp_path / "t.json", nested(rows)), "--probabilities", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said, null = (json.loads((tmp_path / f"t.predictions{it}.json").read_text()) for it in ("", ".null"))
    assert all((said[name] == "") == (null[name] > threshold) for name in said)
    figures = json.loads(electra("evaluate", model, tmp_path / "t.json", "--json").stdout)["scores"]
    assert {"best_exact", "best_f1", "has_answer_f1", "no_answer_exact"} <= figures.keys()


def test_what_is_said_of_the_rows_is_said_with_the_fitted_threshold(second):
    ensemble = json.loads((second / "results.json").read_text())["tasks"]["mine"]["scores"]["dev"]["ensemble"]
    wrong = (second / "mine" / "wrong.jsonl").read_text().splitlines()
    assert len(wrong) == round(40 * (1 - ensemble["exact"]))
    folders = [second / "mine" / f"seed-{seed}" for seed in range(2)]
    thresholds = [json.loads((it / "task.json").read_text())["task"]["null_threshold"] for it in folders]
    together = load_predictor(second / "mine").task.settings.null_threshold
    assert thresholds[0] != thresholds[1] and together == pytest.approx(sum(thresholds) / 2)


def test_an_ensemble_of_beams_is_made_of_answers(second):
    """Positions have no mean: two joint heads look at different spans."""
    from safetensors.numpy import load_file

    from electra.finetuning.report import unpack

    folders = [second / "mine" / f"seed-{seed}" for seed in range(2)]
    task = load_task_folder(folders[0]).task
    rows = questions(40, 2, True)
    examples, _ = task.encode(rows)
    runs = [unpack(load_file(folder / "outputs-dev.safetensors")) for folder in folders]
    members = [task.predict(rows, examples, run) for run in runs]
    said = task.ensemble(rows, examples, runs)
    for one, other, both in zip(*members, said, strict=True):
        nulls = one["null_score_difference"], other["null_score_difference"]
        if task.settings.head == "joint":
            assert both["null_score_difference"] == pytest.approx(sum(nulls) / 2)
        texts = {answer["text"] for answer in one["n_best"] + other["n_best"]}
        assert both["span"] in texts


def test_questions_about_one_paragraph_stay_on_one_side(tmp_path):
    rows = [
        {**row, "id": f"{row['id']}-{n}", "question": f"who walks {n}"} for row in questions(20, 6) for n in range(3)
    ]
    plan = make_plan(str(write_table(tmp_path / "mine.jsonl", rows)), {}, {})
    splits = plan.splits
    assert plan.task.kind == "span" and len(splits["dev"]) == 6 and len(splits["train"]) == 54
    assert not {row["context"] for row in splits["dev"]} & {row["context"] for row in splits["train"]}


def test_a_shipped_task_takes_one_file_as_its_training_data(toy_model, tmp_path):
    file = write_json(tmp_path / "any.json", nested(questions(20, 6)))
    dev = write_json(tmp_path / "other.json", nested(questions(8, 8)))
    words = ("epochs=1", "length=40", "max_query_length=8", "--dev", dev, "--out", tmp_path / "out")
    done = electra("finetune", toy_model, "squad1", f"data={file}", *words)
    assert done.returncode == 0, done.stderr
    assert "squad1: train: any.json, 20 rows" in done.stderr and "dev: other.json, 8 rows" in done.stderr


def test_squad_s_own_layout_is_known_without_a_word(toy_model, tmp_path):
    file = write_json(tmp_path / "any.json", nested(questions(20, 6)))
    words = ("epochs=1", "length=40", "max_query_length=8", "--out", tmp_path / "out")
    assert electra("finetune", toy_model, file, *words).returncode == 0
    refused = electra("finetune", toy_model, file, "--text", "context", *words)
    assert refused.returncode == 2 and "do not fit questions" in refused.stderr


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"answers": [{"text": "The", "answer_start": 1}]}, ("answer 'The' is not at answer_start 1", "Set answer_start to 0")),
        ({"answers": [{"text": "nowhere", "answer_start": 0}]}, ("The context lacks it",)),
        ({"answers": []}, ("has no answer. Set has_unanswerable = true",)),
        ({"question": " "}, ("no text in 'question'",)),
        ({"id": "7-0"}, ("has the id '7-0' of train row 1",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_problems_of_questions_are_told_together_and_nothing_is_written(toy_model, tmp_path, change, parts, layout):
    rows = questions(24, 7)
    for place in (4, 9):
        rows[place] |= change
    train = write_json(tmp_path / "t.json", nested(rows) if layout == "nested" else rows)
    dev = write_json(tmp_path / "d.json", [{**rows[1], "id": "dev"}])
    out = tmp_path / "out"
    words = ("kind=span", "--dev", dev, "length=40", "max_query_length=8", "--out", out)
    done = electra("finetune", toy_model, train, *words)
    assert done.returncode == 3, done.stderr
    assert "(3 problems)" in done.stderr and not out.exists()
    assert "dev row 1 is also train row 2" in done.stderr
    for part in ("train row 5", "train row 10", *parts):
        assert part in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([{"id": 1, "question": "who"}], "no column 'context' (there are id, question)"),
        ([{"id": 1, "question": "who", "context": 3}], "row 1: 'context' is 3, not text"),
        ([{"id": 1, "question": "who", "context": "x", "score": 3}], "has a column 'score' already"),
    ],
)
def test_rows_that_ask_nothing_are_refused(model, tmp_path, rows, part):
    done = electra("predict", model, write_table(tmp_path / "new.jsonl", rows), cwd=tmp_path)
    assert done.returncode == 3 and part in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["new.jsonl"]
