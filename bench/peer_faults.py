"""Ten faults, done alike to `electra` and to transformers' Trainer: python bench/peer_faults.py

Tiny ELECTRAs train on the CPU, in processes forked from one that has imported everything. What each says and does is stored in
results/peer_faults.json: exit codes, messages, steps that were done and that are saved, and whether the same command afterwards
ends with the weights of a run to which nothing happened. Needs `electra[bench,hf]`. Linux.
"""

import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import machine

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["peer_faults", "torch._dynamo", "electra.pretraining.run", "transformers.trainer"])
STEPS, SAVE_EVERY, LR = 18, 3, 1e-3
TEXT = [f"The {a} {b} walks to the {b} {a} and back again, number {n}." for n in range(40) for a in "xy" for b in "uvw"]
RECIPE = f"""
seed = 3
encoder = {{layers = 2, hidden = 64, heads = 2, intermediate = 128, embedding = 64, positions = 64}}
rows = {{length = 32}}
optimizer = {{lr = {LR}}}
schedule = {{warmup = 2}}
train = {{steps = {STEPS}, batch = 8, log_every = 1, evaluate_every = 1000, save_every = {SAVE_EVERY}}}
"""


class Trainer:
    """The script that the documentation of Trainer leads to: it resumes where there is a checkpoint."""

    weights, config, manifest = "model.safetensors", "config.json", ""
    heads = '"num_attention_heads": 2', '"num_attention_heads": 4'

    def __init__(self, world: Path):
        self.world = world

    def train(self, folder: Path, steps: int, save_every: int, lr: float) -> None:
        import torch
        import transformers
        from transformers.trainer_utils import get_last_checkpoint

        class Count(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                (folder.parent / f"{folder.name}.steps").write_text(str(state.global_step))

        transformers.set_seed(3)
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        config = transformers.ElectraConfig(**sizes, vocab_size=30522)
        rows = [{"input_ids": torch.arange(32) + n, "labels": torch.arange(32) % 3 % 2} for n in range(64)]
        shown = {"logging_steps": 1, "report_to": [], "use_cpu": True}
        saved = {"save_steps": save_every, "save_total_limit": 3}
        options = transformers.TrainingArguments(str(folder), max_steps=steps, learning_rate=lr, **saved, **shown)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.world / "export")
        trainer = transformers.Trainer(
            transformers.ElectraForPreTraining(config),
            options,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[Count()],
        )
        there = get_last_checkpoint(str(folder)) if folder.is_dir() else None
        trainer.train(resume_from_checkpoint=there)
        trainer.save_model(str(folder / "final"))

    def use(self, model: Path) -> None:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        network = transformers.AutoModelForPreTraining.from_pretrained(model)
        logits = network(**tokenizer("the barak walks", return_tensors="pt")).logits
        print("answers:", [round(value, 3) for value in logits[0].tolist()])

    def is_saving(self, folder: Path) -> bool:
        half = folder / f"checkpoint-{2 * SAVE_EVERY}"
        return half.exists() and not (half / "trainer_state.json").exists()

    def checkpoints(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))

    def saved_step(self, folder: Path) -> int:
        return max([0, *(int(path.name.split("-")[1]) for path in self.checkpoints(folder))])

    def done_step(self, folder: Path) -> int:
        path = folder.parent / f"{folder.name}.steps"
        return int(path.read_text()) if path.exists() else 0

    def model(self, folder: Path) -> Path:
        return folder / "final"


class Electra:
    weights, config, manifest = "model.safetensors", "config.json", "manifest.json"
    heads = '"num_attention_heads": 2', '"num_attention_heads": 4'

    def __init__(self, world: Path):
        self.world = world

    def train(self, folder: Path, steps: int, save_every: int, lr: float) -> None:
        settings = (f"train.steps={steps}", f"train.save_every={save_every}", f"optimizer.lr={lr}")
        command("pretrain", self.world / "recipe.toml", f"data={self.world / 'shards'}", f"run={folder}", *settings)

    def use(self, model: Path) -> None:
        command("detect", model, "the barak walks")

    def is_saving(self, folder: Path) -> bool:
        return self.saved_step(folder) > 0 and any(folder.glob("checkpoints/.tmp-*"))

    def checkpoints(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("checkpoints/step-*"))

    def saved_step(self, folder: Path) -> int:
        return max([0, *(int(path.name.split("-")[1]) for path in self.checkpoints(folder))])

    def done_step(self, folder: Path) -> int:
        from electra.train.log import read_metrics

        return max([0, *(record["step"] for record in read_metrics(folder))])

    def model(self, folder: Path) -> Path:
        return folder / "export"


Peer = Trainer | Electra


def command(*words: object) -> None:
    from electra.commands import main

    main([str(word) for word in words])


def start(work: Callable[..., None], output: Path, *arguments: object, limit: int = 0) -> BaseProcess:
    process = CONTEXT.Process(target=with_output, args=(work, output, limit, *arguments))
    process.start()
    return process


def with_output(work: Callable[..., None], output: Path, limit: int, *arguments: object) -> None:
    """In the process itself. A limit on the size of files stands for a full disk: it needs no rights."""
    place = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(place, 1)
    os.dup2(place, 2)
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    work(*arguments)


def ended(process: BaseProcess, output: Path) -> dict[str, object]:
    process.join(600)
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    words = ("warn", "damaged", "error", "differ", "mismatch", "electra:")
    warnings = [line[:300] for line in lines if any(word in line.lower() for word in words)]
    traceback = any("Traceback" in line for line in lines)
    metrics = [line[-300:] for line in lines if "loss" in line or "mlm" in line]
    told = {"told": warnings[-6:], "last_metrics": metrics[-1:], "last_line": lines[-1][:300]}
    return {"exit_code": process.exitcode, "traceback": traceback, **told}


def try_all(peer: Peer, place: Path) -> dict[str, dict[str, object]]:
    plain, place = (STEPS, SAVE_EVERY, LR), place / type(peer).__name__
    place.mkdir()
    results: dict[str, dict[str, object]] = {}

    def run(folder: Path, settings: tuple[float, ...] = plain, limit: int = 0) -> dict[str, object]:
        output = place / "output"
        output.unlink(missing_ok=True)
        return ended(start(peer.train, output, folder, *settings, limit=limit), output)

    def ends_like_whole(folder: Path) -> bool:
        paths = [peer.model(path) / peer.weights for path in (folder, whole)]
        return paths[0].exists() and len({hashlib.sha256(path.read_bytes()).digest() for path in paths}) == 1

    def report(fault: str, result: dict[str, object]) -> None:
        results[fault] = result
        print(json.dumps({"peer": type(peer).__name__, "fault": fault} | result), flush=True)

    def damaged(fault: str, damage: Callable[[Path], None]) -> None:
        """Half of a run, its newest checkpoint damaged, then the same command."""
        folder = place / fault.replace(" ", "-")
        shutil.copytree(half, folder)
        damage(peer.checkpoints(folder)[-1])
        result = run(folder) | {"same_weights": ends_like_whole(folder)}
        report(fault, result | {"finite_weights": is_finite(peer.model(folder) / peer.weights)})

    whole = place / "whole"
    assert run(whole)["exit_code"] == 0, (place / "output").read_text()[-3000:]

    # a kill in the middle of a save, then the same command
    half = place / "kill"
    process = start(peer.train, place / "killed", half, *plain)
    while process.is_alive() and not peer.is_saving(half):
        time.sleep(0.0002)
    process.kill()
    process.join()
    left = sorted(path.name for path in peer.checkpoints(half)[-1].iterdir())
    again = run(half) | {"newest_checkpoint_held": left}
    report("kill during save", again | {"same_weights": ends_like_whole(half)})

    # half of a run that is whole, for what follows
    half = place / "half"
    process = start(peer.train, place / "halved", half, *plain)
    while process.is_alive() and peer.saved_step(half) < 3 * SAVE_EVERY:
        time.sleep(0.0002)
    os.kill(process.pid or 0, signal.SIGSTOP)
    shutil.copytree(half, place / "copy", ignore=shutil.ignore_patterns(".tmp-*", ".lock"))
    process.kill()
    process.join()
    shutil.rmtree(half)
    for path in peer.checkpoints(place / "copy"):
        if not (path / "state.json").exists() and not (path / "trainer_state.json").exists():
            shutil.rmtree(path)
    (place / "copy").rename(half)
    damaged("nothing, resumed (for comparison)", lambda newest: None)
    damaged("flipped bit", lambda newest: flip(newest / peer.weights))
    damaged("truncated checkpoint", lambda newest: cut(newest / peer.weights))
    damaged("NaN weights", lambda newest: spoil(newest / peer.weights, peer.manifest))

    # a file that does not fit: the weights do, the optimizer's state does not
    folder = place / "full"
    limit = int((peer.checkpoints(whole)[-1] / peer.weights).stat().st_size * 1.5)
    full = run(folder, limit=limit) | {"steps_saved": peer.saved_step(folder)}
    report("full disk", full | {"then": run(folder), "same_weights": ends_like_whole(folder)})

    # a reader that goes away, and SIGTERM; both long after the last checkpoint
    for fault in ("closed pipe", "SIGTERM"):
        folder, fifo = place / fault.replace(" ", "-"), place / f"{fault}.fifo"
        os.mkfifo(fifo)
        process = start(peer.train, fifo, folder, 5000, 1000, LR)
        with fifo.open() as reader:
            while peer.done_step(folder) < 10:
                reader.readline()
            if fault == "SIGTERM":
                process.terminate()
                rest = reader.read().strip().splitlines()
        process.join(120)
        is_running = process.is_alive()
        process.kill()
        result = {"exit_code": process.exitcode, "steps_done": peer.done_step(folder)} | {"still_running": is_running}
        result["steps_saved"] = peer.saved_step(folder)
        report(fault, result | ({"last_line": (rest or [""])[-1][-300:]} if fault == "SIGTERM" else {}))

    # a model that is used after its tokenizer is gone, or its number of heads edited
    def used(fault: str, damage: Callable[[Path], None]) -> None:
        model, output = place / f"{fault} model", place / f"{fault} output"
        shutil.copytree(peer.model(whole), model)
        damage(model)
        report(fault, ended(start(peer.use, output, model), output))

    used("nothing, used (for comparison)", lambda model: None)
    used("missing tokenizer file", lambda model: (model / "tokenizer.json").unlink())
    used("edited config", lambda model: swap(model / peer.config, *peer.heads))

    # the second half of a run at ten times the rate
    folder = place / "other"
    shutil.copytree(half, folder)
    other = run(folder, (STEPS, SAVE_EVERY, 10 * LR))
    report("resume with other settings", other | {"same_weights": ends_like_whole(folder)})
    return results


def flip(path: Path) -> None:
    """A bit of an exponent in the middle: one weight is four times what it was, or a quarter."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 // 4 * 4 + 3] ^= 1
    path.write_bytes(data)


def is_finite(path: Path) -> bool | None:
    from safetensors.torch import load_file

    return all(tensor.isfinite().all().item() for tensor in load_file(path).values()) if path.exists() else None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def swap(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} has no {old}"
    path.write_text(text.replace(old, new))


def spoil(path: Path, manifest: str) -> None:
    """NaN in one weight; where there is a manifest, one that agrees: as if it had been saved so."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    next(tensor for name, tensor in sorted(tensors.items()) if "layer" in name).view(-1)[0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    if manifest:
        entries = json.loads((path.parent / manifest).read_text())
        data = path.read_bytes()
        entries[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (path.parent / manifest).write_text(json.dumps(entries))


def make_world(world: Path) -> None:
    (world / "text.txt").write_text("\n\n".join(TEXT))
    (world / "recipe.toml").write_text(RECIPE)
    tokenizer, shards = world / "tokenizer", world / "shards"
    for words in (
        ("tokenizer", tokenizer, world / "text.txt", "--vocab-size", 300),
        ("prepare", shards, world / "text.txt", "--tokenizer", tokenizer, "--heldout", 0.1, "--workers", 1),
        ("pretrain", world / "recipe.toml", f"data={shards}", f"run={world / 'run'}", "train.steps=1"),
    ):
        process = start(command, world / "output", *words)
        process.join()
        assert process.exitcode == 0, (world / "output").read_text()
    (world / "run" / "export").rename(world / "export")


def main() -> None:
    import transformers

    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "world").mkdir()
        make_world(place / "world")
        results = {
            type(peer).__name__: try_all(peer, place) for peer in (Electra(place / "world"), Trainer(place / "world"))
        }
    machine.write("peer_faults", {"transformers": transformers.__version__, "results": results})


if __name__ == "__main__":
    from peer_faults import main as main_by_name  # forked processes know what is to be done by its module's name

    main_by_name()
