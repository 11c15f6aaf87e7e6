"""Going on in a field: a network of general text goes on with reviews, and SST-2 is scored before and after.

    python bench/continue_field.py ../shared/data                # modern-tiny: about eight minutes of one idle core
    python bench/continue_field.py ../shared/data --gpu          # modern-small: about two minutes of one large GPU

One network is pre-trained on Wikipedia. From it three runs of the same length go on: with Wikipedia (the control), with film reviews, and with
film reviews and new tokens. Each of the four is fine-tuned on sentences of SST-2 with several seeds, and so is the network untrained.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import electra
import machine
from electra.data.tables import read_rows

GENERAL = "general text"


@dataclass(frozen=True)
class Size:
    """`general`, `more`: what each run lasts, as settings; `jobs`: runs at a time."""

    recipe: str
    characters: int
    vocabulary: int
    new_tokens: int
    general: dict[str, Any]
    more: dict[str, Any]
    settings: dict[str, Any]
    sentences: int
    jobs: int


CPU = Size(
    "modern-tiny", 6_000_000, 4_000, 500, {"train.steps": 1000}, {"train.steps": 350, "optimizer.lr": 5e-3},
    {"sampling.start_temperature": 1.0}, 4_000, 1,
)  # fmt: skip
# plain torch: compiling would take longer than training
GPU = Size(
    "modern-small", 20_000_000, 16_000, 2_000, {"train.minutes": 0.45}, {"train.minutes": 0.2, "optimizer.lr": 1.5e-3},
    {"train.fast": "off", "train.batch": 256, "optimizer.weight_decay": 1.0}, 8_000, 5,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/continue_field"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gpu", action="store_true")
    words = parser.parse_args()
    work, size, started = words.work, GPU if words.gpu else CPU, time.monotonic()
    work.mkdir(parents=True, exist_ok=True)
    added = prepare(words.data, work, size)

    def elapsed(what: str) -> None:
        print(f"{what} after {time.monotonic() - started:.0f} s", flush=True)

    elapsed("text")
    hot = {} if size.recipe == "modern-small" else {"sampling.start_temperature": 2.0}
    pretrain(work, "general", "wiki-tokenizer", size, size.general | hot, None)
    elapsed("general")
    runs = {
        GENERAL: "general",
        "then more general text": "more",
        "then reviews": "field",
        f"then reviews, {len(added)} new tokens": "field-longer",
    }
    data = {"more": "wiki-tokenizer", "field": "reviews-tokenizer", "field-longer": "reviews-longer"}
    together(size.jobs, pretrain, [(work, name, data[name], size, size.more, work / "general") for name in data])
    elapsed("fields")
    arms = [(work, name, words.seeds, True) for name in runs.values()]
    scores = together(size.jobs, finetune, [*arms, (work, "general", words.seeds, False)])
    elapsed("SST-2")
    results = {}
    for name, run, accuracies in zip([*runs, "untrained"], [*runs.values(), ""], scores, strict=True):
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        results[name] = {"accuracy": accuracies, "mean": statistics.mean(accuracies), "sd": spread}
        table = work / run / "before-after.md"
        results[name]["heldout"] = table.read_text().splitlines() if run and table.is_file() else []
        print(f"| {name} | {100 * results[name]['mean']:.1f} ± {100 * spread:.1f} |")
    minutes = (time.monotonic() - started) / 60
    more = {"minutes": minutes, "sentences": size.sentences, "new_tokens": list(added)[:20], "results": results}
    machine.write(f"continue_field{'_gpu' * words.gpu}", more)


def prepare(source: Path, work: Path, size: Size) -> dict[str, list[str]]:
    """As much text of each kind, the first sentences of SST-2 and all of its dev set; tokenizers and shards."""
    for name in ("wiki", "reviews"):
        taken, count = [], 0
        for row in read_rows(source / "pretrain_en" / f"{name}_en-00.jsonl.zst"):
            taken.append(" ".join(row["text"].split()))
            count += len(taken[-1])
            if count > size.characters:
                break
        (work / f"{name}.txt").write_text("\n\n".join(taken), "utf-8")
    for split, most in (("train", size.sentences), ("dev", None)):
        lines = islice(read_rows(source / "glue" / "sst2" / f"{split}.jsonl.zst"), most)
        (work / f"sst2-{split}.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n", "utf-8")
    electra.train_tokenizer(work / "wiki.txt", work / "tokenizer", vocab_size=size.vocabulary)
    _, added = electra.extend_tokenizer(work / "tokenizer", work / "reviews.txt", work / "longer", size.new_tokens)
    for name, tokenizer in (("wiki", "tokenizer"), ("reviews", "tokenizer"), ("reviews", "longer")):
        out = work / f"{name}-{tokenizer}"
        electra.prepare(work / f"{name}.txt", out, work / tokenizer, heldout=0.03, workers=size.jobs)
    return added


def pretrain(work: Path, name: str, data: str, size: Size, length: dict[str, Any], start: Path | None) -> None:
    """A run that goes on begins where samples are no longer easy: no hot start, and a lower rate."""
    never = {"train.evaluate_every": 10**6, "train.save_every": 10**6, "train.evaluate_rows": 512}
    settings = never | {"schedule.warmup": 0.1} | size.settings | length
    electra.pretrain(size.recipe, settings, data=work / data, run=work / name, start=start)


def finetune(work: Path, name: str, seeds: int, pretrained: bool) -> list[float]:
    """The accuracy on dev of each seed."""
    settings = {"evaluations": 1, "length": 64} | ({} if pretrained else {"pretrained": False, "layer_decay": 1.0})
    out, table = work / f"sst2-{name}{'' if pretrained else '-untrained'}", work / "sst2-train.jsonl"
    columns = {"dev": work / "sst2-dev.jsonl", "text": "sentence", "label": "label"}
    done = electra.finetune(work / name, table, out=out, seeds=seeds, epochs=2, **settings, **columns).results
    (task,) = done["tasks"].values()
    return [task["scores"]["dev"][f"seed {seed}"][task["metric"]] for seed in range(seeds)]


def together(jobs: int, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    if jobs == 1:
        return [function(*each) for each in arguments]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(function, *zip(*arguments, strict=True)))


if __name__ == "__main__":
    main()
