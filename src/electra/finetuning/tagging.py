"""One tag a word: named entities, chunks, parts of speech.

A word is represented by its first token, as in BERT's and the original's tagging. Where we differ from the original:
dropout before the linear layer and segment 0 (it has none, and 1), both as in transformers' ElectraForTokenClassification,
whose weights these are; text keeps its case if the tokenizer does; sentences over the limit are split, not cut.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.batch import Batch
from electra.base.errors import SettingsError
from electra.data.tables import Row
from electra.finetuning.spans import NONE, count_spans, legal, to_spans
from electra.finetuning.tag_rows import TaggingSettings, find_problems, is_texts, train_labels
from electra.finetuning.task import Example, Outputs
from electra.finetuning.words import WordPieces, split_words
from electra.model.electra import EncoderSettings
from electra.model.encoders import AnySettings
from electra.model.modern import ModernBertSettings
from electra.model.modern_heads import LabelHead

IGNORED = -100


class TaggingHead(nn.Module):
    """logits_t = W dropout(h_t) + b, named as in transformers; Glorot's distribution at the start, as in the original."""

    def __init__(self, encoder: EncoderSettings, labels: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(encoder.dropout)
        self.classifier = nn.Linear(encoder.hidden, labels)
        self.classifier.glorot = True  # type: ignore[assignment]

    def forward(self, hidden: Float[Tensor, "batch seq hidden"], batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.classifier(self.dropout(hidden))}


class ModernBertTaggingHead(nn.Module):
    """As in transformers' ModernBertForTokenClassification."""

    def __init__(self, encoder: ModernBertSettings, labels: int) -> None:
        super().__init__()
        self.label = LabelHead(encoder, labels)

    def forward(self, hidden: Float[Tensor, "batch seq hidden"], batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.label(hidden)}


def build_tagging(
    settings: TaggingSettings, tokenizer: Tokenizer, length: int, splits: Mapping[str, Sequence[Row]]
) -> "Tagging":
    """Labels that the settings leave open are those of the rows in splits["train"]."""
    if not settings.labels:
        if "train" not in splits:
            raise SettingsError("the tags are not known. Give a train split, or list them in labels.")
        # a copy without validation: too few labels is a problem of the data, which `problems` reports
        settings = settings.model_copy(update={"labels": train_labels(settings, splits["train"])})
    return Tagging(settings, tokenizer, length)


class Tagging:
    """A `Task`."""

    architecture = "ForTokenClassification"

    def __init__(self, settings: TaggingSettings, tokenizer: Tokenizer, length: int) -> None:
        self.settings, self.tokenizer, self.length = settings, tokenizer, length
        self.pieces = WordPieces(tokenizer)
        self.labels = settings.labels
        self.numbers = {label: number for number, label in enumerate(settings.labels)}

    def encode(self, rows: Sequence[Row]) -> tuple[list[Example], int]:
        """Long sentences become several examples and lose nothing. A row counts as cut where a single word has more
        tokens than there is room: the rest of that word is dropped, never the word."""
        room = self.length - 2
        examples: list[Example] = []
        cut = 0
        for place, row in enumerate(rows):
            pieces = [self.pieces[word] for word in self.words(row)]
            cut += any(len(ids) > room for ids in pieces)
            examples += self._examples(place, [ids[:room] for ids in pieces], self._targets(row))
        return examples, cut

    def words(self, row: Row) -> Sequence[str]:
        words: Sequence[str] = row[self.settings.tokens]
        return words

    def _targets(self, row: Row) -> np.ndarray | None:
        """The tag of every word as the network's label; a tag that it has no label for is no target."""
        tags = row.get(self.settings.tags)
        if not is_texts(tags) or len(tags) != len(self.words(row)):
            return None
        return np.array([self.numbers.get(tag, IGNORED) for tag in self.settings.learn(tags)], np.int64)

    def _examples(self, row: int, pieces: list[list[int]], tags: np.ndarray | None) -> Iterator[Example]:
        special = self.pieces.special
        for start, end, own in split_words([len(ids) for ids in pieces], self.length - 2):
            ids, firsts = [special.cls], []
            for word in pieces[start:end]:
                firsts.append(len(ids))
                ids += word
            ids.append(special.sep)
            positions = firsts[own.start - start : own.stop - start]
            target = None
            if tags is not None:
                target = np.full(len(ids), IGNORED, np.int64)
                target[positions] = tags[own.start : own.stop]
            yield Example(ids, len(ids), row, target, (own.start, positions))

    def head(self, encoder: AnySettings) -> nn.Module:
        match encoder:
            case EncoderSettings():
                return TaggingHead(encoder, len(self.labels))
            case ModernBertSettings():
                return ModernBertTaggingHead(encoder, len(self.labels))

    def targets(self, examples: Sequence[Example], length: int) -> dict[str, Tensor]:
        tags = torch.full((len(examples), length), IGNORED)
        for row, example in zip(tags, examples, strict=True):
            if example.target is not None:
                row[: len(example.target)] = torch.from_numpy(example.target)
        return {"tags": tags}

    def loss(self, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
        """Mean over words; the original sums over them."""
        return F.cross_entropy(
            outputs["logits"].float().flatten(0, 1), targets["tags"].flatten(), ignore_index=IGNORED
        )

    def predict(
        self, rows: Sequence[Row], examples: Sequence[Example], outputs: Sequence[Outputs]
    ) -> list[dict[str, Any]]:
        logits = [np.full((len(self.words(row)), len(self.labels)), np.nan, np.float32) for row in rows]
        for example, output in zip(examples, outputs, strict=True):
            start, positions = example.notes
            logits[example.row][start : start + len(positions)] = output["logits"][positions]
        return [self._answer(row, its) for row, its in zip(rows, logits, strict=True)]

    def _answer(self, row: Row, logits: np.ndarray) -> dict[str, Any]:
        """The likeliest label a word; where they do not make legal spans, what cannot continue a span starts one (see
        spans.py)."""
        assert not np.isnan(logits).any(), "a word without an answer"
        words = self.words(row)
        tags = [self.labels[number] for number in logits.argmax(1)]
        answer: dict[str, Any] = {"prediction": tags}
        if self.settings.spans:
            answer["prediction"] = legal(tags, self.settings.spans)
            answer["spans"] = [
                {**span._asdict(), "text": " ".join(words[span.start : span.end])} for span in to_spans(tags)
            ]
        odds = np.exp(logits - logits.max(1, keepdims=True))
        shares = (odds / odds.sum(1, keepdims=True)).tolist()
        by_label = [dict(zip(self.labels, share, strict=True)) for share in shares]
        return answer | {"_probabilities": by_label}

    def scores(self, rows: Sequence[Row], predictions: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Shares between 0 and 1. Accuracy is by word; f1, precision and recall are by span, over all sentences
        together; f1 also by type (`f1 PER`), for every type that the network knows."""
        gold, said = self._tags(rows, predictions)
        pairs = [pair for one, other in zip(gold, said, strict=True) for pair in zip(one, other, strict=True)]
        accuracy = {"accuracy": sum(one == other for one, other in pairs) / max(1, len(pairs))}
        if not self.settings.spans:
            return accuracy
        total, by_type = count_spans(gold, said)
        types = sorted({label.partition("-")[2] for label in self.labels} - {""})
        scores = {"f1": total.f1, "precision": total.precision, "recall": total.recall} | accuracy
        scores |= {f"f1 {kind}": by_type.get(kind, NONE).f1 for kind in types}
        return {self.settings.metric: scores[self.settings.metric]} | scores

    def tables(self, rows: Sequence[Row], predictions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Figures by type of span, or by plain tag; `rows` is how many there are. A plain tag is a span of one word."""
        gold, said = self._tags(rows, predictions)
        if not self.settings.spans:
            gold, said = ([[f"S-{tag}" for tag in tags] for tags in them] for them in (gold, said))
        _, by_type = count_spans(gold, said)
        return {
            "per_class": [
                {"label": kind, "precision": it.precision, "recall": it.recall, "f1": it.f1, "rows": it.gold}
                for kind, it in by_type.items()
            ]
        }

    def _tags(
        self, rows: Sequence[Row], predictions: Sequence[Mapping[str, Any]]
    ) -> tuple[list[list[str]], list[list[str]]]:
        return [list(row[self.settings.tags]) for row in rows], [list(it["prediction"]) for it in predictions]

    def problems(self, splits: Mapping[str, Sequence[Row]]) -> list[str]:
        return find_problems(self.settings, splits)
