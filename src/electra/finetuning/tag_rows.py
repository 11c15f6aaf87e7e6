"""Rows of words and tags: which columns they are in, which tags there are, and everything that can be wrong with them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import numpy as np
from pydantic import Field, model_validator

from electra.base.config import Settings
from electra.data.tables import Row
from electra.finetuning.spans import MARKS, Scheme, all_tags, fits, legal
from electra.finetuning.task import needs_answers


class TaggingSettings(Settings):
    """`scheme` is how spans are written in the files, and in the answers; "none" is one plain tag a word (parts of
    speech). The network may learn another scheme: the original turns everything into bioes first. `metric` is the
    headline, by default f1 of spans and accuracy where there are none. `labels` are what the network tells apart, in
    the order of its outputs; empty: every tag that the types in train can have. `token_column` and `tag_column` are for
    column files (conll.py). `files` names the file of each split in the folder that holds the data."""

    kind: Literal["tagging"] = "tagging"
    name: str = ""
    tokens: str = "tokens"
    tags: str = "tags"
    scheme: Literal["iob1", "iob2", "bioes", "none"] = "iob2"
    train_scheme: Literal["as read", "iob1", "iob2", "bioes"] = "as read"
    metric: Literal["f1", "accuracy"] = "f1"
    epochs: int = Field(3, ge=1)
    length: int = Field(256, ge=8)
    token_column: int = 0
    tag_column: int = -1
    labels: tuple[str, ...] = ()
    files: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def metric_follows_scheme(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("scheme") == "none":
            return {"metric": "accuracy", **given}
        return given

    @model_validator(mode="after")
    def parts_fit(self) -> "TaggingSettings":
        if self.scheme == "none" and (self.metric == "f1" or self.train_scheme != "as read"):
            raise ValueError(
                'scheme "none" has no spans: metric must be "accuracy" and train_scheme "as read"'
            )
        if len(set(self.labels)) < len(self.labels) or len(self.labels) == 1:
            raise ValueError("labels must be at least two different tags, or none to take those of train")
        learned = self.learned
        if learned and (wrong := [label for label in self.labels if not fits(label, learned)]):
            raise ValueError(f"labels: {wrong[0]!r} is not {described(learned)}")
        return self

    @property
    def spans(self) -> Scheme | None:
        return None if self.scheme == "none" else self.scheme

    @property
    def learned(self) -> Scheme | None:
        """The scheme of the network's labels; None for plain tags."""
        return self.spans if self.train_scheme == "as read" else self.train_scheme

    @property
    def columns(self) -> dict[str, int]:
        """What `read_conll` asks for."""
        return {self.tokens: self.token_column, self.tags: self.tag_column}

    def learn(self, tags: Sequence[str]) -> list[str]:
        """Tags as read -> tags as the network learns them."""
        return list(tags) if self.train_scheme == "as read" else legal(tags, self.train_scheme)


def train_labels(settings: TaggingSettings, rows: Sequence[Row]) -> tuple[str, ...]:
    """Rows may still be wrong in any way here: `find_problems` says so later."""
    found = {tag for tag in tags_of(settings, rows) if isinstance(tag, str)}
    if settings.spans is None or settings.learned is None:
        return tuple(sorted(found))
    types = {tag.partition("-")[2] for tag in found if tag != "O" and fits(tag, settings.spans)}
    return tuple(all_tags(types, settings.learned))


def tags_of(settings: TaggingSettings, rows: Sequence[Row]) -> Iterator[Any]:
    for row in rows:
        tags = row.get(settings.tags)
        if is_list(tags):
            yield from tags


def find_problems(settings: TaggingSettings, splits: Mapping[str, Sequence[Row]]) -> list[str]:
    """One line for each wrong row, with the first thing that is wrong with it: what comes after often follows from it.
    Of test splits tags are looked at only where some row has them. `settings` has its labels."""
    found: list[str] = []
    for split, rows in splits.items():
        tagged = needs_answers(split) or any(settings.tags in row for row in rows)
        columns = [settings.tokens, settings.tags] if tagged else [settings.tokens]
        absent = [name for name in columns if not any(name in row for row in rows)]
        if not rows:
            found.append(f"{split}: no rows. Give a file with at least one sentence.")
        elif absent:
            has = ", ".join(map(repr, rows[0]))
            found += [
                f"{split}: no column {name!r} (there are {has}). Set tokens and tags of the task to your columns."
                for name in absent
            ]
        else:
            problems = (row_problem(settings, row, columns) for row in rows)
            found += [f"{split} row {number}: {it}" for number, it in enumerate(problems, 1) if it]
    used = {repr(tag) for tag in tags_of(settings, splits.get("train", ()))}
    if len(used) == 1:
        found.append(
            f"train: every word has the tag {used.pop()}. Give at least two different tags to learn."
        )
    return found


def row_problem(settings: TaggingSettings, row: Row, columns: Sequence[str]) -> str | None:
    for name in columns:
        values = row.get(name)
        if values is None:
            return f"{name!r} is missing. Give it, or remove the row."
        if not is_list(values):
            return f"{name!r} is {short(values)}, not a list. Give a list with one text for each word."
        for place, value in enumerate(values, 1):
            if not isinstance(value, str):
                return f"{name!r} has {short(value)} for word {place}, not text. Write it as text."
    words = row[settings.tokens]
    for place, word in enumerate(words, 1):
        if any("\ud800" <= character <= "\udfff" for character in word):
            return f"word {place} ({word!a}) is not valid Unicode. Replace it."
    return tag_problem(settings, words, row[settings.tags]) if settings.tags in columns else None


def tag_problem(settings: TaggingSettings, words: Sequence[str], tags: Sequence[str]) -> str | None:
    def at(place: int) -> str:
        return f"tag {tags[place]!r} of word {place + 1} ({short(words[place])})"

    if len(words) != len(tags):
        text = short(" ".join(words))
        return f"{len(words)} words but {len(tags)} tags (words: {text}). Give each word one tag."
    if len(words) == 0:
        return "no words. Remove the row."
    if scheme := settings.spans:
        for place, tag in enumerate(tags):
            if not fits(tag, scheme):
                return f"{at(place)} is not {described(scheme)}. Correct it, or set scheme."
        for place, (tag, right) in enumerate(zip(tags, legal(tags, scheme), strict=True)):
            if tag != right:
                after = f"after {tags[place - 1]}" if place else "at the start"
                return f"{at(place)} {after} must be {right} in {scheme}. Correct it, or set scheme to the file's."
    for place, tag in enumerate(settings.learn(tags)):
        if tag not in settings.labels:
            known = short(", ".join(settings.labels))
            return (
                f"{at(place)} is not among {known}. Correct it, add it to train, or list all tags in labels."
            )
    return None


def is_list(values: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(values, list | tuple | np.ndarray)


def is_texts(values: Any) -> TypeGuard[Sequence[str]]:
    return is_list(values) and all(isinstance(value, str) for value in values)


def described(scheme: Scheme) -> str:
    return f"a tag of {scheme} (O, {', '.join(f'{mark}-TYPE' for mark in MARKS[scheme])})"


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
