"""A field of one's own (medicine, law, code): an existing model goes on learning from the field's text.

    python examples/own_field.py my-model my-field-text my-field-model

`my-model` is a run folder, an export, or any ELECTRA or ModernBERT folder of transformers. Its vocabulary and its layers stay, so
the text is prepared with its tokenizer and the recipe gets its sizes.
"""

import argparse
from pathlib import Path

import electra


def main(model: Path, text: Path, out: Path, recipe: str = "electra-small", steps: int = 20_000) -> Path:
    """Returns the folder of the discriminator that has read the field's text. Called again it does what is missing."""
    existing = electra.load(model)
    tokenizer = out / "tokenizer.json"
    out.mkdir(parents=True, exist_ok=True)
    existing.tokenizer.save(str(tokenizer))
    electra.prepare(text, out / "shards", tokenizer, heldout=0.02)

    # the recipe gives objective, rows and rates; the model gives the encoder and where it starts from
    overrides = {
        "encoder": existing.encoder.settings.model_dump(),
        "train.steps": steps,
        "schedule.warmup": max(1, steps // 10),
    }
    run = electra.pretrain(recipe, overrides, data=out / "shards", run=out / "run", start=model).run

    target = out / "model"
    if not target.exists():
        electra.export(run, target)
    return target / "discriminator"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipe", default="electra-small")
    parser.add_argument("--steps", type=int, default=20_000)
    print(main(**vars(parser.parse_args())))
