"""The original code's own updates, repeated by ours: same first weights, same masks and samples, so that losses and weights must agree.

    python bench/first_steps.py rows --data SHARDS --out FOLDER --steps 100 --of 4000 encoder.dropout=0 encoder.attention_dropout=0 [KEY=VALUE]...
    python bench/original_steps.py CHECKOUT FOLDER --replay 100    (another environment: see there)
    python bench/original_replay.py FOLDER --data SHARDS

Ours are networks, losses, clipping, optimizer and decay. Theirs are masks and samples, positions that were drawn twice included, and the learning rate of
each update: their graph does not say whether the step is counted before or after it is read. Both in float32. Differences grow from step to step as all
rounding does; a control says how fast: ours from the same weights, each changed by 1e-7 of itself.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import machine
from electra.base.batch import Batch
from electra.interop.importing import ImportOptions, import_network
from electra.objectives.corruption import Chosen, Corrupted, Generated
from electra.objectives.electra import Electra
from electra.objectives.losses import Loss, masked_lm_loss
from electra.pretraining.run import build_parts
from electra.pretraining.settings import PretrainSettings, resolve
from electra.train.device import choose_device
from electra.train.step import Execution, build_step

ROUNDING = 1e-7
"""How much the first weights of a control are changed by: what grows out of it is what rounding grows to."""


class Replay(nn.Module):
    """ELECTRA on what somebody else has masked and sampled."""

    headline = extra_metrics = muted_alarms = ()

    def __init__(self, electra: Electra, steps: dict[str, Tensor]):
        super().__init__()
        self.electra, self.corruptor, self.steps, self.number = electra, electra.corruptor, steps, 0

    def forward(self, batch: Batch) -> Loss:
        now = {name: values[self.number] for name, values in self.steps.items()}
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


def weights_of(folder: Path, settings: PretrainSettings, words: list[str]) -> Electra:
    imported = folder / "imported"
    if not imported.exists():
        import_network(folder, imported, None, ImportOptions(Path(settings.data), heads=settings.encoder.heads))
    with_start, _ = resolve("electra-small", [*words, f"start={imported}"])
    return build_parts(with_start, torch.device("cpu"), verify=False).objective


def replayed(electra: Electra, steps: dict[str, Tensor], rates: Tensor, settings: PretrainSettings) -> np.ndarray:
    """Both losses of every step. The networks are trained where they are."""
    device = choose_device(settings.train)
    loader = build_parts(settings, device, verify=False).loader
    replay = Replay(electra, steps).train()
    step = build_step(replay, settings.optimizer_of_run(), Execution.of(settings.train, device), settings.seed)
    losses = []
    for replay.number, rate in enumerate(rates.tolist()):
        step(loader.batch_at(replay.number), replay.number, rate)
        losses.append(replay.losses)
    return np.array(losses)


def difference(one: Electra, other: Electra) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", required=True)
    given = parser.parse_args()
    stored = json.loads((given.folder / "rows.json").read_text("utf-8"))
    words = [f"data={given.data}", "run=unused", *stored["words"], "train.fast=off", "train.precision=float32"]
    settings, _ = resolve("electra-small", words)
    steps = {name: torch.from_numpy(values) for name, values in np.load(given.folder / "replay.npz").items()}
    steps = {name: values.long() if values.dtype == torch.int32 else values for name, values in steps.items()}
    rates = steps.pop("rate") / settings.optimizer.lr
    theirs = np.stack([steps.pop(name).numpy() for name in ("mlm_loss", "rtd_loss")], axis=1)
    before, ours, rounded, after = (
        weights_of(given.folder / name, settings, words) for name in ("before", "before", "before", "after")
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.mul_(1 + ROUNDING * torch.randn_like(parameter))
    losses = replayed(ours, steps, rates, settings)
    control = replayed(rounded, steps, rates, settings)
    result = {
        "losses": ["mlm_loss", "rtd_loss"],
        "every": 10,
        "original": theirs[::10].tolist(),
        "difference": np.abs(losses - theirs)[::10].tolist(),
        "control": np.abs(control - losses)[::10].tolist(),
        "weights": {
            "moved": difference(after, before),
            "difference": difference(after, ours),
            "control": difference(rounded, ours),
        },
        "words": stored["words"],
    }
    print(json.dumps(result, indent=1))
    machine.write("original_replay", result)


if __name__ == "__main__":
    main()
