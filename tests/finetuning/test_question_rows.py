"""SQuAD files of every layout, and what is said about bad ones."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pytest

from electra.base.errors import DataError
from electra.data.tokenizer import load_tokenizer
from electra.finetuning.questions import SpanSettings, TrueAnswer, by_id, nested_layout, read_squad, true_answers

CONTEXT = "Anna lives in Rome. Rome is old."
GOOD = {"id": "1", "question": "Where?", "context": CONTEXT, "answers": [{"text": "Rome", "answer_start": 14}]}
NESTED = {
    "version": "v2.0",
    "data": [
        {
            "title": "T",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {"id": "1", "question": "Where?", "answers": GOOD["answers"], "is_impossible": False},
                        {
                            "id": "2",
                            "question": "When?",
                            "answers": [],
                            "is_impossible": True,
                            "plausible_answers": [{"text": "old", "answer_start": 28}],
                        },
                    ],
                }
            ],
        }
    ],
}
UNPACKED = [
    {**GOOD, "is_impossible": False},
    {"id": "2", "question": "When?", "context": CONTEXT, "answers": [], "is_impossible": True},
]


@pytest.fixture
def problems(toy_model):
    def find(splits, has_unanswerable):
        task = SpanSettings(has_unanswerable=has_unanswerable).build(load_tokenizer(toy_model), 512, splits)
        return list(map(str, task.problems(splits)))

    return find


@pytest.mark.parametrize(
    "pack",
    [bytes, gzip.compress, bz2.compress, lzma.compress, lambda data: pa.compress(data, "zstd", asbytes=True)],
    ids=["plain", "gz", "bz2", "xz", "zst"],
)
def test_squad_files_are_read_whatever_they_are_packed_with_and_called(tmp_path, pack):
    path = tmp_path / "questions"
    path.write_bytes(pack(json.dumps(NESTED).encode()))
    assert read_squad(path) == UNPACKED


def test_version_1_has_no_word_about_impossible_questions(tmp_path):
    older = json.loads(json.dumps(NESTED))
    for question in older["data"][0]["paragraphs"][0]["qas"]:
        del question["is_impossible"]
    (tmp_path / "old.json").write_text("\ufeff" + json.dumps(older, indent=1), "utf-8")
    rows = read_squad(tmp_path / "old.json")
    assert [sorted(row) for row in rows] == 2 * [["answers", "context", "id", "question"]]


def test_rows_are_not_taken_for_articles(tmp_path):
    (tmp_path / "articles.json").write_text(json.dumps(NESTED, indent=1))
    assert nested_layout(tmp_path / "articles.json")
    for number, text in enumerate((json.dumps(GOOD), json.dumps([GOOD]), json.dumps({**GOOD, "id": '"data": ['}))):
        (tmp_path / f"{number}.json").write_text(text)
        assert not nested_layout(tmp_path / f"{number}.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"data": []}', "has no questions"),
        (b'{"data": [{"paragraphs": [{"context": "x"}]}]}', r"data\[0\].paragraphs\[0\] has no 'qas'"),
        (b'{"data": [{"paragraphs": [{"context": "x", "qas": [{"id": 1}]}]}]}', r"qas\[0\] has no 'question'"),
        (b'{"data": [7]}', r"data\[0\] is not laid out"),
        (b'{"data": [\n{"paragraphs":', "is not valid JSON .*line 2"),
        (b'{"rows": 3}', "the file has no 'data'"),
        (b"[1, 2]", "the file is not laid out as SQuAD's"),
        (b'{"data": ["\xff"]}', "not UTF-8"),
        (gzip.compress(json.dumps(NESTED).encode(), mtime=0)[:-30], "cut off or damaged"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path, content, message):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_squad(tmp_path / "bad.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="nothing.json is not a file"):
        read_squad(tmp_path / "nothing.json")


def test_answers_of_both_layouts_and_of_none():
    assert true_answers(GOOD) == [TrueAnswer("Rome", 14)]
    assert true_answers({**GOOD, "answers": {"text": ["Rome", "Rome"], "answer_start": [14, 20]}})[1].start == 20
    assert true_answers({"answers": []}) == true_answers({"is_impossible": True}) == []
    assert true_answers({"question": "Where?"}) is None
    assert true_answers({"is_impossible": False}) is None, "there is an answer, and it is not known"


def test_good_rows_have_no_problems(problems):
    assert problems({"train": UNPACKED}, has_unanswerable=True) == []
    assert problems({"train": [GOOD], "dev": [{**GOOD, "question": "Who?"}]}, has_unanswerable=False) == []
    assert problems({"test": [{"id": 1, "question": "Where?", "context": "Here."}]}, False) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"answers": [{"text": "Rome", "answer_start": 13}]},
            "answer 'Rome' is not at answer_start 13, where the context has ' Rom'. Set answer_start to 14 or 20.",
        ),
        ({"answers": [{"text": "Oslo", "answer_start": 14}]}, "The context lacks it"),
        (
            {"answers": [{"text": "ol", "answer_start": -4}]},
            "not at answer_start -4, where the context has nothing. Set",
        ),
        ({"answers": [{"text": "Rome", "answer_start": 900}]}, "not at answer_start 900, where the context has ''"),
        ({"answers": [{"text": "Rome", "answer_start": "14"}]}, "answer_start '14', not a number"),
        ({"answers": [{"text": " ", "answer_start": 4}]}, "an answer is ' '. Remove it."),
        ({"answers": [{"text": None, "answer_start": 4}]}, "an answer is None. Remove it."),
        ({"answers": ["Rome"]}, "answers is ['Rome'], not a list of {text, answer_start}"),
        ({"answers": 7}, "answers is 7, not a list"),
        ({"answers": {"text": ["a"], "answer_start": []}}, "not a list of {text, answer_start}"),
        ({"answers": []}, "has no answer. Set has_unanswerable = true, or remove the row."),
        ({"answers": None}, "has no answers. Give them"),
        ({"answers": None, "is_impossible": False}, "has no answers. Give them"),
        ({"is_impossible": True}, "is_impossible is true, but there are answers"),
        ({"id": None}, "has no id"),
        ({"id": " "}, "has no id"),
        ({"question": ""}, "no text in 'question'"),
        ({"context": "\n "}, "no text in 'context'"),
        ({"context": None}, "no text in 'context'"),
        ({"question": 5}, "'question' is 5, not text"),
        ({"context": "Anna \ud800 lives"}, "a lone surrogate ('\\ud800') at 5"),
    ],
)
def test_each_problem_is_told_with_row_value_and_remedy(problems, change, message):
    other = {**GOOD, "id": "0", "question": "Who?"}
    found = problems({"train": [other, GOOD | change]}, has_unanswerable=False)
    assert found and found[0].startswith("train row 2: ") and message in found[0]
    assert found[0].endswith(".") and "\n" not in found[0]


def test_ids_given_twice_and_rows_in_both_splits_are_found(problems):
    again = {**GOOD, "question": "Who?"}
    lower = {**GOOD, "id": "2", "question": GOOD["question"].lower() + " "}
    assert problems({"train": [GOOD], "dev": [GOOD, again, lower]}, False) == [
        "dev row 2 has the id '1' of dev row 1",
        "dev row 1 is also train row 1",
        "dev row 3 is also train row 1",
    ]


def test_all_problems_are_returned_not_only_the_first_ones(problems):
    rows = [{**GOOD, "id": str(number), "context": ""} for number in range(50)]
    assert len(problems({"train": rows}, False)) == 50


def test_answers_by_id_are_what_the_official_evaluators_read():
    rows, told = [{"id": 7}, {"id": "x"}], [{"prediction": "Ródos", "score": 1.0}, {"prediction": ""}]
    assert by_id(rows, told) == {"7": "Ródos", "x": ""}
