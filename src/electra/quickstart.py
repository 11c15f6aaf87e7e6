"""One command from nothing to a result: the documentation on this machine is the corpus (data/docstrings.py)."""

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from electra.data.corpus import Corpus
from electra.data.docstrings import docstrings, libraries
from electra.data.prepare import PrepareSettings, prepare
from electra.data.tokenizer import (
    TokenizerSettings,
    load_tokenizer,
    save_tokenizer,
    special_ids,
    train_tokenizer,
)
from electra.evaluate import evaluate_run
from electra.files import write_atomically
from electra.inspector.analyse import ScoredToken, detect
from electra.plot import plot_run
from electra.pretrain import build_objective, load_run, pretrain, resolve, resume_command

VOCABULARY = 4096
HELDOUT_SHARE = 0.02
# (sentence, the word that stands where "shape", "used" and "if" should be)
SENTENCES = (
    ("returns a new tensor with the same given as the input", "given"),
    ("if this argument is not specified, the default value is graph", "graph"),
    ("raises an error matrix the node is not in the list", "matrix"),
)


def run_quickstart(folder: Path, steps: int | None = None) -> float:
    """Returns the held-out AUC. Running it again after an interruption goes on; finished parts are not done again."""
    console = Console(highlight=False)
    started = time.monotonic()

    def title(text: str) -> None:
        console.print(f"\n[bold]{text}[/]  [dim]({time.monotonic() - started:.0f} s)[/]")

    title("1. Text: the documentation inside the packages on this machine")
    text = collect_text(folder / "documentation.jsonl", console)

    title("2. Tokenizer")
    tokenizer_folder = folder / "tokenizer"
    if not (tokenizer_folder / "tokenizer.json").is_file():
        made = train_tokenizer(Corpus([text]), TokenizerSettings(vocab_size=VOCABULARY))
        save_tokenizer(made, tokenizer_folder)
    console.print(f"{VOCABULARY:,} WordPiece tokens in {tokenizer_folder}")

    title("3. Token shards")
    manifest = prepare(
        [text], folder / "shards", tokenizer_folder, PrepareSettings(heldout_share=HELDOUT_SHARE)
    )
    train, held = manifest.splits["train"], manifest.splits["heldout"]
    console.print(f"{train.tokens:,} tokens to train on, {held.tokens:,} held out")

    title("4. Pre-training")
    words = [f"data={folder / 'shards'}", f"run={folder / 'run'}"]
    if steps:
        warmup, often = max(1, steps // 10), max(1, steps // 4)
        words += [f"train.steps={steps}", f"schedule.warmup={warmup}"]
        words += [f"train.{key}={often}" for key in ("log_every", "evaluate_every", "save_every")]
    settings, _ = resolve("tiny", words)
    pretrain(settings, resume_command("tiny", words))
    plot_run(folder / "run", folder / "run" / "curves.png")

    title("5. What it learned")
    auc = show_figures(folder / "run", console)
    show_sentences(folder / "run", console)
    console.print(
        f"\nDone in {time.monotonic() - started:.0f} s. Everything is in {folder}; the curves are "
        f"{folder / 'run' / 'curves.png'}.\nWhat to type next:\n"
        f'  electra detect {folder / "run"} "returns the sum of all banana in the list"\n'
        f"  electra export {folder / 'run'} {folder / 'export'}\n"
        f"  electra prepare my-shards my-text.txt --tokenizer {tokenizer_folder}\n"
        "  electra doctor electra-small data=my-shards",
        soft_wrap=True,
        markup=False,
    )
    return auc


def collect_text(path: Path, console: Console) -> Path:
    if not path.is_file():
        lines: list[str] = []
        seen: set[str] = set()
        for library, place in libraries().items():
            before = len(lines)
            for text in docstrings(place):
                if text not in seen:
                    seen.add(text)
                    lines.append(json.dumps({"text": text, "library": library}, ensure_ascii=False))
            console.print(f"{library}: {len(lines) - before:,} docstrings")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, ("\n".join(lines) + "\n").encode())
    console.print(f"{path.stat().st_size / 1e6:.1f} MB in {path}")
    return path


def show_figures(run: Path, console: Console) -> float:
    trained, untrained = evaluate_run(run)
    table = Table(title="replaced token detection on held-out documents")
    for column in ("", "untrained", "trained"):
        table.add_column(column, justify="left" if not column else "right")
    for name, key in (
        ("ROC-AUC", "auc"),
        ("accuracy", "rtd_accuracy"),
        ("recall", "recall"),
        ("precision", "precision"),
    ):
        table.add_row(name, f"{untrained[key]:.3f}", f"{trained[key]:.3f}")
    table.add_row('accuracy of always saying "original"', "", f"{trained['majority_baseline']:.3f}")
    console.print(table)
    console.print(
        "AUC is the chance that a replaced token scores above an original one; 0.5 is guessing. Both discriminators read "
        "the same text, corrupted by the trained generator at temperature 1. After minutes on a laptop neither network is "
        "good: the generator knows frequent words and neighbours, and the discriminator catches what breaks those.",
        soft_wrap=True,
    )
    return trained["auc"]


def show_sentences(run: Path, console: Console) -> None:
    settings, trained = load_run(run)
    tokenizer = load_tokenizer(run / "tokenizer.json")
    special = special_ids(tokenizer)
    untrained = build_objective(settings, trained.vocab_size, special).eval()
    table = Table(
        title="one word of each sentence was swapped: how suspicious is it? (1 = most suspicious token)"
    )
    for column in ("sentence", "rank before", "rank after", "P(replaced) before", "after"):
        table.add_column(column, justify="left" if column == "sentence" else "right")
    for sentence, swapped in SENTENCES:
        ranks, scores = [], []
        for network in (untrained, trained):
            tokens = detect(sentence, network.discriminator, network.detection_head, tokenizer, special)
            rank, probability = suspicion(tokens, sentence, swapped)
            ranks.append(f"{rank} of {len(tokens)}")
            scores.append(f"{probability:.2f}")
        table.add_row(sentence.replace(swapped, f"[bold red]{swapped}[/]"), *ranks, *scores)
    console.print(table)


def suspicion(tokens: list[ScoredToken], sentence: str, swapped: str) -> tuple[int, float]:
    """Rank and probability of the most suspicious piece of the swapped word."""
    start = sentence.index(swapped)
    end = start + len(swapped)
    best = max(token.probability for token in tokens if token.start >= start and token.end <= end)
    return 1 + sum(token.probability > best for token in tokens), best
