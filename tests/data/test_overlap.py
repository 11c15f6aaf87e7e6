"""Texts that are in a corpus are found there, and no others."""

import random
import re

import numpy as np
import pytest

from electra.data.corpus import Corpus
from electra.data.overlap import FEW_WORDS, LONG, WordHashes, find_overlap
from electra.data.prepare import PrepareSettings, prepare
from electra.data.tokenizer import TokenizerSettings, save_tokenizer, train_tokenizer

WORDS = [f"{a}{b}" for a in ("bar", "lon", "tim", "gor", "sel", "ve") for b in ("ak", "ute", "in", "owa", "e")]


def sentence(rng: random.Random, length: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(length))


def ngrams(text: str, size: int) -> set[tuple[str, ...]]:
    """Word by word, in plain Python."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[place : place + size]) for place in range(len(words) - size + 1)}


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
@pytest.mark.parametrize("lowercase", [True, False])
def test_rows_are_found_as_a_plain_search_finds_them(tmp_path, kind, lowercase):
    rng = random.Random(0)
    documents = [sentence(rng, rng.randint(20, 60)) for _ in range(80)]
    documents += [", ".join(WORDS).upper() + "!"] * 3  # so that a cased tokenizer has pieces for these
    (tmp_path / "text.txt").write_text("\n\n".join(documents))
    settings = TokenizerSettings(kind=kind, vocab_size=300, lowercase=lowercase)
    save_tokenizer(train_tokenizer(Corpus([tmp_path / "text.txt"]), settings), tmp_path / "tokenizer")
    prepare([tmp_path / "text.txt"], tmp_path / "shards", tmp_path / "tokenizer", PrepareSettings(heldout_share=0.0), 1)

    rows: list[list[str]] = []
    for number in range(200):
        words = rng.choice(documents[:80]).split()
        start, length = rng.randint(0, len(words) - 20), rng.randint(5, 20)
        copied = words[start : start + length]
        match number % 4:
            case 0:
                rows.append([sentence(rng, length)])
            case 1:  # other punctuation and capitals
                rows.append([", ".join(copied).upper() + "!"])
            case 2:
                rows.append([sentence(rng, 15), " ".join(copied)])
            case 3:  # only in part
                rows.append([f"{sentence(rng, 3)} {' '.join(copied)} {sentence(rng, 3)}"])
    found = find_overlap({"task": rows, "none": []}, tmp_path / "shards")["task"]

    corpus = {size: set().union(*(ngrams(text, size) for text in documents)) for size in (LONG, FEW_WORDS)}

    def grams(text: str) -> tuple[set, int]:
        size = LONG if len(text.split()) >= LONG else FEW_WORDS
        return ngrams(text, size), size

    some = [any(grams(text)[0] & corpus[grams(text)[1]] for text in row) for row in rows]
    whole = [any(grams(text)[0] and grams(text)[0] <= corpus[grams(text)[1]] for text in row) for row in rows]
    assert found.rows == 200 and found.checked == sum(any(grams(text)[0] for text in row) for row in rows) < 200
    assert 50 < found.whole_text == sum(whole) < found.with_ngram == sum(some) < 150
    assert (
        found.examples
        == [
            next(t for t in r if grams(t)[0] <= corpus[grams(t)[1]] and grams(t)[0])
            for r, hit in zip(rows, whole, strict=True)
            if hit
        ][:3]
    )


def test_a_word_has_one_hash_however_it_is_cut(tmp_path):
    (tmp_path / "text.txt").write_text("unfolded folding unfolding folded\n" * 50)
    tokenizer = train_tokenizer(Corpus([tmp_path / "text.txt"]), TokenizerSettings(vocab_size=300))
    hashes, vocabulary = WordHashes(tokenizer), tokenizer.get_vocab()
    letters = np.array([vocabulary["f"], *(vocabulary[f"##{letter}"] for letter in "olded")])
    whole = np.array(tokenizer.encode("folded", add_special_tokens=False).ids)
    assert len(whole) < len(letters) and hashes.words(letters) == hashes.words(whole)
    assert (
        len(
            {
                int(hashes.words(np.array(tokenizer.encode(word, add_special_tokens=False).ids))[0])
                for word in ("folded", "folding", "dedlof", "unfolded")
            }
        )
        == 4
    )


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_punctuation_beyond_ascii_does_not_matter(tmp_path, kind):
    text = "“Well,” said Änne – “it’s the café that’s closed” – and went over the bridge …"
    plain = text.translate({ord("“"): '"', ord("”"): '"', ord("’"): "'", ord("–"): "-", ord("…"): "."})
    (tmp_path / "text.txt").write_text(f"{text}\n{plain}\n" * 50)  # so that there are pieces for both
    tokenizer = train_tokenizer(Corpus([tmp_path / "text.txt"]), TokenizerSettings(kind=kind, vocab_size=400))
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text(text)
    prepare([tmp_path / "text.txt"], tmp_path / "shards", tmp_path / "tokenizer", PrepareSettings(heldout_share=0.0), 1)
    assert find_overlap({"task": [[text], [plain]]}, tmp_path / "shards")["task"].whole_text == 2
