"""How fast is `electra embed` beside sentence-transformers' `encode`, on the same cores, the same network and the same texts?

    python bench/embed_speed.py [--data ../shared/data] [--texts 2000] [--threads 2]

An ELECTRA-Small of random weights (the time does not depend on them) with BERT's vocabulary. Short texts are SST-2's, long ones
film reviews, cut at 256 tokens by both. `encode` gets its texts in memory, `embed` a file, and writes one. They alternate; the
table has the median of three. The vectors must be equal.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import electra
import machine
from electra.data.corpus import Corpus
from electra.data.tables import read_rows
from electra.data.tokenizer import adopt_vocabulary, vocabulary_size
from electra.interop.read import Pretrained
from electra.interop.write import write_network
from electra.model import encoder_alone, initialise
from electra.pretraining.settings import resolve

REPOSITORY = Path(__file__).resolve().parents[1]
ROUNDS, LENGTH = 3, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=REPOSITORY.parent / "shared" / "data")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--recipe", default="electra-small")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sets = {"SST-2": short_texts(options.data, options.texts), "reviews": long_texts(options.data, options.texts // 8)}
    result = {"threads": options.threads, "recipe": options.recipe, "texts": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch) / "model", options.data, options.recipe)
        parts = Transformer(str(folder), max_seq_length=LENGTH)
        peer = SentenceTransformer(modules=[parts, Pooling(parts.get_word_embedding_dimension())], device="cpu")
        for name, texts in sets.items():
            result["texts"][name] = compare(folder, peer, texts, Path(scratch))
    machine.write("embed_speed", result)


def compare(folder: Path, peer: SentenceTransformer, texts: list[str], scratch: Path) -> dict[str, float]:
    (scratch / "texts.txt").write_text("\n".join(texts) + "\n")
    seconds: dict[str, list[float]] = {"sentence-transformers encode": [], "electra embed": []}
    for _ in range(ROUNDS):
        started = time.perf_counter()
        theirs = peer.encode(texts, show_progress_bar=False)
        seconds["sentence-transformers encode"].append(time.perf_counter() - started)
        # with the reading of the model, which `encode` has behind it
        started = time.perf_counter()
        electra.embed(folder, scratch / "texts.txt", scratch / "vectors.npy", force=True, length=LENGTH)
        seconds["electra embed"].append(time.perf_counter() - started)
    ours = np.load(scratch / "vectors.npy")
    difference = float(np.abs(ours - theirs).max())
    assert difference < 1e-4, difference
    rates = {name: len(texts) / statistics.median(times) for name, times in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:32}{rate:10.1f} texts/s")
    ratio = rates["electra embed"] / rates["sentence-transformers encode"]
    print(f"ratio {ratio:.2f}, largest difference {difference:.1e}")
    return {name: round(rate, 1) for name, rate in rates.items()} | {"ratio": round(ratio, 3), "count": len(texts)}


def short_texts(data: Path, count: int) -> list[str]:
    path = next(iter(sorted((data / "glue" / "sst2").glob("train*"))))
    return [row["sentence"].strip() for row, _ in zip(read_rows(path), range(count), strict=False)]


def long_texts(data: Path, count: int) -> list[str]:
    documents = Corpus([data / "pretrain_en" / "reviews_en-00.jsonl.zst"]).read()
    return [" ".join(it.text.split()) for it, _ in zip(documents, range(count), strict=False)]


def write_model(out: Path, data: Path, recipe: str) -> Path:
    settings = resolve(recipe, ["data=none", "run=none"])[0].encoder
    tokenizer = adopt_vocabulary(data / "vocab" / "bert-base-uncased-vocab.txt")
    encoder = encoder_alone(settings, vocabulary_size(tokenizer))
    initialise(encoder, settings, 1)
    write_network(out, Pretrained(encoder.eval(), None, "encoder", tokenizer), "")
    return out


if __name__ == "__main__":
    main()
