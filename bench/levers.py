"""Levers of quality that the encoder does not have: would one of them pay? Tried on the quickstart's network and text, on a CPU.

    electra quickstart
    python bench/levers.py runs/quickstart --out FOLDER [--seeds 3] [--steps 1800] [--jobs 2] [--only base cls …]

base: modern-tiny. cls: the detection head reads [CLS] beside every token (DeBERTaV3). norms: layer norms without weights before the
last product of attention and of the feed-forward part (NormFormer, LTG-BERT). average-K: base, its last K checkpoints of a tenth of the
steps each averaged. once, recut: a fifth of the documents again and again; eight copies of it in other orders instead, so that each
pass cuts rows elsewhere. None of the patched networks has a class in transformers.

For each: AUC against its own generator, on text by the generator of base's seed 0 (which compares), and accuracy on the quickstart's
labels after fine-tuning (one seed).
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import electra
import machine
from electra.base.files import manifest_entry, read_object, write_json
from electra.interop import write
from electra.model.electra import pad, unpad
from electra.model.modern import ModernDetectionHead, ModernLayer, rotate

AVERAGED = (3, 5)
LEVERS = ("base", "cls", "norms", *(f"average-{count}" for count in AVERAGED), "once", "recut")
COPIES = 8


def patch(lever: str) -> None:
    if lever == "cls":
        ModernDetectionHead.forward = lambda self, hidden: self.label(hidden + hidden[:, :1]).squeeze(-1)
    if lever == "norms":
        ModernLayer.forward = normed_forward
    if lever in ("cls", "norms"):
        write.require_equal = lambda *_: None  # what transformers makes of an export is known to be another network


def normed_forward(self: Any, x: Any, by: Any, attend: Any, first_only: bool = False, rows: Any = None) -> Any:
    parts = pad(self.query_key_value(self.attention_norm(x)), rows).unflatten(2, (3, self.heads, -1)).unbind(2)
    kept = 1 if first_only else parts[0].shape[1]
    query, key, value = rotate(parts[0], by)[:, :kept], rotate(parts[1], by), parts[2]
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    attend = None if attend is None else attend[:, :, :kept]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attend)
    out = unpad(out.transpose(1, 2).flatten(2), rows)
    x = (x[:, :1] if first_only else x) + self.attention_output(F.layer_norm(out, out.shape[-1:]))
    value, gate = self.expand(self.feed_forward_norm(x)).chunk(2, dim=-1)
    hidden = F.gelu(value) * gate
    return x + self.contract(F.layer_norm(hidden, hidden.shape[-1:]))


def average(run: Path, to: Path, count: int) -> None:
    """A copy of the run whose newest weights are the mean of its last checkpoints."""
    shutil.copytree(run, to)
    folders = sorted((to / "checkpoints").iterdir(), key=lambda it: it.name)[-count:]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    mean = {name: torch.stack([it[name] for it in weights]).mean(0) for name in weights[-1]}
    newest = folders[-1]
    save_file(mean, newest / "model.safetensors")
    entry = {"model.safetensors": manifest_entry((newest / "model.safetensors").read_bytes())}
    write_json(newest / "manifest.json", read_object(newest / "manifest.json") | entry)


def measure(lever: str, seed: int, quickstart: Path, out: Path, steps: int) -> dict[str, Any]:
    run = out / f"{lever}-{seed}"
    data = out / f"shards-{lever}" if lever in ("once", "recut") else quickstart / "shards"
    if lever.startswith("average-"):
        if not run.is_dir():
            average(out / f"base-{seed}", run, int(lever.removeprefix("average-")))
    else:
        every = steps // 10
        words = [f"data={data}", f"run={run}", f"seed={seed}", f"train.steps={steps}", f"train.save_every={every}"]
        electra.pretrain("modern-tiny", [*words, f"train.keep_every={every}", f"train.evaluate_every={steps}"])
    labels = out / f"labels-{lever}-{seed}"
    task = electra.finetune(run, quickstart / "labels", labels, epochs=10).results["tasks"]["labels"]
    own, fixed = electra.evaluate(run), electra.evaluate(run, generator=out / "base-0")
    return {
        "lever": lever,
        "seed": seed,
        "steps": steps,
        "mlm_loss": own["trained"]["mlm_loss"],
        "auc": own["trained"]["auc"],
        "fixed_auc": fixed["trained"]["auc"],
        "labels": task["median"],
    }


def prepare_copies(quickstart: Path, out: Path) -> None:
    lines = (quickstart / "documentation.jsonl").read_text("utf-8").rstrip("\n").split("\n")[::5]
    for name, copies in (("once", 1), ("recut", COPIES)):
        folder = out / f"text-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        for copy in range(copies):
            random.Random(copy).shuffle(lines)
            (folder / f"{copy}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        electra.prepare(folder, out / f"shards-{name}", quickstart / "tokenizer", heldout=0.02)


def in_process(words: list[str], path: Path) -> dict[str, Any]:
    if not path.is_file():
        with path.with_suffix(".log").open("w") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, __file__, *words], stdout=log, stderr=log, check=True, env=environment)
    return read_object(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("quickstart", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=LEVERS, default=LEVERS)
    parser.add_argument("--one", nargs=2, metavar=("LEVER", "SEED"), help="one run, in this process")
    given = parser.parse_args()
    if given.one:
        lever, seed = given.one[0], int(given.one[1])
        patch(lever)
        result = measure(lever, seed, given.quickstart, given.out, given.steps)
        (given.out / f"{lever}-{seed}.json").write_text(json.dumps(result))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    if {"once", "recut"} & set(given.only):
        prepare_copies(given.quickstart, given.out)
    common = [str(given.quickstart), "--out", str(given.out), "--steps", str(given.steps)]
    runs = [(lever, seed) for lever in given.only for seed in range(given.seeds)]  # base first: others read it
    paths = {run: given.out / f"{run[0]}-{run[1]}.json" for run in runs}
    rows = []
    with ThreadPoolExecutor(given.jobs) as pool:
        first = in_process([*common, "--one", *map(str, runs[0])], paths[runs[0]])
        rows = [first, *pool.map(lambda it: in_process([*common, "--one", *map(str, it)], paths[it]), runs[1:])]
    if other := {row.get("steps", given.steps) for row in rows} - {given.steps}:
        raise SystemExit(f"{given.out} has rows of {other.pop():,} steps. Use another folder (--out).")
    for lever in given.only:
        own = [row for row in rows if row["lever"] == lever]
        columns = {key: [row[key] for row in own] for key in ("mlm_loss", "auc", "fixed_auc", "labels")}
        said = (f"{key} {statistics.fmean(it):.4f} ({min(it):.3f} to {max(it):.3f})" for key, it in columns.items())
        print(f"{lever:10} {'  '.join(said)}")
    machine.write("levers", {"steps": given.steps, "rows": rows})


if __name__ == "__main__":
    main()
