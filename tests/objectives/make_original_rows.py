"""Rows for tests/objectives/original: random tokens, two segments, padded to different lengths. What the original code then makes of them is
committed, so that nobody has to run it again:

    python tests/objectives/make_original_rows.py FOLDER
    python bench/original_steps.py CHECKOUT FOLDER --replay 12     (in an environment of its own: see there)
    mv FOLDER/{rows.json,replay.npz,before,after} tests/objectives/original
"""

import json
import sys
from pathlib import Path

import numpy as np

from electra.pretraining.settings import resolve

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from first_steps import original_settings

VOCABULARY, STEPS, ROWS, LENGTH = 61, 12, 6, 20
WORDS = [
    "encoder.layers=2",
    "encoder.hidden=16",
    "encoder.heads=2",
    "encoder.intermediate=64",
    "encoder.embedding=8",
    "encoder.positions=32",
    "encoder.dropout=0",
    "encoder.attention_dropout=0",
    "generator.width=0.5",
    f"rows.length={LENGTH}",
    f"train.batch={ROWS}",
    "train.steps=40",
    "schedule.warmup=5",
    "optimizer.lr=2e-3",
    "optimizer.weight_decay=0.1",
]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    shape = STEPS, ROWS, LENGTH
    lengths = rng.integers(6, LENGTH + 1, shape[:2])[..., None]
    first = rng.integers(3, 5, shape[:2])[..., None]
    place = np.arange(LENGTH)
    ids = rng.integers(5, VOCABULARY, shape)
    ids[(place == 0) & np.ones(shape, bool)] = 2
    ids[(place == first) | (place == lengths - 1)] = 3
    is_real = place < lengths
    rows = {"ids": ids * is_real, "segments": (place > first) & is_real, "is_real": is_real}
    for name, values in rows.items():
        np.save(folder / f"{name}.npy", values.astype(np.int32))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = [f"w{number}" for number in range(VOCABULARY - len(special))]
    (folder / "vocab.txt").write_text("\n".join(special + words) + "\n")
    settings, _ = resolve("electra-small", [*WORDS, "data=none", "run=none"])
    stored = {"original": original_settings(settings, VOCABULARY), "words": WORDS}
    (folder / "rows.json").write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
