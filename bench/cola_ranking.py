"""Does a network find acceptable sentences likelier than others, before anybody has shown it a label? CoLA, by three kinds of score:

- Electric's pseudo-log-likelihood, in one pass (`electra score`);
- a masked language model's, each token masked in turn;
- a discriminator's log-probability that no token was replaced (`electra detect`).

    python bench/cola_ranking.py RUN --glue GLUE

`auc` is over the dev set: an acceptable sentence scores above another one. `pairs` is over minimal pairs: sentences of one source, one of
them acceptable, that are the same but for one word put in, left out or changed; share of pairs whose acceptable sentence scores higher. They are taken from
train and dev, since nothing is learned from labels. Each by the sum over the tokens and (`_mean`) by their mean, which does not
prefer short sentences.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from electra.base.batch import Batch
from electra.data.tokenizer import encode_texts, special_ids
from electra.finetuning.plan import make_plan
from electra.inspector import Model, load
from electra.inspector.detect import as_generator
from electra.train.device import choose_device
from electra.train.settings import TrainSettings

ROWS_AT_ONCE = {"cpu": 64, "cuda": 1024}
Row = Mapping[str, Any]


def minimal_pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(acceptable, not acceptable), of those with a source."""
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("source"):
            by_source.setdefault(str(row["source"]), []).append(row)
    pairs = set()
    for group in by_source.values():
        for one, other in combinations(group, 2):
            if str(one["label"]) != str(other["label"]) and words_apart(one["sentence"], other["sentence"]) == 1:
                good, bad = (one, other) if str(one["label"]) == "1" else (other, one)
                pairs.add((good["sentence"], bad["sentence"]))
    return sorted(pairs)


def words_apart(one: str, other: str) -> int:
    """How many words in a row must be changed, put in or left out."""
    a, b = one.lower().split(), other.lower().split()
    if abs(len(a) - len(b)) > 1:
        return 2
    least, front = min(len(a), len(b)), 0
    while front < least and a[front] == b[front]:
        front += 1
    back = 0
    while back < least - front and a[-1 - back] == b[-1 - back]:
        back += 1
    return max(len(a), len(b)) - front - back


def token_scores(model: Model, texts: Sequence[str]) -> list[np.ndarray] | None:
    """log p of every token, by what the model knows of it; None where it knows nothing."""
    match model.kind:
        case "electric":
            return [scored.token_scores for scored in model.score(texts)]
        case "discriminator":
            return [np.log1p(-np.array([token.probability for token in text])) for text in model.detect(texts)]
    if model.network.objective == "masked_lm":
        return masked_scores(model, texts)
    return None  # a network that never saw [MASK] says nothing of what is behind it


@torch.no_grad()
def masked_scores(model: Model, texts: Sequence[str]) -> list[np.ndarray]:
    """Sentences, which a network reads whole: nothing is cut into windows here."""
    special, network = special_ids(model.tokenizer), as_generator(model.network)
    device = model.encoder.embeddings.table.device
    ids = [encoding.ids for encoding in encode_texts(model.tokenizer, texts)]
    scores = [np.zeros(len(row)) for row in ids]
    places = [
        (text, place)
        for text in sorted(range(len(ids)), key=lambda it: len(ids[it]))
        for place in range(len(ids[text]))
    ]
    size = ROWS_AT_ONCE[device.type]
    for start in range(0, len(places), size):
        part = places[start : start + size]
        width = max(len(ids[text]) for text, _ in part) + 2
        rows = torch.full((len(part), width), special.pad)
        for row, (text, place) in zip(rows, part, strict=True):
            row[: len(ids[text]) + 2] = torch.tensor([special.cls, *ids[text], special.sep])
            row[place + 1] = special.mask
        batch = Batch.of_rows(rows, torch.zeros_like(rows), rows != special.pad).to(device)
        logits = network(batch, torch.tensor([[place + 1] for _, place in part], device=device))[:, 0].double()
        targets = torch.tensor([ids[text][place] for text, place in part], device=device)
        found = logits.log_softmax(1).gather(1, targets[:, None])[:, 0].cpu().numpy()
        for value, (text, place) in zip(found, part, strict=True):
            scores[text][place] = value
    return scores


def ranking(run: Path, glue: str) -> dict[str, float] | None:
    """Nothing for a network without such a score."""
    model = load(run)
    device = choose_device(TrainSettings())
    model.encoder.to(device).eval()
    if model.network.head is not None:
        model.network.head.to(device).eval()
    splits = make_plan("cola", {"data": glue}, {}).splits
    dev, pairs = list(splits["dev"]), minimal_pairs([*splits["train"], *splits["dev"]])
    texts = list(dict.fromkeys([row["sentence"] for row in dev] + [text for pair in pairs for text in pair]))
    scores = token_scores(model, texts)
    if scores is None:
        return None
    found: dict[str, float] = {"sentences": len(dev), "minimal_pairs": len(pairs)}
    for name, take in (("", np.sum), ("_mean", np.mean)):
        value = {text: float(take(score)) if len(score) else 0.0 for text, score in zip(texts, scores, strict=True)}
        labels, order = [str(row["label"]) == "1" for row in dev], [value[row["sentence"]] for row in dev]
        if len({*labels}) == 2:
            found[f"auc{name}"] = float(roc_auc_score(labels, order))
        if pairs:
            wins = [np.sign(value[good] - value[bad]) for good, bad in pairs]
            found[f"pairs{name}"] = float(np.mean(wins) + 1) / 2
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--glue", required=True)
    given = parser.parse_args()
    print(json.dumps(ranking(given.run, given.glue), indent=1))


if __name__ == "__main__":
    main()
