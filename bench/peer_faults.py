"""Five faults done to transformers' Trainer, as they are done to us in tests/faults: python bench/peer_faults.py

Each is done to a tiny ELECTRA that trains on random rows on the CPU; printed is what a user sees. Needs `electra[bench]`."""

import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def train(folder: str, resume: bool) -> None:
    """What the processes below run."""
    from transformers import ElectraConfig, ElectraForPreTraining, Trainer, TrainingArguments

    config = ElectraConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=30522
    )
    rows = [{"input_ids": torch.arange(32) + n, "labels": torch.zeros(32, dtype=torch.long)} for n in range(64)]
    options = TrainingArguments(
        folder, max_steps=40, save_steps=2, save_total_limit=3, logging_steps=1, report_to=[], use_cpu=True
    )
    trainer = Trainer(ElectraForPreTraining(config), options, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=resume or None)
    print("finished")


def start(folder: Path, resume: bool = False, limit: int = 0, **more: object) -> subprocess.Popen:
    def bound() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    words = [sys.executable, __file__, "train", str(folder), str(int(resume))]
    return subprocess.Popen(words, text=True, preexec_fn=bound, **more)  # type: ignore[call-overload]


def outcome(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=300)
    last = [line for line in (output or "").strip().splitlines() if line.strip()][-1:]
    trace = "traceback, " if "Traceback" in (output or "") else ""
    return f"exit code {process.returncode}, {trace}last line: {(last or ['nothing'])[0][:150]}"


def report(fault: str, result: str) -> None:
    print(json.dumps({"fault": fault, "result": result}), flush=True)


def newest(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def both(process_more: dict[str, object] | None = None) -> dict[str, object]:
    return {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **(process_more or {})}


def main() -> None:
    place = Path(tempfile.mkdtemp())

    # kill -9 as soon as a further checkpoint's folder appears, then the same command with resume
    folder = place / "killed"
    process = start(folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (folder / "checkpoint-6").exists():
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    held = sorted(path.name for path in newest(folder).iterdir())
    report("kill during save", f"newest holds {held}; resumed: {outcome(start(folder, True, **both()))}")

    # a flipped bit in the newest checkpoint, then resume
    whole = place / "whole"
    start(whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait()
    for fault in ("flipped bit", "NaN weights"):
        folder = place / fault.replace(" ", "-")
        shutil.copytree(whole, folder)
        path = newest(folder) / "model.safetensors"
        if fault == "flipped bit":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        else:
            tensors = load_file(path)
            next(iter(tensors.values())).view(-1)[0] = float("nan")
            save_file(tensors, path, metadata={"format": "pt"})
        report(fault, outcome(start(folder, True, **both())))

    # a full disk
    folder = place / "full"
    result = outcome(start(folder, limit=2_000_000, **both()))
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    report("full disk", f"{result}; left: {left}")

    # a reader that goes away
    folder = place / "pipe"
    process = start(folder, **both())
    assert process.stdout
    for _ in range(3):
        process.stdout.readline()
    process.stdout.close()
    code = process.wait(300)
    report("closed pipe", f"exit code {code}, checkpoints {sorted(path.name for path in folder.glob('checkpoint-*'))}")
    shutil.rmtree(place)


if __name__ == "__main__":
    train(sys.argv[2], sys.argv[3] == "1") if sys.argv[1:2] == ["train"] else main()
