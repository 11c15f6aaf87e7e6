"""Questions about contexts: read from files, their answers in one form, and what is wrong with them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from electra.base.errors import DataError
from electra.data.tables import Row, opened
from electra.finetuning.task import needs_answers

_SURROGATE = re.compile("[\ud800-\udfff]")


class Answer(NamedTuple):
    text: str
    start: int  # of its first character in the context

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def is_nested(path: Path) -> bool:
    """Whether a file has SQuAD's own layout, articles of paragraphs of questions, and not one question a row. Inside a
    text the quotes of `"data"` would be written as \\"."""
    with opened(path) as source:
        head = source.stream.peek(1 << 16)[: 1 << 16].lstrip()
        return head.startswith(b"{") and re.search(rb'"data"\s*:\s*\[', head) is not None


def read_squad(path: Path) -> list[Row]:
    """The questions of SQuAD's own JSON (1.1 or 2.0), plain or compressed."""
    with opened(path) as source:
        text = source.stream.read().decode("utf-8")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}). Correct it.") from None
    match content:
        case {"data": list(articles)}:
            rows = list(_questions(path, articles))
        case _:
            raise DataError(f'{path} has not SQuAD\'s layout (an object with a list "data").')
    if not rows:
        raise DataError(f"{path} has no questions. Check that it is the right file.")
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
        if needs_answers(split):
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


def by_id(
    rows: Sequence[Row], predictions: Sequence[Mapping[str, Any]], column: str = "prediction"
) -> dict[str, Any]:
    """{id: answer}, what the official evaluators and the submission site read; "" is "no answer"."""
    return {str(row["id"]): told[column] for row, told in zip(rows, predictions, strict=True)}
