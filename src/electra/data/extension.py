"""Extends a tokenizer for a new domain: adds words that are frequent in its texts and that the old tokenizer cuts into many pieces.

Old tokens keep their ids, so that a network can keep its embeddings; the embedding of a new token starts as the mean of its
old pieces (pretraining/start.py).
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer

from electra.base.errors import DataError
from electra.data.tokenizer import read_tokenizer, resolved_content, vocabulary_size

PLACE = Path("the extended tokenizer")


def extend_tokenizer(tokenizer: Tokenizer, texts: Iterable[str], count: int) -> Tokenizer:
    """The tokenizer with `count` more tokens. WordPiece and Unigram get the words that save the most tokens: (pieces - 1) *
    occurrences. BPE gets more merges, the most frequent pair first, as if its training continued."""
    content = json.loads(tokenizer.to_str())
    model, size = content["model"], vocabulary_size(tokenizer)
    # tokens beside the model go into it: the library numbers them after it, so they would move and share ids with new ones
    beside = {name: it for name, it in tokenizer.get_vocab().items() if tokenizer.model.token_to_id(name) is None}
    words = Counter({word: often for word, often in field_words(tokenizer, texts).items() if word not in beside})
    pieces = {word: [token.value for token in tokenizer.model.tokenize(word)] for word in words}
    match model["type"]:
        case "WordPiece":
            chosen = best_words(words, pieces, count, model["unk_token"])
            model["vocab"] |= beside | {word: size + number for number, word in enumerate(chosen)}
        case "Unigram" if beside:
            shown = ", ".join(sorted(beside)[:4])
            raise DataError(f"a tokenizer of kind Unigram with tokens beside its model ({shown}) cannot be extended.")
        case "Unigram":
            chosen = best_words(words, pieces, count, model["vocab"][model["unk_id"]][0])
            scores, total = dict(model["vocab"]), sum(words.values())
            for word in chosen:  # scored above its best segmentation, or it would never be used
                known = sum(scores.get(piece, 0.0) for piece in pieces[word])
                model["vocab"].append([word, max(math.log(words[word] / total), known + 1e-3)])
        case "BPE":
            model["vocab"] |= beside
            merges = further_merges(words, pieces, count, set(model["vocab"]))
            model["vocab"] |= {first + second: size + number for number, (first, second) in enumerate(merges)}
            model["merges"] += map(list, merges)
            chosen = ["".join(pair) for pair in merges]
        case other:
            raise DataError(f"a tokenizer of kind {other} cannot be extended. WordPiece, BPE and Unigram can.")
    if len(chosen) < count:
        most = "no more words in the texts occur twice, are split into pieces and have only known characters"
        remedy = f"Ask for {len(chosen):,}, or give more text" if chosen else "Give more text"
        raise DataError(f"{count:,} new tokens were requested, {len(chosen):,} can be added: {most}. {remedy}.")
    return read_tokenizer(PLACE, json.dumps(content))


def field_words(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    """How often each word occurs, in the form that the tokenizer's model sees. Only distinct words are normalised, not the whole text."""
    spelled: Counter[str] = Counter()
    for text in texts:
        spelled.update(text.split())
    words: Counter[str] = Counter()
    for word, count in spelled.items():
        normalised = tokenizer.normalizer.normalize_str(f" {word}") if tokenizer.normalizer else f" {word}"
        parts = (
            tokenizer.pre_tokenizer.pre_tokenize_str(normalised) if tokenizer.pre_tokenizer else [(normalised, None)]
        )
        for part, _ in parts:
            words[part] += count
    return words


def best_words(words: Counter[str], pieces: dict[str, list[str]], count: int, unknown: str) -> list[str]:
    """The `count` words that save the most tokens, without those that occur once, contain digits or have unknown characters."""
    saved = {
        word: (len(pieces[word]) - 1) * often
        for word, often in words.items()
        if often > 1 and len(pieces[word]) > 1 and unknown not in pieces[word] and not any(it.isdigit() for it in word)
    }
    return sorted(saved, key=lambda word: (-saved[word], word))[:count]


def further_merges(
    words: Counter[str], pieces: dict[str, list[str]], count: int, known: set[str]
) -> list[tuple[str, str]]:
    cut = {word: list(parts) for word, parts in pieces.items() if len(parts) > 1}
    totals: Counter[tuple[str, str]] = Counter()
    homes: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for word, parts in cut.items():
        for pair in pairwise(parts):
            totals[pair] += words[word]
            homes[pair].add(word)
    merges: list[tuple[str, str]] = []
    while len(merges) < count and totals:
        best = max(totals, key=lambda pair: (totals[pair], pair))
        if totals[best] < 2:
            break
        if "".join(best) in known:  # it is a token already
            del totals[best]
            continue
        merges.append(best)
        known.add("".join(best))
        for word in sorted(homes[best]):
            for pair in pairwise(cut[word]):
                totals[pair] -= words[word]
            cut[word] = merged(cut[word], best)
            for pair in pairwise(cut[word]):
                totals[pair] += words[word]
                homes[pair].add(word)
        del totals[best]
    return merges


def merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    result: list[str] = []
    for part in parts:
        if result and (result[-1], part) == pair:
            result[-1] += part
        else:
            result.append(part)
    return result


def added_pieces(old: Tokenizer, new: Tokenizer) -> list[list[int]] | None:
    """For each additional token of `new`, the ids of the old tokens it is made of; an empty list if both are the same. None if
    `new` does not extend `old`: then ids mean different tokens."""
    before, after = resolved_content(old), resolved_content(new)
    ours, theirs = before.pop("model"), after.pop("model")
    size, longer = vocabulary_size(old), new.get_vocab()
    more = sorted((number, token) for token, number in longer.items() if number >= size)
    same = before == after and old.get_vocab() == {token: number for token, number in longer.items() if number < size}
    for key in ours:  # lists may only be appended to: merges in order of rank, pieces with their scores
        mine, other = ours[key], theirs.get(key)
        if isinstance(mine, list) and isinstance(other, list):
            same = same and other[: len(mine)] == mine
        elif key != "vocab":
            same = same and other == mine
    if not same or [number for number, _ in more] != list(range(size, size + len(more))):
        return None
    return [[piece.id for piece in old.model.tokenize(token)] for _, token in more]
