"""Labels of one's own: fine-tune on a table, choose the best seed, answer new rows.

    python examples/own_labels.py my-model my-table.csv new-rows.csv answers.csv --text review --label stars

Tables are .csv, .tsv, .jsonl or .parquet. A tenth of the table is held back to score on.
"""

import argparse
from pathlib import Path
from typing import Any

import electra


def main(
    model: Path, table: Path, new: Path, answers: Path, text: str, label: str, seeds: int = 3, **settings: Any
) -> list[Path]:
    """Returns the files with the answers; what is fine-tuned goes beside them, and is kept when called again. `settings` are those of
    fine-tuning, such as epochs=3."""
    out = answers.with_name(f"{answers.name}-models")
    tuned = electra.finetune(model, table, out, seeds=seeds, text=text, label=label, **settings)
    name, folders = next(iter(tuned.models.items()))
    summary = tuned.results["tasks"][name]
    print(f"{summary['metric']} on the dev rows: median {summary['median']:.3f} of {seeds} seeds")

    # the seed that is best on the rows held back; every folder is a model of transformers too
    best = folders[summary["best_seed"]]
    predicted = electra.predict(best, new, answers, probabilities=True)
    print(f"{predicted.rows} rows answered by {best}")
    return predicted.out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "table", "new", "answers"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--label", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    print(main(**vars(parser.parse_args())))
