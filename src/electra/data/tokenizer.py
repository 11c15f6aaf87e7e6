"""Tokenizers: trained from a stream of documents, or adopted from a vocab.txt or a tokenizer.json.

Training on the same text twice gives the same bytes, which the library's trainers do not guarantee: they iterate over hash
maps, whose random order decides ties. `_train_wordpiece` and `learn_pieces` say what is done about it.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field
from tokenizers import Encoding, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from electra.base.config import Settings
from electra.base.errors import CorruptError, DataError, MachineError, first_line
from electra.base.files import parse_json, read_bytes, refuse_other_kind, remove_leftovers, write_atomically
from electra.base.jobs import interruptible
from electra.base.progress import live_bars
from electra.base.remote import Place
from electra.data.corpus import Corpus, cut_at_whitespace
from electra.data.filters import text_hash
from electra.data.shards import MOST_TOKENS, TOKENIZER, json_hash

if TYPE_CHECKING:
    from electra.base.batch import SpecialIds

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

MOST_TRAINED = 2_000_000  # tokens
MOST_CHARACTERS = 1_000_000_000  # of longer texts about this much is used: documents chosen by their hash
# The fraction of the text's characters that have a piece of their own in wordpiece and unigram; rarer ones become [UNK].
_CHARACTER_COVERAGE = 0.9999
# A longer run without spaces (base64, minified code) is no word: it is cut, since training time grows with its square.
_LONGEST_RUN = re.compile(r"\S{1,400}")
ENCODED_AT_ONCE = 1 << 16  # characters that are encoded at once: the library needs 150 bytes for each
# Regular expressions are allowed if matching takes one pass over the text: no repeated groups, no back references, and at
# most one unbounded repetition per alternative. The known patterns are allowed too: byte-level splits of GPT-2 and GPT-4.
_REPEATED_GROUP = re.compile(r"\)[*+{]|\\[1-9k]|\(\?<?[=!][^)]*[*+]")
_ENDLESS = re.compile(r"(?<!\\)[*+]|\{\d+,\}")
_KNOWN_PATTERNS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_MOST_GROWTH = 1000
# Limits of the unigram trainer.
_LONGEST_PIECE = 16
_LONGEST_WORD = 64
_WORDS = 200_000
_SUBSTRINGS = 3_000_000
_SEEDS_PER_PIECE = 10
_KEPT_EACH_ROUND = 0.75


class TokenizerSettings(Settings):
    """`strip_accents` decomposes characters (NFD) and drops the marks. It turns é into e, but in wordpiece, as in BERT,
    it also leaves Hangul decomposed, and it takes the voicing marks off kana (が becomes か): keep it off for Korean and
    Japanese. `split_cjk` makes every Chinese character a word, as BERT does; it applies to wordpiece only."""

    kind: Literal["wordpiece", "unigram", "bpe"] = "wordpiece"
    vocab_size: int = Field(default=30522, ge=300, le=MOST_TRAINED)
    lowercase: bool = True
    strip_accents: bool = False
    split_cjk: bool = True


def train_tokenizer(corpus: Corpus, settings: TokenizerSettings) -> Tokenizer:
    """Trains a tokenizer. The corpus is read as a stream: memory holds its distinct words, never its text."""
    texts = _Sample(corpus)
    match settings.kind:
        case "wordpiece":
            return _train_wordpiece(texts, settings)
        case "unigram":
            return _train_unigram(texts, settings)
        case "bpe":
            return _train_bpe(texts, settings)


def adopt_vocabulary(
    path: Path, lowercase: bool = True, strip_accents: bool | None = None, split_cjk: bool = True
) -> Tokenizer:
    """A WordPiece tokenizer from BERT's vocab.txt, one piece per line. `strip_accents=None` means what BERT does: strip
    them if it lowercases."""
    vocabulary = {piece: number for number, piece in enumerate(_read(path).removesuffix("\n").split("\n"))}
    strip = lowercase if strip_accents is None else strip_accents
    return _ready(path, _wordpiece(vocabulary, _bert_normalizer(lowercase, strip, split_cjk)))


def load_tokenizer(path: Place) -> Tokenizer:
    """The tokenizer of a tokenizer.json or of a folder with one. Truncation and padding that its last user left in it are
    dropped: they would silently cut documents."""
    file = path / TOKENIZER if path.is_dir() else path
    return read_tokenizer(file, _read(file))


def read_tokenizer(file: Place, text: str) -> Tokenizer:
    """The tokenizer in the text of a tokenizer.json; `file` is its name in messages."""
    try:
        content = parse_json(text)
        refuse_patterns(file, content)
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return _ready(file, tokenizer)
    except (CorruptError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing more specific, and its panics are not Exceptions
        what = f"is not a tokenizer.json ({first_line(error)})"
        raise CorruptError(f'{file} {what}. Train one, or adopt a vocab.txt, with "electra tokenizer".') from None


def refuse_patterns(file: Place, content: Any) -> None:
    """Refuses regular expressions and replacements of a foreign tokenizer that could hang on a text or blow it up. Only patterns
    of certainly linear time are allowed. Consecutive replacements lengthen a text by the product of their lengths."""
    parts, growth = [content.get("normalizer"), content.get("pre_tokenizer"), content.get("decoder")], 1
    while parts:
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        pattern = part.get("Regex") if isinstance(part, dict) else None
        if isinstance(pattern, str) and not is_linear(pattern):
            raise CorruptError(
                f"{file}: its regular expression {pattern[:80]!r} may take for ever. Use another tokenizer."
            )
        growth *= max(1, len(str(part.get("content", "")))) if isinstance(part, dict) else 1
    if growth > _MOST_GROWTH:
        raise CorruptError(f"{file}: its replacements may make a text {growth:,} times as long. Use another tokenizer.")


def is_linear(pattern: str) -> bool:
    choices = re.split(r"(?<!\\)\|", pattern)
    return pattern in _KNOWN_PATTERNS or (
        not _REPEATED_GROUP.search(pattern) and all(len(_ENDLESS.findall(choice)) <= 1 for choice in choices)
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> Path:
    """Writes folder/tokenizer.json and returns its path. Refuses folders of a model, a run or shards, which could not be read any more."""
    refuse_other_kind(folder, TOKENIZER)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, TOKENIZER)
        write_atomically(folder / TOKENIZER, tokenizer_bytes(tokenizer))
    except OSError as error:
        raise MachineError(f"{folder / TOKENIZER} cannot be written: {error.strerror}.") from None
    return folder / TOKENIZER


def tokenizer_bytes(tokenizer: Tokenizer) -> bytes:
    return (tokenizer.to_str(pretty=True) + "\n").encode()


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    return json_hash(tokenizer.to_str())


def is_same_tokenizer(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether both give every text the same ids, judged by their definitions: truncation and padding are ignored, and
    strip_accents=null in BERT's normalizer means the value of lowercase."""

    return resolved_content(first) == resolved_content(second)


def resolved_content(tokenizer: Tokenizer) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    normalizer = content.get("normalizer") or {}
    if normalizer.get("type") == "BertNormalizer" and normalizer.get("strip_accents") is None:
        normalizer["strip_accents"] = normalizer.get("lowercase")
    return {key: value for key, value in content.items() if key not in ("truncation", "padding")}


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id, because an adopted vocabulary may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def continuing_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """By token id, whether a token continues the word of the previous one. WordPiece marks those ("##"); if pieces include
    the space before them ("▁", "Ġ"), all others continue a word."""
    goes_on = np.zeros(vocabulary_size(tokenizer), dtype=bool)
    prefix = getattr(tokenizer.model, "continuing_subword_prefix", None)
    for token, number in tokenizer.get_vocab().items():
        starts_word = token.startswith(("▁", "Ġ")) or token in SPECIAL_TOKENS
        goes_on[number] = token.startswith(prefix) if prefix else not starts_word
    return goes_on


def special_ids(tokenizer: Tokenizer) -> "SpecialIds":
    from electra.base.batch import SpecialIds  # imports torch

    vocabulary = tokenizer.get_vocab()
    return SpecialIds(*(vocabulary[name] for name in SPECIAL_TOKENS))


class _Sample:
    """The texts of a corpus, or a sample of them of about MOST_CHARACTERS, the same at each iteration."""

    _PROBE = 1 << 24

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.threshold = min(1.0, MOST_CHARACTERS / max(1, self._expected_characters())) * 2.0**64

    def _expected_characters(self) -> float:
        """Estimated from the size of the files and the ratio of characters to bytes at their beginning (they may be compressed)."""
        reading, seen = self.corpus.read(), 0
        for document in reading:
            seen += len(document.text)
            if seen >= self._PROBE:
                return seen / max(1, reading.bytes_read) * self.corpus.size
        return seen

    def __iter__(self) -> Iterator[str]:
        for document in self.corpus.read():
            if text_hash(document.text) < self.threshold:
                yield cut_runs(document.text)


def cut_runs(text: str) -> str:
    """The text with spaces inserted into runs that are too long. Nearly all texts are returned unchanged."""
    if len(max(text.split(), key=len, default="")) <= 400:
        return text
    return re.sub(r"\S{401,}", lambda match: " ".join(_LONGEST_RUN.findall(match[0])), text)


def _train_wordpiece(texts: _Sample, settings: TokenizerSettings) -> Tokenizer:
    """Trains WordPiece deterministically. The library numbers the continuing characters (##a, ##b …) in the order of a hash
    map and breaks ties between equally frequent merges by those numbers, so every training gives another vocabulary. Passing
    the whole alphabet, in order, as special tokens fixes the numbers; the pieces then go into a fresh tokenizer as plain ones.
    """
    normalizer = _bert_normalizer(settings.lowercase, settings.strip_accents, settings.split_cjk)
    alphabet, continuing = _alphabet(texts, normalizer, settings)
    tokenizer = _wordpiece({"[UNK]": 0}, normalizer)
    special = [*SPECIAL_TOKENS, *alphabet, *continuing]
    trainer = trainers.WordPieceTrainer(
        special_tokens=special, initial_alphabet=alphabet, limit_alphabet=len(alphabet), **_trainer_options(settings)
    )
    interruptible(tokenizer.train_from_iterator, texts, trainer)
    return _wordpiece(tokenizer.get_vocab(), normalizer)


def _alphabet(texts: _Sample, normalizer: Any, settings: TokenizerSettings) -> tuple[list[str], list[str]]:
    """The characters that get a piece of their own, and, prefixed with ##, those that can occur inside a word."""
    raw: Counter[str] = Counter()
    for text in texts:
        raw.update(text)
    counts = _characters((normalizer.normalize_str(character), count) for character, count in raw.items())
    visible = Counter({character: count for character, count in counts.items() if not character.isspace()})
    alphabet = _most_frequent(visible, settings.vocab_size // 3)
    split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    continuing = [f"##{it}" for it in alphabet if len(split(normalizer.normalize_str(f"a{it}"))) == 1]
    return alphabet, continuing


def _most_frequent(counts: Counter[str], limit: int) -> list[str]:
    """The most frequent characters that cover nearly all of the text, at most `limit`; sorted."""
    by_frequency = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    left_before = counts.total() - np.cumsum([0, *(count for _, count in by_frequency)])
    needed = int(np.sum(left_before > (1 - _CHARACTER_COVERAGE) * counts.total()))
    return sorted(character for character, _ in by_frequency[: min(needed, limit)])


def _characters(words: Iterable[tuple[str, int]]) -> Counter[str]:
    """How often each character occurs, from pairs of word and count."""
    counts: Counter[str] = Counter()
    for word, count in words:
        for character in word:
            counts[character] += count
    return counts


def _train_bpe(texts: _Sample, settings: TokenizerSettings) -> Tokenizer:
    """Trains byte-level BPE, in which nothing is ever unknown."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=True)
    parts = _plain_normalizer(normalizers.NFC(), settings), split, decoders.ByteLevel()
    tokenizer = _assemble(models.BPE(unk_token="[UNK]"), *parts)
    alphabet, special = sorted(pre_tokenizers.ByteLevel.alphabet()), list(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, **_trainer_options(settings))
    interruptible(tokenizer.train_from_iterator, texts, trainer)
    return _assemble(tokenizer.model, *parts)


def _train_unigram(texts: _Sample, settings: TokenizerSettings) -> Tokenizer:
    """Trains a unigram model. A text that spells [MASK] must not become the special token. Scores cannot prevent it (an unknown
    character scores below every piece), so "[" is always a word of its own, and no longer piece that starts with it can match."""
    split = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Split("[", "isolated")])
    normalizer = _plain_normalizer(normalizers.NFKC(), settings)
    words: Counter[str] = Counter()
    for text in texts:
        words.update(f"▁{word}" for word in normalizer.normalize_str(text).split(" "))
    for word in [word for word in words if "[" in word]:
        count = words.pop(word)
        for part, _ in split.pre_tokenize_str(word):
            words[part] += count
    alphabet = _most_frequent(_characters(words.items()), settings.vocab_size // 2)
    pieces = learn_pieces(words, settings.vocab_size - len(SPECIAL_TOKENS), alphabet)
    vocabulary = [*((name, 0.0) for name in SPECIAL_TOKENS), *pieces]
    model = models.Unigram(vocabulary, SPECIAL_TOKENS.index("[UNK]"))
    return _assemble(model, normalizer, split, decoders.Metaspace())


def _trainer_options(settings: TokenizerSettings) -> dict[str, Any]:
    """Options that all trainers share. A merge has to occur at least twice."""
    return {"vocab_size": settings.vocab_size, "min_frequency": 2, "show_progress": live_bars()}


def _bert_normalizer(lowercase: bool, strip_accents: bool, split_cjk: bool) -> Any:
    return normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=split_cjk, strip_accents=strip_accents, lowercase=lowercase
    )


def _plain_normalizer(form: Any, settings: TokenizerSettings) -> Any:
    accents = [normalizers.NFD(), normalizers.StripAccents()] if settings.strip_accents else []
    case = [normalizers.Lowercase()] if settings.lowercase else []
    spaces = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    return normalizers.Sequence([*accents, form, *case, *spaces])


def _wordpiece(vocabulary: dict[str, int], normalizer: Any) -> Tokenizer:
    model = models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
    return _assemble(model, normalizer, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(prefix="##"))


def _assemble(model: Any, normalizer: Any, pre_tokenizer: Any, decoder: Any) -> Tokenizer:
    """A tokenizer from its parts. It adds [CLS] and [SEP] to texts if the model already has the special tokens."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, pre_tokenizer, decoder
    if all(tokenizer.token_to_id(name) is not None for name in SPECIAL_TOKENS):
        tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        tokenizer.encode_special_tokens = True
        frame(tokenizer)
    return tokenizer


def frame(tokenizer: Tokenizer) -> None:
    """Makes the tokenizer encode texts as [CLS] A [SEP] and [CLS] A [SEP] B [SEP]."""
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)


def _ready(path: Place, tokenizer: Tokenizer) -> Tokenizer:
    """Checks a tokenizer: it must have all special tokens, each with its own id. "[MASK]" in a text is made plain text everywhere."""
    vocabulary = tokenizer.get_vocab()
    if missing := [name for name in SPECIAL_TOKENS if name not in vocabulary]:
        remedy = f"A vocabulary for ELECTRA needs all of {', '.join(SPECIAL_TOKENS)}"
        raise CorruptError(f"{path} has no {', '.join(missing)}. {remedy}.")
    special = {vocabulary[name]: name for name in SPECIAL_TOKENS}
    if shared := [(name, special[it]) for name, it in vocabulary.items() if special.get(it, name) != name]:
        first, second = shared[0]
        raise CorruptError(f"{path}: {first} and {second} share the id {vocabulary[first]}. Give each its own.")
    if (largest := max(vocabulary.values())) >= MOST_TOKENS:
        raise CorruptError(
            f"{path} has the id {largest:,}, at most {MOST_TOKENS - 1:,} are read. Number its tokens from 0."
        )
    tokenizer.encode_special_tokens = True
    for framed in (tokenizer.encode("a"), tokenizer.encode("a", "a")):
        if max(framed.type_ids, default=0) > 1 or max(framed.ids, default=0) > largest:
            what = f"ids up to {max(framed.ids):,} and segments up to {max(framed.type_ids)}, which no network here supports"
            raise CorruptError(f"{path}: its post-processor gives {what}. Use another tokenizer.")
    return tokenizer


def _read(path: Place) -> str:
    if not path.exists():
        raise DataError(f'{path} does not exist. Train a tokenizer with "electra tokenizer".')
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(
            f"{path} has bytes that are not UTF-8 at byte {error.start}. Restore or convert it."
        ) from None


class TokenIds(NamedTuple):
    """The encoding of one text, without special tokens; `offsets` are the text's characters for each id."""

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str], most: int | None = None) -> list[TokenIds]:
    """Encodes texts. Long ones are encoded in parts, to bound memory and to let Ctrl-C through, and only until `most` ids are exceeded."""
    texts = list(texts)
    for text in texts:
        require_characters(text)
    if all(len(text) <= ENCODED_AT_ONCE for text in texts):
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [TokenIds(it.ids, it.tokens, it.offsets) for it in encodings]
    return [_join_parts(tokenizer, text, most) for text in texts]


def encode_ids(tokenizer: Tokenizer, texts: Sequence[str], most: int | None = None) -> list[np.ndarray]:
    """Only the ids of `encode_texts`, in four bytes each, so that a text of any length fits into memory; at most `most` per text."""
    for text in texts:
        require_characters(text)
    short = [number for number, text in enumerate(texts) if len(text) <= ENCODED_AT_ONCE]
    encodings = tokenizer.encode_batch_fast([texts[number] for number in short], add_special_tokens=False)
    ids = {number: np.array(it.ids[:most], np.int32) for number, it in zip(short, encodings, strict=True)}
    for number in set(range(len(texts))).difference(short):
        parts = [np.array(it.ids, np.int32) for _, it in _encode_parts(tokenizer, texts[number], most)]
        ids[number] = np.concatenate(parts)[:most]
    return [ids[number] for number in range(len(texts))]


def _encode_parts(tokenizer: Tokenizer, text: str, most: int | None) -> Iterator[tuple[int, Encoding]]:
    """The start of each part and its encoding. Parts are cut before whitespace if there is any, so that the cut does not change how
    words are tokenized. Once there are more than `most` ids, no further part follows."""
    start = count = 0
    for part in cut_at_whitespace(text, ENCODED_AT_ONCE):
        encoding = tokenizer.encode(part, add_special_tokens=False)
        yield start, encoding
        start, count = start + len(part), count + len(encoding.ids)
        if most is not None and count > most:
            return


def _join_parts(tokenizer: Tokenizer, text: str, most: int | None) -> TokenIds:
    whole = TokenIds([], [], [])
    for start, encoding in _encode_parts(tokenizer, text, most):
        whole.ids.extend(encoding.ids)
        whole.tokens.extend(encoding.tokens)
        whole.offsets.extend((start + begin, start + end) for begin, end in encoding.offsets)
    return whole


def require_characters(text: str) -> None:
    """Refuses a text with a lone surrogate, half a character, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(f"a text has a lone surrogate ({half}) at {error.start}. Save it as valid UTF-8.") from None


def learn_pieces(counts: Counter[str], size: int, alphabet: Sequence[str]) -> list[tuple[str, float]]:
    """A unigram language model of word pieces (Kudo 2018, as in SentencePiece): `size` pieces with their log
    probabilities, most probable first. Every character of the alphabet is one of them; words with other characters are
    ignored.

    The library has its own trainer, but it sums floating-point numbers in the order of a randomised hash map: no two
    trainings agree. This one processes the most frequent words in a fixed order. Pieces x have probabilities p(x); the
    probability of a word sums over its segmentations, P(w) = sum over s of prod p(x in s). EM raises sum of count(w) log P(w);
    between its rounds the pieces that cost the least likelihood are dropped."""
    characters = set(alphabet)
    usable = (item for item in counts.items() if len(item[0]) <= _LONGEST_WORD and characters.issuperset(item[0]))
    words = sorted(usable, key=lambda item: (-item[1], item[0]))[:_WORDS]
    pieces, weights = _seeds(words, size, alphabet)
    lattices = _Lattices(words, pieces)
    inner = _Lattices([(piece, 1) for piece in pieces], pieces)
    is_character = np.array([len(piece) == 1 for piece in pieces])
    scores = _log_probabilities(weights)
    while True:
        for _ in range(2):
            expected = lattices.expected_counts(scores)
            expected[is_character] = np.maximum(expected[is_character], 0.5)
            scores = _log_probabilities(np.where(expected >= 0.5, expected, 0))
        alive = np.isfinite(scores)
        if alive.sum() <= size:
            break
        # the cost of dropping a piece: each use would become the best segmentation of its text into other pieces
        loss, candidates = np.where(is_character, np.inf, -np.inf), alive & ~is_character
        replaced = inner.best_without_whole(scores)
        loss[candidates] = expected[candidates] * (scores - replaced)[candidates]
        kept = max(size, int(alive.sum() * _KEPT_EACH_ROUND))
        scores[np.argsort(-loss, kind="stable")[kept:]] = -np.inf
    learned = [(pieces[index], round(float(scores[index]), 6)) for index in np.flatnonzero(alive)]
    return sorted(learned, key=lambda item: (-item[1], item[0]))


def _seeds(words: list[tuple[str, int]], size: int, alphabet: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """The initial pieces: the substrings that cover most text, and all characters, with their weights. Words come in order
    of falling frequency; whenever there are too many substrings to hold, the rarest are dropped."""
    counts: dict[str, int] = defaultdict(int)
    least = 1
    for word, count in words:
        while len(counts) > _SUBSTRINGS:
            least += 1
            counts = defaultdict(int, ((piece, seen) for piece, seen in counts.items() if seen >= least))
        for start in range(len(word)):
            for end in range(start + 2, min(len(word), start + _LONGEST_PIECE) + 1):
                counts[word[start:end]] += count
    covering = sorted(counts.items(), key=lambda item: (-item[1] * len(item[0]), item[0]))
    longer = [item for item in covering[: size * _SEEDS_PER_PIECE] if item[1] > 1]
    single = _characters(words)
    weights = {character: max(1, single[character]) for character in sorted(alphabet)}
    weights |= {piece: count * len(piece) for piece, count in longer}
    return list(weights), np.array(list(weights.values()), np.float64)


def _log_probabilities(counts: np.ndarray) -> np.ndarray:
    """exp(digamma(c)) instead of c: the Bayesian estimate, which favours a sparse vocabulary. -inf where c is 0."""
    from scipy.special import digamma

    scores = np.full(len(counts), -np.inf)
    used = counts > 0
    scores[used] = digamma(counts[used]) - digamma(counts.sum())
    return scores


class _Lattices:
    """The segmentations of many words at once. Words of one length share their edges (start, end); `ids` holds the piece
    that a word has on each edge or, if there is none, the number of pieces as an index whose score is -inf."""

    def __init__(self, words: Sequence[tuple[str, int]], pieces: Sequence[str]) -> None:
        self.groups: list[tuple[list[tuple[int, int]], np.ndarray, np.ndarray, np.ndarray]] = []
        number = {piece: index for index, piece in enumerate(pieces)}
        lengths = np.array([len(word) for word, _ in words])
        for length in np.unique(lengths).tolist():
            indices = np.flatnonzero(lengths == length)
            group = [words[index] for index in indices.tolist()]
            edges = [(start, end) for end in range(1, length + 1) for start in range(max(0, end - _LONGEST_PIECE), end)]
            ids = [[number.get(word[start:end], len(pieces)) for word, _ in group] for start, end in edges]
            counts = np.array([count for _, count in group], np.float64)
            self.groups.append((edges, np.array(ids, np.int32), counts, indices))

    def expected_counts(self, scores: np.ndarray) -> np.ndarray:
        """The expected count of each piece over all segmentations: forward, backward, and the posterior of every edge."""
        scores = np.append(scores, -np.inf)
        expected = np.zeros(len(scores))
        for edges, ids, counts, _ in self.groups:
            length = edges[-1][1]
            forward = np.full((length + 1, len(counts)), -np.inf)
            backward = forward.copy()
            forward[0] = backward[length] = 0
            for edge, (start, end) in enumerate(edges):
                forward[end] = np.logaddexp(forward[end], forward[start] + scores[ids[edge]])
            for edge, (start, end) in sorted(enumerate(edges), key=lambda item: -item[1][0]):
                backward[start] = np.logaddexp(backward[start], backward[end] + scores[ids[edge]])
            for edge, (start, end) in enumerate(edges):
                share = np.exp(forward[start] + scores[ids[edge]] + backward[end] - forward[length])
                expected += np.bincount(ids[edge], share * counts, len(scores))
        return expected[:-1]

    def best_without_whole(self, scores: np.ndarray) -> np.ndarray:
        """The score of each word's best segmentation into at least two pieces. The words are the pieces themselves."""
        result, scores = np.full(len(scores), -np.inf), np.append(scores, -np.inf)
        for edges, ids, counts, indices in self.groups:
            length = edges[-1][1]
            best = np.full((length + 1, len(counts)), -np.inf)
            best[0] = 0
            for edge, (start, end) in enumerate(edges):
                if (start, end) != (0, length):
                    best[end] = np.maximum(best[end], best[start] + scores[ids[edge]])
            result[indices] = best[length]
        return result
