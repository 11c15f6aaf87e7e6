"""Questions about contexts: read from files, their answers in one form, and what is wrong with them."""

import json
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from electra.data.sources import Source, open_source
from electra.errors import DataError, MachineError
from electra.files import write_json
from electra.finetune.task import Row

_SURROGATE = re.compile("[\ud800-\udfff]")
LABELLED = ("train", "dev")
"""Splits that are of no use without answers."""


class Answer(NamedTuple):
    text: str
    start: int  # of its first character in the context

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def read_squad(path: Path) -> list[Row]:
    """The questions of a file, plain or compressed: SQuAD's own JSON (1.1 or 2.0), or flat rows of id, question,
    context and answers, as JSON lines or one JSON list. Flat rows are as they are; `problems` looks at them."""
    text = _read(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        content = _json_lines(path, text, error)
    match content:
        case {"data": list(articles)}:
            rows = list(_questions(path, articles))
        case list() if all(isinstance(row, dict) for row in content):
            rows = content
        case {"question": _}:
            rows = [content]
        case _:
            raise DataError(
                f'{path} has neither SQuAD\'s layout (a list "data") nor rows of id, question, context and answers.'
            )
    if not rows:
        raise DataError(f"{path} has no questions. Check that it is the right file.")
    return rows


def _read(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{path} does not exist or is not a file. Check the path.")
    try:
        opened = open_source(Source(path, path.name, path.stat().st_size))
        with opened.raw, opened.stream:
            return opened.stream.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} has bytes that are not UTF-8 at byte {error.start}. Convert it.") from None
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is cut off or damaged ({' '.join(str(error).split())}). Fetch it again."
        ) from None


def _json_lines(path: Path, text: str, whole: Exception) -> list[Any]:
    """`whole` is what was wrong with the file as one document: the better message where not even a line is right."""
    rows: list[Any] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            where, why = (f" line {number}", error) if rows else ("", whole)
            raise DataError(f"{path}{where} is not valid JSON ({why}). Correct it.") from None
    return rows


def _questions(path: Path, articles: Sequence[Any]) -> Iterator[Row]:
    where = "data"
    try:
        for a, article in enumerate(articles):
            where = f"data[{a}]"
            for p, paragraph in enumerate(article["paragraphs"]):
                where = f"data[{a}].paragraphs[{p}]"
                context = paragraph["context"]
                for q, question in enumerate(paragraph["qas"]):
                    where = f"data[{a}].paragraphs[{p}].qas[{q}]"
                    row = {"id": question["id"], "question": question["question"], "context": context}
                    for key in ("answers", "is_impossible"):
                        if key in question:
                            row[key] = question[key]
                    yield row
    except KeyError as error:
        raise DataError(f"{path}: {where} has no {error.args[0]!r}. Give it as SQuAD does.") from None
    except TypeError:
        raise DataError(f"{path}: {where} is not laid out as SQuAD's files are. Correct it.") from None


def answers_of(row: Row) -> list[Answer] | None:
    """The true answers; empty where the question has none, None where nothing is said about them. A list of
    {text, answer_start} as in SQuAD's files, or {text: […], answer_start: […]} as `datasets` has it."""
    answers = row.get("answers")
    if row.get("is_impossible"):
        return []
    match answers:
        case None:
            return None if row.get("is_impossible") is None else []
        case {"text": texts, "answer_start": starts}:
            return [Answer(text, start) for text, start in zip(texts, starts, strict=True)]
        case _:
            return [Answer(answer["text"], answer["answer_start"]) for answer in answers]


def problems(splits: Mapping[str, Sequence[Row]], has_unanswerable: bool) -> list[str]:
    """One line for each thing that is wrong, with split, row (the first is 1), value and remedy."""
    found: list[str] = []
    training: dict[tuple[str, str], int] = {}
    for split, rows in splits.items():
        seen: dict[str, int] = {}
        for number, row in enumerate(rows, 1):
            mine = [*_identity(row, number, seen), *_texts(row)]
            if not mine:
                mine += _answers(row, split, has_unanswerable)
                key = (row["question"], row["context"])
                if split == "train":
                    training.setdefault(key, number)
                elif key in training:
                    mine.append(
                        f"the same question about the same context is train row {training[key]}. Remove one."
                    )
            found += [f"{split} row {number}: {problem}" for problem in mine]
    return found


def _identity(row: Row, number: int, seen: dict[str, int]) -> Iterator[str]:
    name = row.get("id")
    if name is None or not str(name).strip():
        yield "has no id. Give every question one."
        return
    first = seen.setdefault(str(name), number)
    if first != number:
        yield f"id {str(name)!r} is row {first}'s already. Give each question its own."


def _texts(row: Row) -> Iterator[str]:
    for column in ("question", "context"):
        match row.get(column):
            case None:
                yield f"has no {column}. Give it, or name the column that holds it."
            case str(text) if not text.strip():
                yield f"the {column} is empty ({text!r}). Fill it or remove the row."
            case str(text) if half := _SURROGATE.search(text):
                yield f"the {column} has half a character ({half[0]!r}) at {half.start()}. Write the file again."
            case str():
                pass
            case value:
                yield f"the {column} is {value!r}, not text. Correct it."


def _answers(row: Row, split: str, has_unanswerable: bool) -> Iterator[str]:
    try:
        answers = answers_of(row)
    except (KeyError, TypeError, ValueError, AttributeError):
        yield f"answers is {row['answers']!r}, not a list of {{text, answer_start}}. Correct it."
        return
    if answers is None:
        if split in LABELLED:
            yield "has no answers. Give them, or is_impossible = true where there is none."
        return
    if row.get("is_impossible") and row.get("answers"):
        yield "is_impossible is true, but there are answers. Remove one of the two."
    if not answers and not has_unanswerable:
        yield "has no answer. Set has_unanswerable = true, or remove the row."
    for answer in answers:
        yield from _place(answer, row["context"])


def _place(answer: Answer, context: str) -> Iterator[str]:
    text, start = answer
    if not isinstance(text, str) or not text.strip():
        yield f"an answer is {text!r}. Remove it."
    elif isinstance(start, bool) or not isinstance(start, int):
        yield f"answer {text!r} has answer_start {start!r}, not a number of characters. Correct it."
    elif start < 0 or context[start : answer.end] != text:
        places = _occurrences(text, context)
        remedy = (
            f"Set answer_start to {' or '.join(map(str, places))}."
            if places
            else "It is nowhere in the context: remove it or correct its text."
        )
        there = (
            f"where the context has {context[start : answer.end]!r}" if start >= 0 else "a negative number"
        )
        yield f"answer {text!r} is not at answer_start {start}, {there}. {remedy}"


def _occurrences(text: str, context: str, most: int = 3) -> list[int]:
    places: list[int] = []
    at = context.find(text)
    while at >= 0 and len(places) < most:
        places.append(at)
        at = context.find(text, at + 1)
    return places


def write_squad_predictions(
    path: Path, rows: Sequence[Row], predictions: Sequence[Mapping[str, Any]]
) -> None:
    """{id: answer}, what the official evaluators and the submission site read; "" is "no answer"."""
    content = {str(row["id"]): told["answer"] for row, told in zip(rows, predictions, strict=True)}
    try:
        write_json(path, content)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}. Choose another place.") from None
