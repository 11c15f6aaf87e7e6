"""Going on in a field: a network of general text goes on with reviews, and SST-2 is scored before and after.

    python bench/continue_field.py ../shared/data --out bench/results/continue_field

One network (recipe modern-tiny) is pre-trained on Wikipedia. From it three runs of the same length go on: with Wikipedia (the control),
with film reviews, and with film reviews and new tokens. Each of the four is fine-tuned on SST-2 with several seeds. About eight minutes of one idle core.
"""

import argparse
import json
import statistics
import time
from itertools import islice
from pathlib import Path

import electra
from electra.data.tables import read_rows

GENERAL, MORE = 700, 250  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench/results/continue_field"))
    parser.add_argument("--work", type=Path, default=Path("runs/continue_field"))
    parser.add_argument("--seeds", type=int, default=3)
    words = parser.parse_args()
    work, started = words.work, time.monotonic()
    work.mkdir(parents=True, exist_ok=True)

    # text: 6 MB of each; SST-2's first 4,000 sentences, and all of its dev set
    for name in ("wiki", "reviews"):
        texts = (row["text"] for row in read_rows(words.data / "pretrain_en" / f"{name}_en-00.jsonl.zst"))
        taken, size = [], 0
        for text in texts:
            taken.append(" ".join(text.split()))
            size += len(text)
            if size > 6_000_000:
                break
        (work / f"{name}.txt").write_text("\n\n".join(taken), "utf-8")
    for split, most in (("train", 4000), ("dev", None)):
        lines = islice(read_rows(words.data / "glue" / "sst2" / f"{split}.jsonl.zst"), most)
        (work / f"sst2-{split}.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n", "utf-8")

    # tokenizers and shards
    electra.train_tokenizer(work / "wiki.txt", work / "tokenizer", vocab_size=4000)
    _, added = electra.extend_tokenizer(work / "tokenizer", work / "reviews.txt", work / "longer", 500)
    for name, tokenizer in (("wiki", "tokenizer"), ("reviews", "tokenizer"), ("reviews", "longer")):
        electra.prepare(work / f"{name}.txt", work / f"{name}-{tokenizer}", work / tokenizer, heldout=0.03, workers=1)

    # pre-training
    def pretrain(name: str, data: str, steps: int, start: Path | None = None) -> Path:
        settings = {
            "train.steps": steps,
            "train.evaluate_rows": 512,
            "train.evaluate_every": steps,
            "train.save_every": steps,
        }
        if start:  # it begins where samples are no longer easy, so there is no hot start, and at a lower rate
            settings |= {"sampling.start_temperature": 1.0, "optimizer.lr": 5e-3}
        settings["schedule.warmup"] = 0.1
        return electra.pretrain("modern-tiny", settings, data=work / data, run=work / name, start=start).run

    general = pretrain("general", "wiki-tokenizer", GENERAL)
    models = {
        "general text": general,
        "… more general text": pretrain("more", "wiki-tokenizer", MORE, general),
        "… then reviews": pretrain("field", "reviews-tokenizer", MORE, general),
        "… then reviews, 500 new tokens": pretrain("field-longer", "reviews-longer", MORE, general),
    }

    # SST-2
    results = {}
    for name, run in models.items():
        more = {"dev": work / "sst2-dev.jsonl", "text": "sentence", "label": "label"}
        out = work / f"sst2-{run.name}"
        done = electra.finetune(run, work / "sst2-train.jsonl", out=out, seeds=words.seeds, epochs=1, **more).results
        (task,) = done["tasks"].values()
        results[name] = {"task": task, "before_after": (run / "before-after.md").read_text() if run != general else ""}
    minutes = (time.monotonic() - started) / 60
    report = {"minutes": minutes, "new_tokens": dict(list(added.items())[:20]), "results": results}
    words.out.mkdir(parents=True, exist_ok=True)
    (words.out / "results.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for name, result in results.items():
        scores = [float(value) for value in flat_scores(result["task"])]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        print(f"| {name} | {statistics.mean(scores):.1f} ± {spread:.1f} | {', '.join(f'{it:.1f}' for it in scores)} |")


def flat_scores(task: dict) -> list[float]:
    """The headline of each seed on dev."""
    return [scores[task["metric"]] for name, scores in task["scores"]["dev"].items() if name.startswith("seed ")]


if __name__ == "__main__":
    main()
