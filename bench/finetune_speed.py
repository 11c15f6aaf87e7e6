"""Fine-tuning on the CPU: ours and the transformers Trainer with its dynamic-padding collator, side by side.

    python bench/finetune_speed.py --data ../shared/data [--rows 3200] [--repeats 3] [--model FOLDER]

Both: the same start (by default an untrained ELECTRA-Small), the same rows of SST-2 and MNLI, already tokenized, batches
of 32, one epoch, fused AdamW with one rate for all layers, warm-up 10 %, linear decay, clipping, dropout 0.1, float32. Each
run is a process of its own, the sides alternate; training time alone is compared, by medians, and peak memory is the
largest of each side. The Trainer needs accelerate (pip install "electra[bench]").
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
from random_small import random_small

TASKS = ("sst2", "mnli")
BATCH, LR, LENGTH = 32, 3e-4, 128
ASKED = 1.5


def ours(arguments: argparse.Namespace, train: list[dict], dev: list[dict]) -> dict[str, float]:
    from electra.base.jobs import Signals
    from electra.finetuning.seeds import build_model, load_start, plan_task, prepare_task
    from electra.finetuning.training import Encoded, infer, train_task
    from electra.train.loop import Run

    start = load_start(Path(arguments.model))
    method = {"lr": LR, "batch": BATCH, "layer_decay": 1.0, "bias_correction": True, "schedule": "linear"}
    overrides = {"data": str(Path(arguments.data) / "glue"), "length": LENGTH, "epochs": 1, "evaluations": 1, **method}
    planned = plan_task(arguments.task, overrides | {"device": "cpu"}, start)
    planned = replace(planned, plan=replace(planned.plan, splits={"train": train, "dev": dev}))
    prepared, model = prepare_task(planned), build_model(planned, arguments.seed)
    part = prepared.others["dev"]
    alone = replace(prepared, others={"dev": Encoded(dev[:1], part.examples[:1])})
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), {}, name=arguments.task, keeps_last=False)
        history = train_task(model, alone, arguments.seed, run, Signals())
    outputs = infer(model, prepared.task, part.examples, prepared.method)
    scores = prepared.task.scores(dev, prepared.task.predict(dev, part.examples, outputs))
    return {"seconds": history.seconds, "accuracy": scores["accuracy"]}


def trainer(arguments: argparse.Namespace, train: list[dict], dev: list[dict]) -> dict[str, float]:
    import numpy as np
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    columns = ("sentence",) if arguments.task == "sst2" else ("premise", "hypothesis")
    names = sorted({str(row["label"]) for row in train})
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)

    def encode(rows: list[dict]) -> list[dict[str, Any]]:
        texts = [[row[name] for row in rows] for name in columns]
        tokens = tokenizer(*texts, truncation=True, max_length=LENGTH)
        labels = [names.index(str(row["label"])) for row in rows]
        return [{key: tokens[key][n] for key in tokens} | {"label": labels[n]} for n in range(len(rows))]

    torch.manual_seed(arguments.seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(arguments.model, num_labels=len(names))
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=2 * BATCH,
            num_train_epochs=1,
            learning_rate=LR,
            warmup_steps=0.1,
            lr_scheduler_type="linear",
            optim="adamw_torch_fused",
            adam_epsilon=1e-6,
            max_grad_norm=1.0,
            seed=arguments.seed,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        collator = transformers.DataCollatorWithPadding(tokenizer)
        runner = transformers.Trainer(model, settings, train_dataset=encode(train), data_collator=collator)
        started = time.perf_counter()
        runner.train()
        seconds = time.perf_counter() - started
        found = runner.predict(encode(dev))
    accuracy = float((np.argmax(found.predictions, 1) == found.label_ids).mean())
    return {"seconds": seconds, "accuracy": accuracy}


SIDES = {"electra": ours, "trainer": trainer}


def rows_of(arguments: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """A fixed part of train, spread over the file, and the beginning of dev."""
    from electra.data.tables import read_rows

    folder = Path(arguments.data) / "glue" / arguments.task
    files = sorted(folder.iterdir())
    train = list(read_rows(next(file for file in files if file.name.startswith("train"))))
    dev = list(read_rows(next(file for file in files if file.name.startswith("dev"))))
    step = max(1, len(train) // arguments.rows)
    return train[::step][: arguments.rows], dev[:: max(1, len(dev) // arguments.dev_rows)][: arguments.dev_rows]


def high_water_mark() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def one(arguments: argparse.Namespace) -> None:
    train, dev = rows_of(arguments)
    result = SIDES[arguments.side](arguments, train, dev)
    print(json.dumps(result | {"peak_mib": high_water_mark(), "rows": len(train)}))


def measure(side: str, task: str, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    words = [sys.executable, __file__, "--side", side, "--task", task, "--seed", str(seed)]
    words += ["--data", arguments.data, "--model", arguments.model]
    words += ["--rows", str(arguments.rows), "--dev-rows", str(arguments.dev_rows)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="../shared/data")
    parser.add_argument("--model", default="")
    parser.add_argument("--rows", type=int, default=3200)
    parser.add_argument("--dev-rows", type=int, default=800)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.side:
        one(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.model:
            vocabulary = Path(arguments.data) / "vocab" / "bert-base-uncased-vocab.txt"
            arguments.model = str(random_small(Path(folder) / "small", vocabulary))
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    report: dict[str, Any] = {}
    for task in TASKS:
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for seed in range(arguments.repeats):
            for side in SIDES:
                runs[side].append(measure(side, task, seed, arguments))
        rates = {side: statistics.median(run["rows"] / run["seconds"] for run in found) for side, found in runs.items()}
        memory = {side: max(run["peak_mib"] for run in found) for side, found in runs.items()}
        accuracy = {side: [round(run["accuracy"], 4) for run in found] for side, found in runs.items()}
        ratio = rates["electra"] / rates["trainer"]
        report[task] = {"runs": runs, "examples_per_second": rates, "peak_mib": memory, "ratio": ratio}
        print(f"{task}: {arguments.rows} rows, batch {BATCH}")
        for side in SIDES:
            print(f"  {side:10}{rates[side]:9.1f} examples/s{memory[side]:9.0f} MiB   accuracy {accuracy[side]}")
        reached = "reached" if ratio >= ASKED else "NOT reached"
        print(f"  ours is {ratio:.2f} times as fast (asked {ASKED}: {reached}), "
              f"{memory['electra'] / memory['trainer']:.2f} of the memory")  # fmt: skip
    machine.write("finetune_speed", {"model": "electra-small", "rows": arguments.rows, "tasks": report})


if __name__ == "__main__":
    main()
