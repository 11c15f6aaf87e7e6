"""Text to ids, as the tokenizers library does it and several times as fast where that is possible.

Text repeats its words: BERT's normaliser looks at single characters and its pre-tokeniser always splits at whitespace,
so the ids of a line are the ids of its words one after the other, and a word that was seen needs no second look. With
other kinds of tokenizers whitespace may matter, and the library gets whole lines.
"""

import json

import numpy as np
from tokenizers import Tokenizer

from electra.data.shards import token_dtype
from electra.data.tokenizer import vocabulary_size

_REMEMBERED_CHARACTERS = 1 << 21


class Encoder:
    """Gives the ids of lines, without [CLS] and [SEP], as bytes of `dtype`: joining those costs nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.dtype = np.dtype(token_dtype(vocabulary_size(tokenizer))).newbyteorder("<")
        self.words = _Words(self)
        self.words_are_independent = words_are_independent(tokenizer)

    def encode(self, lines: list[str]) -> list[bytes]:
        if not self.words_are_independent:
            encodings = self.tokenizer.encode_batch_fast(lines, add_special_tokens=False)
            return [self.pack(encoding.ids) for encoding in encodings]
        if self.words.characters > _REMEMBERED_CHARACTERS:
            self.words = _Words(self)
        return [b"".join(map(self.words.__getitem__, line.split())) for line in lines]

    def pack(self, ids: list[int]) -> bytes:
        return np.array(ids, self.dtype).tobytes()


class _Words(dict[str, bytes]):
    """The ids of every word that was asked for."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.characters = 0

    def __missing__(self, word: str) -> bytes:
        ids = self.encoder.pack(self.encoder.tokenizer.encode(word, add_special_tokens=False).ids)
        self[word] = ids
        self.characters += len(word)
        return ids


def words_are_independent(tokenizer: Tokenizer) -> bool:
    parts = json.loads(tokenizer.to_str())
    kinds = [(parts[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
    return (
        kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]
        and parts["normalizer"]["clean_text"]
        and all(token["special"] for token in parts["added_tokens"])
    )
