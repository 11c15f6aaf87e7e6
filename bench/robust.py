"""Default fine-tuning held against the majority, TF-IDF and the same network untrained, on small cuts of every labelled set there is.

    python bench/robust.py MODEL --data FOLDER [--rows 500] [--dev-rows 500] [--seeds 2] [--jobs 1] [--seconds 2400] [--out FOLDER] [KEY=VALUE]...

FOLDER has glue/, tokens/, ja/ and ko/. Each set is cut to the same rows every time (drawn by a fixed seed), so that two models, or two
methods (KEY=VALUE, such as method=paper), are compared on the same tables. Finished tasks are kept: the same command goes on. No task is
begun later than --seconds after the start. Writes OUT/robust.md and bench/results/robust_NAME.json.
"""

import argparse
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import machine
from electra.base import config
from electra.base.progress import Table
from electra.data.tables import TableWriter, read_rows
from electra.finetuning.run import finetune

GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")
TAGGING = {
    "conll2000_chunk": ("conll2000-train", "conll2000-test"),
    "conll2003_ner": ("conll2003-train", "conll2003-dev"),
    "ud_ewt_pos": ("ud_ewt-train", "ud_ewt-dev"),
}
OTHERS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "nsmc": ("ko", "nsmc_rebuilt-train", "nsmc_rebuilt-test", {"text": ["document"], "label": "label"}),
    "jcola": ("ja", "jcola-train", "jcola-dev", {"text": ["sentence"], "label": "label", "metric": "mcc"}),
    "jsts": ("ja", "jsts-train", "jsts-dev", {"text": ["sentence1", "sentence2"], "kind": "regression", "scale": 5.0}),
}


def cut(source: Path, target: Path, rows: int) -> None:
    content = list(read_rows(source))
    chosen = sorted(random.Random(source.name).sample(range(len(content)), min(rows, len(content))))
    target.parent.mkdir(parents=True, exist_ok=True)
    with TableWriter(target) as writer:
        writer.write([content[place] for place in chosen])


def begins(folder: Path, name: str) -> Path:
    return min(path for path in folder.iterdir() if path.name.startswith(name))


def tables(data: Path, out: Path, rows: int, dev_rows: int) -> dict[str, str]:
    """task -> the TOML file of its cut."""
    sources: dict[str, tuple[Path, Path, dict[str, Any]]] = {}
    for name in GLUE:
        folder = data / "glue" / name
        sources[name] = begins(folder, "train"), begins(folder, "dev"), config.read_recipe(name, "recipes/tasks")
    for name, (train, dev) in TAGGING.items():
        folder = data / "tokens"
        sources[name] = begins(folder, train), begins(folder, dev), config.read_recipe(name, "recipes/tasks")
    for name, (language, train, dev, settings) in OTHERS.items():
        folder = data / language
        sources[name] = begins(folder, f"{train}."), begins(folder, f"{dev}."), settings
    made = {}
    for name, (train, dev, settings) in sources.items():
        folder, toml = out / "data" / name, out / "data" / f"{name}.toml"
        if not toml.is_file():
            cut(train, folder / "train.jsonl", rows)
            cut(dev, folder / "dev.jsonl", dev_rows)
            kept = {
                key: value for key, value in settings.items() if key not in ("rows", "files", "submission", "epochs")
            }
            kept |= {"data": str(folder), "name": name}
            kept |= {"shared_rows": "allow"} if kept.get("kind", "classification") not in ("tagging",) else {}
            toml.write_text("".join(f"{key} = {config.toml_value(value)}\n" for key, value in kept.items()))
        made[name] = str(toml)
    return made


def row_of(name: str, result: Mapping[str, Any], untrained: Mapping[str, Any]) -> dict[str, Any]:
    metric, baselines = result["metric"], result["baselines"]["dev"]
    row = {"task": name, "metric": metric, "score": result["median"], "sd": result["sd"] or 0.0}
    row |= {key: baselines[key][metric] for key in baselines}
    return row | {"untrained_sd": untrained["sd"] or 0.0, "alarms": result["alarms"]}


def verdict(row: Mapping[str, Any]) -> str:
    texts = []
    if row["score"] <= row["majority"]:
        texts.append("not above the majority")
    if row["score"] < row["untrained"] - max(row["sd"], row["untrained_sd"]):
        texts.append("below untrained")
    if row["score"] < row["words"]:
        texts.append("below words")
    return ", ".join(texts) or "as asked"


def page(model: str, rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        scores = [f"{row['score']:.3f} ± {row['sd']:.3f}", f"{row['majority']:.3f}", f"{row['words']:.3f}"]
        lines.append(
            [row["task"], row["metric"], *scores, f"{row['untrained']:.3f} ± {row['untrained_sd']:.3f}", verdict(row)]
        )
    head = ["task", "metric", "default", "majority", "words", "untrained", ""]
    return f"{model}\n\n{Table(head, lines).markdown()}"


def best_untrained(out: Path, name: str) -> dict[str, Any]:
    """The one whose seeds were all run."""
    results = [json.loads(path.read_text("utf-8"))["tasks"][name] for path in out.glob("untrained/*/results.json")]
    return max(results, key=lambda it: (it["runs"], it["median"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("settings", nargs="*", help="KEY=VALUE")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--dev-rows", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--tasks", default="", help="some of them, with commas between")
    parser.add_argument("--out", type=Path, default=Path("runs/robust"))
    parser.add_argument("--name", default="robust", help="of the file under bench/results")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    items = tables(arguments.data, arguments.out, arguments.rows, arguments.dev_rows)
    overrides, rows, skipped = config.parse_overrides(arguments.settings), [], []
    for name in arguments.tasks.split(",") if arguments.tasks else items:
        if time.monotonic() > until:
            skipped.append(name)
            continue
        out = arguments.out / "runs" / name
        results = finetune(
            arguments.model, [items[name]], overrides, out, arguments.seeds, arguments.jobs, untrained=True
        )
        rows.append(row_of(name, results["tasks"][name], best_untrained(out, name)))
        text = page(str(arguments.model), rows)
        (arguments.out / "robust.md").write_text(text)
        print(text, flush=True)
        sizes = {key: getattr(arguments, key) for key in ("rows", "dev_rows", "seeds")}
        machine.write(arguments.name, {**sizes, "settings": overrides, "tasks": rows, "skipped": skipped})


if __name__ == "__main__":
    main()
