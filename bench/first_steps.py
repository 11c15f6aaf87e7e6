"""The first steps of the paper's recipe, by four ways: is what the generator learns a matter of our kernels, of bfloat16, or of our modules?

    python bench/first_steps.py fast --data SHARDS --out FOLDER [--steps 10000] [KEY=VALUE]...
    python bench/first_steps.py plain …             the same in plain torch: nothing compiled, no kernels, bfloat16
    python bench/first_steps.py float32 …           plain torch in float32
    python bench/first_steps.py transformers …      transformers' modules in place of ours, compiled; masks, losses and optimizer are ours
    python bench/first_steps.py rows …              the rows alone, for the original code (bench/original_steps.py)
    python bench/first_steps.py draw --out FOLDER   the losses of all in one picture, and bench/results/first_steps.json

Rows, their order and what is masked are the same by every way: those of `electra-small` with so many steps (--of 62500, which is what its
schedule knows). A way is one process, so that several can share a GPU.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

import machine
from electra.base.batch import Batch, SpecialIds
from electra.objectives import Trainable
from electra.objectives.corruption import choose, mask_chosen, replace_at
from electra.objectives.losses import Loss, masked_lm_loss
from electra.objectives.metrics import detection, generator_sums
from electra.pretraining.run import build_parts
from electra.pretraining.settings import PretrainSettings, resolve
from electra.train.device import choose_device
from loss_curves import Curve, curve
from transformers_step import DETECTION_WEIGHT, at, config_of, electra_networks

WAYS = {
    "fast": [],
    "plain": ["train.fast=off"],
    "float32": ["train.fast=off", "train.precision=float32"],
    "transformers": [],
}
EVERY = 100


class TransformersElectra(nn.Module):
    """The objective on transformers' modules."""

    headline = extra_metrics = muted_alarms = ()
    corruptor = None

    def __init__(self, settings: PretrainSettings, special: SpecialIds, vocabulary: int):
        super().__init__()
        torch.manual_seed(settings.seed)
        full = settings.encoder
        small = full.scaled(settings.generator.width, settings.generator.depth)
        networks = electra_networks(full, small, lambda sizes: config_of(sizes, vocabulary))
        self.generator, self.discriminator, self.token_logits = networks[0], networks[1], networks[3]
        self.masking, self.special = settings.masking, special
        self.register_buffer("continues", torch.zeros(vocabulary, dtype=torch.bool), persistent=False)

    def forward(self, batch: Batch) -> Loss:
        read = {"attention_mask": batch.is_real.long(), "token_type_ids": batch.segments}
        chosen = choose(batch, self.masking, self.special, self.continues)
        masked = mask_chosen(batch, chosen, self.masking, self.special)
        states = self.generator.electra(masked.ids, **read).last_hidden_state
        logits = self.token_logits(at(states, chosen.positions))
        mlm_loss = masked_lm_loss(logits, chosen.targets, chosen.used)
        with torch.no_grad():
            gumbel = -(-torch.rand(logits.shape, device=logits.device).log()).log()
            sampled = (logits.float() + gumbel).argmax(-1)
            corrupted = replace_at(batch.ids, chosen.positions, sampled, chosen.used)
        scores = self.discriminator(corrupted, **read).logits
        found = detection(scores, corrupted != batch.ids, batch.is_real)
        sums = generator_sums(logits.detach().argmax(2) == chosen.targets, chosen.used, mlm_loss)
        return Loss(mlm_loss + DETECTION_WEIGHT * found.total, sums | found.sums)


def run(way: str, given: argparse.Namespace) -> None:
    words = [f"data={given.data}", "run=unused", f"train.steps={given.of}", *WAYS[way], *given.words]
    settings, _ = resolve("electra-small", words)
    device = choose_device(settings.train)
    parts = build_parts(settings, device, verify=False)
    objective: Trainable = parts.objective
    if way == "transformers":
        objective = TransformersElectra(settings, parts.objective.corruptor.special, parts.manifest.vocab_size)
    given.out.mkdir(parents=True, exist_ok=True)
    every = min(EVERY, given.steps)

    def keep(found: Curve) -> None:
        (given.out / f"{way}.json").write_text(json.dumps({"every": every, "words": words[2:], **found}) + "\n")

    found = curve(settings, parts.loader, given.steps, every, objective, keep)
    print(way, {name: round(values[-1], 4) for name, values in found.items()})


def write_rows(given: argparse.Namespace) -> None:
    """With the settings of the original code, and a vocabulary that has its special tokens in their places."""
    words = [f"data={given.data}", "run=unused", f"train.steps={given.of}", *given.words]
    settings, _ = resolve("electra-small", words)
    parts = build_parts(settings, torch.device("cpu"), verify=False)
    batches = [parts.loader.batch_at(step) for step in range(given.steps)]
    given.out.mkdir(parents=True, exist_ok=True)
    for name in ("ids", "segments", "is_real"):
        rows = torch.stack([getattr(batch, name) for batch in batches])
        np.save(given.out / f"{name}.npy", rows.numpy().astype(np.int32))
    special = parts.objective.corruptor.special
    vocabulary = [f"[unused{number}]" for number in range(parts.manifest.vocab_size)]
    for token in ("pad", "unk", "cls", "sep", "mask"):
        vocabulary[getattr(special, token)] = f"[{token.upper()}]"
    (given.out / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    stored = {"original": original_settings(settings, parts.manifest.vocab_size), "words": words[2:]}
    (given.out / "rows.json").write_text(json.dumps(stored) + "\n")


def original_settings(settings: PretrainSettings, vocabulary: int) -> dict[str, object]:
    """As the original code calls them."""
    encoder = settings.encoder
    return {
        "vocab_size": vocabulary,
        "embedding_size": encoder.embedding,
        "max_seq_length": settings.rows.length,
        "train_batch_size": settings.train.batch,
        "num_train_steps": settings.train.steps,
        "num_warmup_steps": round(settings.schedule.warmup_steps(settings.train.steps)),
        "learning_rate": settings.optimizer.lr,
        "weight_decay_rate": settings.optimizer.weight_decay,
        "mask_prob": settings.masking.share,
        "generator_hidden_size": settings.generator.width,
        "generator_layers": settings.generator.depth,
        "model_hparam_overrides": {
            "hidden_size": encoder.hidden,
            "num_hidden_layers": encoder.layers,
            "num_attention_heads": encoder.heads,
            "intermediate_size": encoder.intermediate,
            "max_position_embeddings": encoder.positions,
            "hidden_dropout_prob": encoder.dropout,
            "attention_probs_dropout_prob": encoder.attention_dropout,
        },
    }


def draw(out: Path, name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    order = [*WAYS, "original"]
    files = sorted(out.glob("*.json"), key=lambda it: order.index(it.stem) if it.stem in order else len(order))
    curves = {file.stem: json.loads(file.read_text("utf-8")) for file in files if file.name != "rows.json"}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for axis, loss in zip(axes, ("mlm_loss", "rtd_loss"), strict=True):
        for way, found in curves.items():
            axis.plot([found["every"] * (place + 0.5) for place in range(len(found[loss]))], found[loss], label=way)
        axis.set(xlabel="step", ylabel=loss)
        axis.legend()
    figure.tight_layout()
    picture = f"docs/images/{name}.png"
    figure.savefig(machine.RESULTS.parents[1] / picture, dpi=120)
    machine.write(name, {"curves": curves, "picture": picture})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=[*WAYS, "rows", "draw"])
    parser.add_argument("words", nargs="*", help="settings, such as train.batch=8")
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--of", type=int, default=62_500)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="first_steps", help="of the picture and of the file under bench/results")
    given = parser.parse_intermixed_args()
    if given.way == "draw":
        draw(given.out, given.name)
    elif given.way == "rows":
        write_rows(given)
    else:
        run(given.way, given)


if __name__ == "__main__":
    main()
