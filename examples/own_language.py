"""A language of one's own: from a folder of text to an encoder that transformers loads.

    python examples/own_language.py my-text my-language

`my-text` is a folder (or a file) of .txt, .jsonl or .parquet, plain or compressed. The defaults are a small network for a few
hundred megabytes of text on one GPU; `--recipe modern-tiny --steps 2000 --vocab-size 4000` is for a first look on a laptop.
"""

import argparse
from pathlib import Path

import electra


def main(text: Path, out: Path, recipe: str = "modern-small", steps: int = 29_000, vocab_size: int = 32_000) -> Path:
    """Returns the folder of the discriminator: the model to fine-tune. Called again it does what is missing."""
    # a vocabulary of the language: cased, and Hangul, kana and accents as they are
    tokenizer = out / "tokenizer"
    if not (tokenizer / "tokenizer.json").is_file():
        electra.train_tokenizer(text, tokenizer, vocab_size=vocab_size, lowercase=False)
    shards = electra.prepare(text, out / "shards", tokenizer, heldout=0.02)
    print(f"{shards.splits['train'].tokens:,} tokens to train on")

    # warm-up is a twentieth of the run, whatever its length
    overrides = {"train.steps": steps, "schedule.warmup": 0.05}
    run = electra.pretrain(recipe, overrides, data=out / "shards", run=out / "run").run
    metrics = electra.evaluate(run)
    print(f"held-out AUC {metrics['trained']['auc']:.3f}, untrained {metrics['untrained']['auc']:.3f}")

    model = out / "model"
    if not model.exists():
        electra.export(run, model)
    return model / "discriminator"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", default="modern-small")
    parser.add_argument("--steps", type=int, default=29_000)
    parser.add_argument("--vocab-size", type=int, default=32_000)
    print(main(**vars(parser.parse_args())))
