"""Remembering words must never change an id."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from tokenizers import Tokenizer

from electra.data import encoder as encoder_module
from electra.data.corpus import Corpus
from electra.data.encoder import Encoder, words_are_independent
from electra.data.text import unify_lines
from electra.data.tokenizer import TokenizerSettings, train_tokenizer


def trained(folder: Path, **named: object) -> Tokenizer:
    (folder / "in.txt").write_text("Der Zug fährt, 日本語 がぎ 한국어 x-y z. " * 50, "utf-8")
    return train_tokenizer(Corpus([folder / "in.txt"]), TokenizerSettings(vocab_size=300, **named))


@pytest.fixture(scope="module", params=[True, False])
def wordpiece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    tokenizer = trained(
        tmp_path_factory.mktemp("encoder"), lowercase=request.param, strip_accents=request.param
    )
    assert words_are_independent(tokenizer)
    return tokenizer


def ids(packed: list[bytes], dtype: np.dtype) -> list[list[int]]:
    return [np.frombuffer(line, dtype).tolist() for line in packed]


@given(
    lines=strategies.lists(
        strategies.text(
            strategies.characters(exclude_categories=["Cs"]) | strategies.sampled_from("Zug \t\xa0日.[MASK]")
        )
    )
)
@settings(max_examples=200, deadline=None)
def test_words_one_by_one_give_the_ids_of_the_line(wordpiece: Tokenizer, lines: list[str]) -> None:
    encoder = Encoder(wordpiece)
    lines = [unify_lines(line).replace("\n", " ") for line in lines]
    expected = [wordpiece.encode(line, add_special_tokens=False).ids for line in lines]
    for _ in range(2):
        assert ids(encoder.encode(lines), encoder.dtype) == expected


def test_the_memory_for_words_is_bounded(wordpiece: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "_REMEMBERED_CHARACTERS", 100)
    encoder = Encoder(wordpiece)
    for number in range(100):
        encoder.encode([f"word{number} Zug"])
    assert len(encoder.words) < 30


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_other_kinds_get_whole_lines(tmp_path: Path, kind: str) -> None:
    tokenizer = trained(tmp_path, kind=kind)
    assert not words_are_independent(tokenizer)
    encoder = Encoder(tokenizer)
    line = "Der  Zug\tfährt"
    assert ids(encoder.encode([line]), encoder.dtype) == [
        tokenizer.encode(line, add_special_tokens=False).ids
    ]


def test_a_tokenizer_with_words_of_its_own_gets_whole_lines(wordpiece: Tokenizer) -> None:
    copy = Tokenizer.from_str(wordpiece.to_str())
    copy.add_tokens(["two words"])
    assert not words_are_independent(copy)
