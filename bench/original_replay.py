"""The original code's own updates, repeated by ours: same first weights, same masks and samples, so that losses and weights must agree.

    python bench/first_steps.py rows --data SHARDS --out FOLDER --steps 100 --of 4000 encoder.dropout=0 encoder.attention_dropout=0 [KEY=VALUE]...
    python bench/original_steps.py CHECKOUT FOLDER --replay 100     (another environment: see there)
    python bench/original_replay.py FOLDER

Ours are networks, losses, clipping, optimizer and decay. Theirs are masks and samples, positions that were drawn twice included, and the learning rate of
each update: their graph does not say whether the step is counted before or after it is read. Both in float32. Differences grow from step to step as all
rounding does; a control says how fast: ours from the same weights, each changed by 1e-7 of itself.

tests/objectives/original is such a folder of a small network, and a test repeats it.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import machine
from electra.base.batch import Batch
from electra.data.tokenizer import special_ids
from electra.interop.importing import ImportOptions, import_network
from electra.objectives import build
from electra.objectives.corruption import Chosen, Corrupted, Generated
from electra.objectives.electra import Electra
from electra.objectives.losses import Loss, masked_lm_loss
from electra.pretraining.settings import PretrainSettings, resolve
from electra.pretraining.start import load_network, take_weights
from electra.train.step import Execution, build_step

ROUNDING = 1e-7
LOSSES = ("mlm_loss", "rtd_loss")


class Replay(nn.Module):
    """ELECTRA on what somebody else has masked and sampled."""

    headline = extra_metrics = muted_alarms = ()

    def __init__(self, electra: Electra, steps: dict[str, Tensor]):
        super().__init__()
        self.electra, self.corruptor, self.steps, self.number = electra, electra.corruptor, steps, 0

    def batch(self) -> Batch:
        now = self.now()
        return Batch.of_rows(now["ids"], now["segments"], now["is_real"] > 0)

    def now(self) -> dict[str, Tensor]:
        return {name: values[self.number] for name, values in self.steps.items()}

    def forward(self, batch: Batch) -> Loss:
        now = self.now()
        used = now["weights"] > 0
        masked = batch.with_ids(now["masked"])
        logits = self.corruptor.generator(masked, now["positions"])
        mlm_loss = masked_lm_loss(logits, now["targets"], used)
        chosen = Chosen(now["positions"], used, now["targets"], torch.zeros_like(batch.ids))
        generated = Generated(now["targets"], used, mlm_loss)
        replaced = batch.with_ids(now["corrupted"])
        found = self.electra(
            batch, Corrupted(replaced, masked, chosen, generated, mlm_loss, now["is_replaced"] > 0, {})
        )
        self.losses = mlm_loss.item(), (found.total.item() - mlm_loss.item()) / self.electra.settings.detection_weight
        return found


def imported(checkpoint: Path, words: list[str]) -> Electra:
    """Through `electra import` and `start=`, as people would go on with it."""
    plain, _ = resolve("electra-small", [*words, "data=none", "run=none"])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "imported"
        import_network(checkpoint, out, None, ImportOptions(heads=plain.encoder.heads, lowercase=True))
        settings, _ = resolve("electra-small", [*words, "data=none", "run=none", f"start={out}"])
        tokenizer = load_network(out).tokenizer
        none = torch.zeros(tokenizer.get_vocab_size())
        objective = build(settings.objective, settings.inputs(special_ids(tokenizer), none.bool(), none))
        take_weights(settings, objective, tokenizer)
    assert isinstance(objective, Electra)
    return objective


def replayed(electra: Electra, steps: dict[str, Tensor], rates: Tensor, settings: PretrainSettings) -> np.ndarray:
    """Both losses of every step. The networks are trained where they are."""
    replay = Replay(electra, steps).train()
    execution = Execution.of(settings.train, torch.device("cpu"))
    step = build_step(replay, settings.optimizer_of_run(), execution, settings.seed)
    losses = []
    for replay.number, rate in enumerate(rates.tolist()):
        step(replay.batch(), replay.number, rate)
        losses.append(replay.losses)
    return np.array(losses)


def difference(one: Electra, other: Electra) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


def repeat(folder: Path) -> dict[str, Any]:
    words = json.loads((folder / "rows.json").read_text("utf-8"))["words"] + [
        "train.fast=off",
        "train.precision=float32",
    ]
    settings, _ = resolve("electra-small", [*words, "data=none", "run=none"])
    steps = {name: torch.from_numpy(values) for name, values in np.load(folder / "replay.npz").items()}
    steps = {name: values.long() if values.dtype == torch.int32 else values for name, values in steps.items()}
    rates = steps.pop("rate") / settings.optimizer.lr
    theirs = np.stack([steps.pop(name).numpy() for name in LOSSES], axis=1)
    before, ours, rounded, after = (imported(folder / it, words) for it in ("before", "before", "before", "after"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.mul_(1 + ROUNDING * torch.randn_like(parameter))
    losses = replayed(ours, steps, rates, settings)
    control = replayed(rounded, steps, rates, settings)
    every = max(1, len(theirs) // 10)
    return {
        "losses": LOSSES,
        "every": every,
        "original": theirs[::every].tolist(),
        "difference": np.abs(losses - theirs)[::every].tolist(),
        "control": np.abs(control - losses)[::every].tolist(),
        "weights": {
            "moved": difference(after, before),
            "difference": difference(after, ours),
            "control": difference(rounded, ours),
        },
        "words": words,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    result = repeat(parser.parse_args().folder)
    print(json.dumps(result, indent=1))
    machine.write("original_replay", result)


if __name__ == "__main__":
    main()
