"""Training, adopting, saving: the same bytes every time, and BERT's own ids where BERT's vocabulary is used."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer

from electra.base.config import validate
from electra.base.errors import CorruptError, DataError, MachineError, SettingsError
from electra.data import tokenizer as tokenizer_module
from electra.data.corpus import Corpus
from electra.data.tokenizer import (
    SPECIAL_TOKENS,
    TokenizerSettings,
    adopt_vocabulary,
    is_same_tokenizer,
    load_tokenizer,
    save_tokenizer,
    special_ids,
    tokenizer_hash,
    train_tokenizer,
    vocabulary_size,
)

KINDS = ("wordpiece", "unigram", "bpe")
PROBES = [
    "Hello, World! It's 3.14 o'clock; naïve café — “quoted” …",
    "Ünïcödé ÀÉÎÕÜ ß ſ İstanbul ΑΒΓ ΣΑΣ",
    "日本語のテキスト、漢字とカナ。がぎぐ",
    "한국어 문장입니다. 각각",
    "control\x00\x01\x7f chars\tand\u00a0spaces\u200b\u3000end \ufffd",
    "emoji 👩‍👩‍👧 and combining e\u0301 " + "x" * 120,
    "[CLS] special [MASK] words [SEP]",
]


@pytest.fixture
def small_corpus(tmp_path: Path) -> Corpus:
    """Made so that many characters and merges are equally frequent."""
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwx가나다라日本語é"]
    (tmp_path / "small.txt").write_text("\n\n".join(" ".join(words[n::7]) for n in range(7)) * 2, "utf-8")
    return Corpus([tmp_path / "small.txt"])


@pytest.fixture(scope="session")
def language_corpus(shared_data: Path, request: pytest.FixtureRequest) -> Corpus:
    return Corpus([shared_data / request.param / f"{request.param}_wiki.jsonl.zst"])


@pytest.mark.parametrize("kind", KINDS)
def test_training_twice_gives_the_same_bytes(small_corpus: Corpus, kind: str) -> None:
    settings = TokenizerSettings(kind=kind, vocab_size=500)
    first = train_tokenizer(small_corpus, settings)
    assert train_tokenizer(small_corpus, settings).to_str() == first.to_str()
    assert first.get_vocab_size() <= 500


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_tokenizer_has_the_special_tokens_first_and_frames_its_text(small_corpus: Corpus, kind: str) -> None:
    tokenizer = train_tokenizer(small_corpus, TokenizerSettings(kind=kind, vocab_size=500))
    ids = special_ids(tokenizer)
    assert (ids.pad, ids.unk, ids.cls, ids.sep, ids.mask) == (0, 1, 2, 3, 4)
    pair = tokenizer.encode("aiq", "biq")
    assert [token for token in pair.tokens if token in SPECIAL_TOKENS] == ["[CLS]", "[SEP]", "[SEP]"]
    assert pair.tokens[0] == "[CLS]" and pair.type_ids[0] == 0 and pair.type_ids[-1] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_spells_a_special_token_does_not_become_one(small_corpus: Corpus, kind: str) -> None:
    tokenizer = train_tokenizer(small_corpus, TokenizerSettings(kind=kind, vocab_size=500, lowercase=False))
    for text in ("a [MASK] b [PAD]", "a[MASK]b", "[[SEP]]", "[CLS]"):
        assert not {0, 2, 3, 4} & set(tokenizer.encode(text, add_special_tokens=False).ids), text


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_comes_back_with_the_same_hash(tmp_path: Path, small_corpus: Corpus, kind: str) -> None:
    tokenizer = train_tokenizer(small_corpus, TokenizerSettings(kind=kind, vocab_size=500))
    path = save_tokenizer(tokenizer, tmp_path / "saved")
    for place in (path, tmp_path / "saved"):
        assert tokenizer_hash(load_tokenizer(place)) == tokenizer_hash(tokenizer)


QUICK = ("ko", "wordpiece"), ("ja", "bpe")
SLOW = [(language, kind) for kind in KINDS for language in ("ko", "ja", "de") if (language, kind) not in QUICK]


@pytest.mark.parametrize(
    ("language_corpus", "kind"),
    [*QUICK, *(pytest.param(*it, marks=pytest.mark.slow) for it in SLOW)],
    indirect=["language_corpus"],
)
def test_other_languages_come_back_from_their_tokens(
    language_corpus: Corpus, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Bytes are never unknown, however little text they were trained on, and bpe is the slowest to train.
    if kind == "bpe":
        monkeypatch.setattr(tokenizer_module, "MOST_CHARACTERS", 1_000_000)
    settings = TokenizerSettings(kind=kind, vocab_size=8000, lowercase=False)
    tokenizer = train_tokenizer(language_corpus, settings)
    lines = [line for document in language_corpus.read() for line in document.text.split("\n")][:2000]
    encoded = tokenizer.encode_batch(lines, add_special_tokens=False)
    tokens = sum(len(encoding.ids) for encoding in encoded)
    unknown = sum(encoding.ids.count(1) for encoding in encoded)
    assert unknown / tokens < 0.005 and (kind != "bpe" or not unknown)
    for line, encoding in zip(lines, encoded, strict=True):
        if 1 not in encoding.ids:
            normal = tokenizer.normalizer.normalize_str(line)
            assert "".join(tokenizer.decode(encoding.ids).split()) == "".join(normal.split())


def test_stripping_accents_is_off_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("가나다 がぎぐ été " * 50, "utf-8")
    kept = train_tokenizer(Corpus([tmp_path / "a.txt"]), TokenizerSettings(vocab_size=300))
    assert kept.normalizer.normalize_str("가 が é") == "가 が é"
    stripped = train_tokenizer(
        Corpus([tmp_path / "a.txt"]), TokenizerSettings(vocab_size=300, strip_accents=True, split_cjk=False)
    )
    assert stripped.normalizer.normalize_str("é が") == "e か"
    assert stripped.normalizer.normalize_str("가") == "\u1100\u1161"  # why Korean should leave it off


def test_a_large_corpus_is_sampled_by_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module._Sample, "_PROBE", 4_000_000)
    monkeypatch.setattr(tokenizer_module, "MOST_CHARACTERS", 1_000_000)
    (tmp_path / "a.txt").write_text("\n\n".join(f"document {n} " * 40 for n in range(20_000)), "utf-8")
    sample = tokenizer_module._Sample(Corpus([tmp_path / "a.txt"]))
    texts = list(sample)
    assert 600_000 < sum(map(len, texts)) < 1_400_000
    assert texts == list(sample)


@pytest.mark.parametrize(("name", "lowercase"), [("uncased", True), ("cased", False)])
def test_an_adopted_vocabulary_gives_the_ids_of_transformers(shared_data: Path, name: str, lowercase: bool) -> None:
    transformers = pytest.importorskip("transformers")
    path = shared_data / "vocab" / f"bert-base-{name}-vocab.txt"
    ours = adopt_vocabulary(path, lowercase=lowercase)
    ours.encode_special_tokens = False  # transformers takes a text that says "[MASK]" at its word
    theirs = transformers.BertTokenizer(str(path), do_lower_case=lowercase)
    for probe in PROBES:
        assert ours.encode(probe).ids == theirs(probe)["input_ids"], probe
        assert ours.encode(probe, "second").type_ids == theirs(probe, "second")["token_type_ids"]
    for strip, split in ((False, True), (True, False)):
        ours = adopt_vocabulary(path, lowercase, strip_accents=strip, split_cjk=split)
        ours.encode_special_tokens = False
        theirs = transformers.BertTokenizer(
            str(path), do_lower_case=lowercase, strip_accents=strip, tokenize_chinese_chars=split
        )
        for probe in PROBES:
            assert ours.encode(probe).ids == theirs(probe)["input_ids"], (probe, strip, split)


def test_a_vocabulary_without_the_special_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\na\n")
    with pytest.raises(
        CorruptError, match=r"vocab.txt has no \[SEP\], \[MASK\]. A vocabulary for ELECTRA needs"
    ) as error:
        adopt_vocabulary(path)
    assert error.value.exit_code == 4
    wordpiece = Tokenizer.from_str(adopt_complete(tmp_path).to_str().replace("[MASK]", "<mask>"))
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CorruptError, match=r"tokenizer.json has no \[MASK\]"):
        load_tokenizer(tmp_path)


def adopt_complete(folder: Path) -> Tokenizer:
    (folder / "complete.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "b", "##b"]) + "\n")
    return adopt_vocabulary(folder / "complete.txt")


def test_truncation_and_padding_left_in_a_file_are_dropped(tmp_path: Path) -> None:
    tokenizer = adopt_complete(tmp_path)
    expected = tokenizer_hash(tokenizer)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert len(loaded.encode("a b a b a b", add_special_tokens=False).ids) == 6
    assert tokenizer_hash(loaded) == expected


def test_the_vocabulary_size_counts_holes(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "a", "b"]))
    assert vocabulary_size(adopt_vocabulary(tmp_path / "vocab.txt")) == 8


def test_a_missing_or_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'tokenizer.json does not exist. Train a tokenizer with "electra tokenizer"'):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(CorruptError, match=r"is not a tokenizer.json") as error:
        load_tokenizer(tmp_path)
    assert error.value.exit_code == 4
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n\xff")
    with pytest.raises(CorruptError, match="not UTF-8 at byte 6"):
        adopt_vocabulary(tmp_path / "vocab.txt")


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written") as error:
        save_tokenizer(adopt_complete(tmp_path), tmp_path / "file" / "folder")
    assert error.value.exit_code == 5


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(SettingsError, match="vocab_size"):
        validate(TokenizerSettings, {"vocab_size": 10})


def test_tokenizers_that_differ_in_spelling_only_are_the_same(tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]) + "\n")
    said, unsaid = (adopt_vocabulary(vocabulary, True, None, True) for _ in range(2))
    content = json.loads(unsaid.to_str())
    content["normalizer"]["strip_accents"] = None
    unsaid = Tokenizer.from_str(json.dumps(content))
    said.normalizer = BertNormalizer(strip_accents=True)
    assert tokenizer_hash(said) != tokenizer_hash(unsaid)
    assert said.encode("Café").ids == unsaid.encode("Café").ids
    assert is_same_tokenizer(said, unsaid)
    said.normalizer = BertNormalizer(strip_accents=False)
    assert not is_same_tokenizer(said, unsaid)
