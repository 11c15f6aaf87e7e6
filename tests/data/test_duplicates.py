"""Copies are found, whatever was counted against exact sets; what filters remove is counted; no copy is on both sides."""

import json
import random
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from electra.data.filters import (
    SHINGLE,
    FilterSettings,
    bands_for,
    fingerprint,
    identifier,
    in_heldout,
    near_fingerprint,
    normalised,
    removed_by,
    repeated,
    shingle_hashes,
    text_hash,
)
from electra.data.plan import PrepareSettings
from electra.data.prepare import finish_units, plan_units, prepare, run_share
from electra.data.shards import verify_shards
from helpers import decoded, electra

WORDS = [f"{a}{b}" for a in ("bar", "lon", "tim", "gor", "sel") for b in ("ak", "ute", "in", "owa", "e")]


@pytest.fixture(scope="module")
def tokenizer(prepared: Path) -> Path:
    return prepared / "tokenizer.json"


def jaccard(first: str, second: str) -> float:
    def grams(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[n : n + SHINGLE]) for n in range(max(1, len(words) - SHINGLE + 1))}

    a, b = grams(first), grams(second)
    return len(a & b) / len(a | b)


def changed(text: str, share: float, rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) if rng.random() < share else word for word in text.split())


@pytest.fixture(scope="module")
def pairs() -> list[tuple[float, bool]]:
    """Pairs of texts from unlike to alike: their exact Jaccard, and whether a band agrees."""
    rng, rows = random.Random(1), bands_for(0.8)
    found = []
    for number in range(1500):
        text = " ".join(rng.choices(WORDS, k=rng.randint(60, 300)))
        other = changed(text, number / 1500 * 0.2, rng)
        first, second = (near_fingerprint(it, 0, *rows) for it in (text, other))
        found.append((jaccard(text, other), bool((first == second).any())))
    return found


def test_near_copies_are_found_as_often_as_the_formula_says(pairs: list[tuple[float, bool]]) -> None:
    """1 - (1 - J^r)^b, within four standard errors, over bins of the exact Jaccard."""
    bands, rows = bands_for(0.8)
    assert 1 - (1 - 0.8**rows) ** bands >= 0.9
    for low, high in pairwise([0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.01]):
        bin_ = [(share, met) for share, met in pairs if low <= share < high]
        assert len(bin_) > 30
        expected = np.mean([1 - (1 - share**rows) ** bands for share, _ in bin_])
        error = max(0.01, (expected * (1 - expected) / len(bin_)) ** 0.5)
        assert abs(np.mean([met for _, met in bin_]) - expected) < 4 * error, (low, high)


def test_shingles_are_sets_of_five_words_and_of_characters_where_no_spaces_are() -> None:
    assert len(set(shingle_hashes("a b c d e f a b c d e f").tolist())) == 6
    assert len(shingle_hashes("a b c")) == 1 and len(shingle_hashes("... !")) == 0
    assert len(shingle_hashes("日本語の文章です")) == 8 - SHINGLE + 1
    same = near_fingerprint("a, b. c d e f", 0, 8, 16) == near_fingerprint("a b c d e f!", 0, 8, 16)
    assert same.all()
    long = " ".join(str(number) for number in range(10_000))
    assert (near_fingerprint(long, 0, 8, 16) == near_fingerprint(long, 1, 8, 16)).all()


@given(text=strategies.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_case_spacing_and_forms_do_not_matter(text: str) -> None:
    assert fingerprint(f"  {text}\n", 0) == fingerprint(text, 0)
    assert normalised("Ｆｕｌｌ  Width\tﬁ") == "full width fi"


@pytest.mark.parametrize("memory", [1 << 28, 200])
def test_repeats_are_found_in_little_memory(memory: int) -> None:
    rng = np.random.default_rng(1)
    parts = [rng.integers(0, 60, (size, 3), dtype=np.uint64) for size in (30, 0, 50)]
    rows = np.concatenate(parts)
    expected = [any((rows[:n, c] == rows[n, c]).any() for c in (1, 2)) for n in range(len(rows))]
    assert repeated(lambda: parts, range(1, 3), memory).tolist() == expected and 10 < sum(expected) < 70
    assert in_heldout(lambda: parts[:1], lambda: parts[1:]).tolist() == np.isin(rows[30:, 0], rows[:30, 0]).tolist()
    assert repeated(lambda: [], range(1)).tolist() == in_heldout(lambda: [], lambda: []).tolist() == []


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 documents; of each a copy in capitals and one with few words changed follow, far away."""
    rng, folder = random.Random(2), tmp_path_factory.mktemp("copies")
    texts = [" ".join(rng.choices(WORDS, k=120)) for _ in range(200)]
    near = [f"{WORDS[0]} {text}" for text in texts]
    every = [*texts, *(text.upper() for text in texts), *near]
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in every))
    return folder / "in.jsonl"


def test_no_text_is_on_both_sides_but_for_case(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    wanted = PrepareSettings(heldout_share=0.3, unit_bytes=30_000)
    manifest = prepare([corpus], tmp_path / "out", tokenizer, wanted, workers=1)
    sides = {split: {normalised(text) for text in decoded(tmp_path / "out", split)} for split in ("train", "heldout")}
    assert not sides["train"] & sides["heldout"] and len(sides["heldout"]) > 60
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    held = [text_hash(text) < int(0.3 * 2**64) for text in texts]
    copies = sum(one != other for one, other in zip(held[:200], held[200:400], strict=True))
    assert manifest.removed_documents == {"copies of held-out documents": copies} and copies > 50
    assert sum(split.documents for split in manifest.splits.values()) == 600 - copies
    assert verify_shards(tmp_path / "out") == []


@pytest.mark.parametrize(("kind", "left"), [("exact", 400), ("near", 200)])
def test_copies_are_removed_and_the_first_is_kept(
    corpus: Path, tokenizer: Path, tmp_path: Path, kind: str, left: int
) -> None:
    wanted = PrepareSettings(heldout_share=0.1, unit_bytes=30_000, duplicates=kind)
    manifest = prepare([corpus], tmp_path / "out", tokenizer, wanted, workers=1)
    assert manifest.removed_documents == {"exact copies": 200, **({"near copies": 200} if kind == "near" else {})}
    assert sum(split.documents for split in manifest.splits.values()) == left
    assert verify_shards(tmp_path / "out") == [] and list((tmp_path / "out").glob("*-k.safetensors"))
    kept = [normalised(text) for split in ("train", "heldout") for text in decoded(tmp_path / "out", split)]
    assert len(set(kept)) == left
    plan_units([corpus], tmp_path / "array", tokenizer, wanted)
    run_share(tmp_path / "array", 0, 1)
    finish_units(tmp_path / "array")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("out", "array")]
    assert files[0] == files[1] and files[0][".lock"] == b""


@pytest.mark.parametrize(
    ("text", "filters", "reason"),
    [
        ("short", {"min_characters": 6}, "min_characters"),
        ("longer", {"min_characters": 6, "max_characters": 6}, None),
        ("too long", {"max_characters": 7}, "max_characters"),
        ("English words, 日本語", {"script": "latin"}, None),
        ("ab 日本語", {"script": "latin"}, "script_share"),
        ("ab 日本語", {"script": "han", "script_share": 0.6}, None),
        ("日本語のテキスト", {"script": "kana"}, None),
        ("Привет, мир", {"script": "cyrillic", "script_share": 1}, None),
        ("한국어 문장", {"script": "hangul"}, None),
        ("12 34 !!", {"script": "latin"}, "script_share"),
        ("a b c # # #", {"symbol_share": 0.5}, None),
        ("a b # # #", {"symbol_share": 0.5}, "symbol_share"),
        ("यह हिन्दी में लिखी हुई किताब है।", {"symbol_share": 0.1}, None),
        ("हिन्दी की abcdefgh", {"script": "devanagari"}, "script_share"),
        ("menu\nmenu\ntext", {"repeated_lines": 0.3}, "repeated_lines"),
        ("menu\nmenu\ntext", {"repeated_lines": 0.4}, None),
        ("anything at all ### ###", {}, None),
    ],
)
def test_filters_count_what_they_say(text: str, filters: dict, reason: str | None) -> None:
    assert removed_by(text, FilterSettings(**filters)) == reason


def test_the_command_tells_what_was_removed(tokenizer: Path, tmp_path: Path) -> None:
    texts = [f"The {word} sees the {other}." for word in WORDS for other in WORDS]
    (tmp_path / "in.txt").write_text("\n\n".join([*texts, "a", "### --- ###", "日本語のテキストです。 bar"]))
    words = [tmp_path / "in.txt", "--tokenizer", tokenizer, "--workers", 1]
    filters = ["--filter", "min_characters=2", "--filter", "script=latin", "--filter", "symbol_share=0.5"]
    done = electra("prepare", tmp_path / "out", *words, *filters)
    assert done.returncode == 0, done.stderr
    assert "removed: min_characters 1, script_share 2" in done.stdout
    for word, message in (("colour=1", "colour"), ("min_characters", "has no value"), ("script=klingon", "klingon")):
        refused = electra("prepare", tmp_path / "other", *words, "--filter", word)
        assert refused.returncode == 2 and message in refused.stderr and refused.stderr.count("\n") == 1, refused.stderr
    nothing = electra("prepare", tmp_path / "none", *words, "--filter", "min_characters=999")
    assert nothing.returncode == 3 and "nothing left, the filters removed 628 documents" in nothing.stderr


@pytest.mark.parametrize("verb", ["prepare", "prepare-plan"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--filter", "min_characters=10", "--filter", "min_characters=20"], "min_characters has several values."),
        (
            ["--filter", "min_characters=9", "--filter", "max_characters=8"],
            "min_characters (9) is above max_characters (8)",
        ),
        (["--filter", "min_word_length=5", "--filter", "max_word_length=4.5"], "is above max_word_length (4.5)"),
        (["--near-share", "0.9"], "--near-share 0.9 is for near copies. Add --duplicates near"),
        (["--near-share", "0.8", "--duplicates", "exact"], "Add --duplicates near"),
    ],
)
def test_options_that_contradict_each_other_are_refused(verb, options, message, tokenizer, tmp_path):
    (tmp_path / "in.txt").write_text("The bar sees the lon.")
    done = electra(verb, tmp_path / "out", tmp_path / "in.txt", "--tokenizer", tokenizer, *options)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "out").exists()


ENGLISH = "The weather was fine, and so they went for a walk along the river before it became dark."
GERMAN = "Das Wetter war schön, und so gingen sie am Fluss spazieren, bevor es dunkel wurde und kalt."


@pytest.mark.parametrize(
    "text, wanted, reason",
    [
        ("I am a cat.", {"min_word_length": 3}, "word_length"),
        ("https://example.org/a/long/address", {"max_word_length": 10}, "word_length"),
        (ENGLISH, {"min_word_length": 3, "max_word_length": 10, "punctuated_lines": 1}, None),
        ("Home\nAbout us\nA sentence.", {"punctuated_lines": 0.5}, "punctuated_lines"),
        ("One.\n\n 「二。」 \nlast", {"punctuated_lines": 0.6}, None),
    ],
)
def test_words_and_lines_are_judged(text: str, wanted: dict[str, float], reason: str | None) -> None:
    assert removed_by(text, FilterSettings(**wanted)) == reason


def test_a_language_is_kept_and_others_are_counted(tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("py3langid", reason="py3langid is not installed")
    (tmp_path / "in.txt").write_text("\n\n".join(f"{text} {n}" for n in range(20) for text in (ENGLISH, GERMAN)))
    words = ("prepare", tmp_path / "out", tmp_path / "in.txt", "--tokenizer", tokenizer, "--workers", 1)
    done = electra(*words, "--filter", "language=en", "--heldout", 0)
    assert done.returncode == 0 and " in 20 documents" in done.stdout and "removed: language 20" in done.stdout
    unknown = electra(*words, "--filter", "language=english")
    assert unknown.returncode == 2 and "language=english is unknown. Use one of " in unknown.stderr


def test_a_missing_identifier_and_an_unknown_filter_are_said(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    identifier.cache_clear()
    (tmp_path / "in.txt").write_text(ENGLISH)
    words = ("prepare", tmp_path / "out", tmp_path / "in.txt", "--tokenizer", tokenizer)
    missing = electra(*words, "--filter", "language=en")
    assert missing.returncode == 5 and "pip install '.[filters]'" in missing.stderr and not (tmp_path / "out").exists()
    unknown = electra(*words, "--filter", "lang=en")
    assert unknown.returncode == 2 and "--filter lang is unknown. There are min_characters, " in unknown.stderr
    assert "language" in unknown.stderr
