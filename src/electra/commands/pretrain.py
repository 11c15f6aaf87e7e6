"""electra pretrain: one pre-training run."""

from pathlib import Path

from electra.base.errors import command
from electra.commands.console import OverrideWords, Recipe, Trust, print_table, resume_hint, say


def pretrain_command(recipe: Recipe, overrides: OverrideWords = None, trust: Trust = False) -> None:
    """Pre-train a generator and a discriminator. Run the same command again to resume."""
    import electra
    from electra.base.ranks import is_launched, join
    from electra.pretraining.settings import resolve
    from electra.pretraining.start import before_and_after
    from electra.train.checkpoint import checkpoint_folders

    words = overrides or []
    with join(lambda: resolve(recipe, words)[0].train.timeout) as ranks:
        settings, _ = ranks.everyone(lambda: resolve(recipe, words))
        folder, launcher = Path(settings.run), ranks.launcher(settings.train.processes)
        checkpoints = folder / "checkpoints"
        with resume_hint(["pretrain", recipe, *words], lambda: bool(checkpoint_folders(checkpoints)), launcher):
            metrics = electra.pretrain(recipe, words).metrics
    if not ranks.is_first or (settings.train.processes > 1 and not is_launched()):
        return  # the first process prints it
    notes = {"auc": " against its own generator", "mlm_loss": ""}
    headline = ", ".join(
        f"{name} {metrics[name]:.3f}{it}" for name, it in notes.items() if metrics.get(name) is not None
    )
    heldout = f", held-out {headline}" if headline else " (no held-out documents, so no metrics)"
    if settings.start and (table := before_and_after(folder)):
        print_table(table)
    say(f"{folder}: finished{heldout}")
    detects = "auc" in metrics and settings.objective.kind != "electric"
    look = f"{command('detect', folder, 'some text')}   or   " if detects else ""
    say(f"next: {look}{command('export', folder, 'my-model')}")
