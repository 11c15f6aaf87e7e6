"""Default fine-tuning held against the majority, TF-IDF and the same network untrained, on small cuts of every labelled set there is.

    python bench/robust.py [KEY=VALUE]... --model FOLDER --data FOLDER... [--rows 500 5000] [--seeds 3] [--jobs 1] [--seconds 2400] [--out FOLDER]

The data folders have glue/, tokens/, ja/ and ko/ between them. Each set is cut to the same rows every time (drawn by a fixed seed), so that
two models, or two methods (KEY=VALUE, such as method=paper), are compared on the same tables, each in an OUT of its own. A set that the vocabulary cannot read (more than
a tenth of its pieces are unknown) is left out, with the share; --model-ko and --model-ja are encoders of those languages, used for their sets.
--jobs sets are done at a time, each in a process of its own. After each set its row is in OUT/ROWS/SET.json, and the table of all is in
OUT/robust.md and bench/results/NAME.json: the same command goes on with what is left. After --seconds it stops, wherever it is.
"""

import argparse
import json
import logging
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import machine
from electra.base import config
from electra.base.errors import ElectraError
from electra.base.jobs import Signals, run_jobs
from electra.base.progress import Table, duration
from electra.data.tables import TableWriter, column_of, read_rows
from electra.finetuning.run import finetune
from electra.finetuning.seeds import load_start
from electra.finetuning.tagging import all_tags
from electra.train.device import gpu_names

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
NAMES = (*GLUE, *TAGGING, *OTHERS)
MOST_UNKNOWN = 0.1
PASSED = "passes"


def cut(source: Path, target: Path, rows: int) -> None:
    content = list(read_rows(source))
    chosen = sorted(random.Random(source.name).sample(range(len(content)), min(rows, len(content))))
    target.parent.mkdir(parents=True, exist_ok=True)
    with TableWriter(target) as writer:
        writer.write([content[place] for place in chosen])


def begins(folders: Sequence[Path], under: str, name: str) -> Path:
    found = [path for folder in folders for path in sorted((folder / under).glob(f"{name}*"))]
    if not found:
        raise FileNotFoundError(f"no {under}/{name}* in {', '.join(map(str, folders))}")
    return found[0]


def source_of(name: str, data: Sequence[Path]) -> tuple[Path, Path, dict[str, Any]]:
    if name in OTHERS:
        folder, train, dev, settings = OTHERS[name]
        return begins(data, folder, f"{train}."), begins(data, folder, f"{dev}."), settings
    settings = config.read_recipe(name, "recipes/tasks")
    folder, (train, dev) = (f"glue/{name}", ("train", "dev")) if name in GLUE else ("tokens", TAGGING[name])
    return begins(data, folder, train), begins(data, folder, dev), settings


def tags_of(train: Path, settings: Mapping[str, Any]) -> list[str]:
    """Of the whole set: a cut of it does not show every type that dev has."""
    tags = {str(tag) for row in read_rows(train) for tag in row[settings["tags"]]}
    scheme = settings.get("train_scheme", settings.get("scheme", "iob2"))
    return sorted(tags) if scheme == "none" else all_tags({tag[2:] for tag in tags - {"O"}}, scheme)


def table_of(name: str, data: Sequence[Path], out: Path, rows: int, dev_rows: int) -> Path:
    """The TOML file of the cut."""
    folder, toml = out / "data" / name, out / "data" / f"{name}.toml"
    if not toml.is_file():
        train, dev, settings = source_of(name, data)
        cut(train, folder / "train.jsonl", rows)
        cut(dev, folder / "dev.jsonl", dev_rows)
        kept = {key: value for key, value in settings.items() if key not in ("rows", "files", "submission", "epochs")}
        kept |= {"data": str(folder.resolve()), "name": name}
        kept |= {"labels": tags_of(train, settings)} if name in TAGGING else {"shared_rows": "allow"}
        toml.write_text("".join(f"{key} = {config.toml_value(value)}\n" for key, value in kept.items()))
    return toml


def unknown_share(model: Path, name: str, table: Path) -> float:
    """Of the pieces that the model's tokenizer makes of the texts."""
    tokenizer = load_start(model).network.tokenizer
    known = config.read_recipe(str(table), "recipes/tasks")
    column = known["tokens" if name in TAGGING else "text"]
    columns = [column] if isinstance(column, str) else column
    ids: list[int] = []
    for row in read_rows(table.with_suffix("") / "dev.jsonl"):
        texts = (" ".join(row[it]) if name in TAGGING else str(row[column_of(it, row)]) for it in columns)
        ids += [number for text in texts for number in tokenizer.encode(text, add_special_tokens=False).ids]
    return sum(number == tokenizer.token_to_id("[UNK]") for number in ids) / max(1, len(ids))


def kept_row(path: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of an earlier call that asked for the same."""
    row = json.loads(path.read_text("utf-8")) if path.is_file() else None
    if row and (other := [key for key, value in asked.items() if row.get(key, value) != value]):
        raise SystemExit(f"{path} was measured with another {' and '.join(other)}. Use another folder (--out).")
    return row


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def run_set(size: str, name: str, words: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """In a process of its own. What goes wrong with one set is its row, and the others go on."""
    began, folder = time.monotonic(), Path(words["out"])
    torch.set_num_threads(words["threads"])
    try:
        results = finetune(
            Path(words["model"]), [words["table"]], words["overrides"], folder, words["seeds"], untrained=True
        )
    except (ElectraError, RuntimeError) as error:
        return size, name, {"task": name, "failure": f"{type(error).__name__}: {error}"}
    result = results["tasks"][name]
    metric, levels = result["metric"], result["baselines"]["dev"]
    paths = folder.glob("untrained/*/results.json")
    at_rates = {path.parent.name: json.loads(path.read_text("utf-8"))["tasks"][name] for path in paths}
    rate = max(at_rates, key=lambda it: (at_rates[it]["runs"], at_rates[it]["median"]))
    scores, untrained = (
        [it["scores"]["dev"][f"seed {seed}"][metric] for seed in range(words["seeds"])]
        for it in (result, at_rates[rate])
    )
    row = {
        "task": name,
        "metric": metric,
        **words["asked"],
        "score": statistics.fmean(scores),
        "sd": spread(scores),
        "majority": levels["majority"][metric],
        "words": levels["words"][metric],
        "untrained": statistics.fmean(untrained),
        "untrained_sd": spread(untrained),
        "untrained_rate": rate,
        "scores": scores,
        "untrained_scores": untrained,
        "alarms": result["alarms"],
        "seconds": round(time.monotonic() - began, 1),
    }
    for path in folder.rglob(
        "model.safetensors"
    ):  # what is asked is in the row; two hundred networks would fill a disk
        path.unlink()
    return size, name, row


def verdict(row: Mapping[str, Any]) -> str:
    if problem := row.get("skipped") or row.get("failure"):
        return str(problem)
    texts = []
    if row["score"] <= row["majority"]:
        texts.append("not above the majority")
    if row["score"] < row["untrained"] - max(row["sd"], row["untrained_sd"]):
        texts.append("below untrained")
    against = "above" if row["score"] > row["words"] else "not above"
    return f"{'**fails**: ' + ', '.join(texts) if texts else PASSED}; {against} words"


def page(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    lines = []
    for size, of_size in rows.items():
        for name, row in of_size.items():
            cells = [""] * 5
            if "score" in row:
                scores = [f"{row['score']:.3f} ± {row['sd']:.3f}", f"{row['majority']:.3f}", f"{row['words']:.3f}"]
                cells = [row["metric"], *scores, f"{row['untrained']:.3f} ± {row['untrained_sd']:.3f}"]
            lines.append([size, name, *cells, verdict(row)])
    return Table(["rows", "set", "metric", "default", "majority", "words", "untrained", ""], lines).markdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", nargs="*", help="KEY=VALUE")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--model-ko", type=Path, help="for the Korean set; otherwise --model")
    parser.add_argument("--model-ja", type=Path, help="for the Japanese sets; otherwise --model")
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[500])
    parser.add_argument("--dev-rows", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="sets at a time")
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--sets", default=",".join(NAMES), help="some of them, with commas between")
    parser.add_argument("--out", type=Path, default=Path("runs/robust"))
    parser.add_argument("--name", default="robust", help="of the file under bench/results")
    arguments = parser.parse_intermixed_args()
    quiet()
    overrides = config.parse_overrides(arguments.settings)
    models = {"ko": arguments.model_ko, "ja": arguments.model_ja}

    # what is done, what cannot be read, what is left: the large cuts first, which take longest
    rows: dict[str, dict[str, dict[str, Any]]] = {str(size): {} for size in arguments.rows}
    jobs = []
    for size in map(str, sorted(arguments.rows, reverse=True)):
        for name in arguments.sets.split(","):
            folder = arguments.out / size
            language = OTHERS[name][0] if name in OTHERS else ""
            model = (models.get(language) or arguments.model).resolve()
            table = table_of(name, arguments.data, folder, int(size), arguments.dev_rows)
            row = {"task": name, "skipped": "not done"}
            asked = {"model": str(model), "settings": overrides, "seeds": arguments.seeds}
            asked |= {"dev_rows": arguments.dev_rows}
            if kept := kept_row(folder / f"{name}.json", asked):
                row = kept
            elif (share := unknown_share(model, name, table)) > MOST_UNKNOWN:
                row["skipped"] = f"left out: {share:.0%} of its pieces are unknown to this vocabulary"
            else:
                words = {"model": str(model), "table": str(table.resolve()), "overrides": overrides, "asked": asked}
                words |= {"seeds": arguments.seeds, "threads": max(1, torch.get_num_threads() // arguments.jobs)}
                jobs.append((size, name, words | {"out": str((folder / "runs" / name).resolve())}))
            rows[size][name] = row

    def write() -> None:
        (arguments.out / "robust.md").write_text(f"{arguments.model}\n\n{page(rows)}", encoding="utf-8")
        sizes = {key: getattr(arguments, key) for key in ("dev_rows", "seeds")}
        machine.write(arguments.name, {**sizes, "settings": overrides, "sets": rows})

    began = time.monotonic()
    timer = threading.Timer(arguments.seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        with Signals() as signals:
            done = run_jobs(run_set, jobs, arguments.jobs, signals, start=quiet, devices=gpu_names())
            for count, (size, name, row) in enumerate(done, 1):
                rows[size][name] = row
                if "failure" not in row:
                    (arguments.out / size / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
                write()
                left = (time.monotonic() - began) / count * (len(jobs) - count)
                print(f"{count} of {len(jobs)}, ETA {duration(left)}: {name}, {size} rows: {verdict(row)}", flush=True)
    except ElectraError as error:
        print(error)
    timer.cancel()
    write()
    print(page(rows))
    verdicts = [verdict(row) for of_size in rows.values() for row in of_size.values() if "score" in row]
    passed = sum(it.startswith(PASSED) for it in verdicts)
    print(f"{passed} of {len(verdicts)} pass; {duration(time.monotonic() - began)}")


def quiet() -> None:
    logging.getLogger("electra").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
