"""electra pretrain: one pre-training run."""

import shlex
from pathlib import Path

from electra.commands.console import Overrides, Recipe, resume_hint


def pretrain_command(recipe: Recipe, overrides: Overrides = None) -> None:
    """Pre-train a generator and a discriminator. The same command again goes on where it stopped."""
    from electra.pretraining.run import pretrain
    from electra.pretraining.settings import resolve
    from electra.train.checkpoint import checkpoint_folders
    from electra.train.log import plot_run

    settings, _ = resolve(recipe, overrides or [])
    folder = Path(settings.run)
    words = ["pretrain", recipe, *(overrides or [])]
    with resume_hint(words, has_begun=lambda: bool(checkpoint_folders(folder / "checkpoints"))):
        metrics = pretrain(settings, shlex.join(["electra", *words]))
    plot_run(folder, folder / "curves.png")
    headline = ", ".join(
        f"{name} {metrics[name]:.3f}" for name in ("auc", "mlm_loss") if metrics.get(name) is not None
    )
    heldout = f", held-out {headline}" if headline else " (no held-out documents, so no metrics)"
    print(f"{folder}: finished{heldout}")
    detects = "auc" in metrics and settings.objective.kind != "electric"
    look = f'electra detect {folder} "some text"   or   ' if detects else ""
    print(f"next: {look}electra export {folder} my-model")
