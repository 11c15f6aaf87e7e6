"""One command from nothing to a result: the documentation on this machine is the corpus (data/docstrings.py)."""

import json
import logging
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer
from torch import Tensor

from electra.base.batch import Batch
from electra.base.files import write_atomically
from electra.base.progress import readable
from electra.base.randomness import mix, uniform
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
from electra.finetuning.run import finetune
from electra.objectives.corruption import Network, choose_positions, replace_at
from electra.pretraining.evaluate import evaluate_run
from electra.pretraining.load import load_run
from electra.pretraining.run import build_heldout, pretrain, resume_command
from electra.pretraining.settings import build_objective, resolve
from electra.train.log import plot_run

VOCABULARY = 4096
HELDOUT_SHARE = 0.02
EXAMPLES = 3
CONTEXT = 7
LABELLED, LABELLED_DEV, LABEL_EPOCHS = 500, 1000, 10


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
    show_swaps(folder / "run", console)

    title("6. Fine-tuning: which library does a text document?")
    show_finetuning(folder, text, 1 if steps else LABEL_EPOCHS, console)
    console.print(
        f"\nDone in {time.monotonic() - started:.0f} s. Everything is in {folder}; the curves are "
        f"{folder / 'run' / 'curves.png'}.\nWhat to type next:\n"
        f'  electra detect {folder / "run"} "a sentence of yours"\n'
        f"  electra export {folder / 'run'} {folder / 'export'}\n"
        f"  electra finetune {folder / 'run'} my-table.csv --text review --label stars\n"
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
        table.add_column(column, justify="right" if column else "left")
    for name, key in (
        ("ROC-AUC", "auc"),
        ("accuracy", "rtd_accuracy"),
        ("recall", "recall"),
        ("precision", "precision"),
    ):
        table.add_row(name, readable(key, untrained[key]), readable(key, trained[key]))
    table.add_row('accuracy of always saying "original"', "", f"{trained['majority_baseline']:.3f}")
    console.print(table)
    console.print(
        "AUC is the chance that a replaced token scores above an original one; 0.5 is guessing. Both discriminators read "
        "the same text, corrupted by the trained generator at temperature 1. After minutes on a laptop neither network is "
        "good: the generator knows frequent words and neighbours, and the discriminator catches what breaks those.\n",
        soft_wrap=True,
    )
    return trained["auc"]


@dataclass(frozen=True)
class Swaps:
    """Rows in which one token each was swapped for a random word, and how suspicious a network finds it: rank 1 is the
    most suspicious token of its row."""

    batch: Batch
    positions: Tensor
    originals: Tensor

    def ranks(self, network: Network) -> Tensor:
        with torch.no_grad():
            logits = network.detect(self.batch).masked_fill(~self.batch.is_real, -torch.inf)
        return 1 + (logits > logits.gather(1, self.positions)).sum(1)


def swap_words(batch: Batch, tokenizer: Tokenizer) -> Swaps:
    """A whole word of each row, and what stands there instead: both depend on the row alone, never on what a network
    makes of it."""
    vocabulary = tokenizer.get_vocab()
    words = torch.tensor(sorted(i for word, i in vocabulary.items() if word.isalpha() and len(word) > 2))
    pieces = torch.tensor(sorted(i for word, i in vocabulary.items() if word.startswith("##")))
    goes_on = torch.isin(batch.ids, pieces).roll(-1, dims=1)
    can_swap = batch.is_real & torch.isin(batch.ids, words) & ~goes_on
    noise = uniform(batch.seed, "place", batch.samples, batch.ids.shape[1])
    positions, used = choose_positions(can_swap, batch.is_real, 1 / batch.ids.shape[1], noise)
    new = words[(uniform(batch.seed, "word", batch.samples, 1) * len(words)).long()]
    swapped = batch.with_ids(replace_at(batch.ids, positions, new, used))
    return Swaps(swapped, positions, batch.ids.gather(1, positions))


def show_swaps(run: Path, console: Console) -> None:
    """One word of every held-out row is swapped for a random one; the first three are shown."""
    settings, trained = load_run(run)
    tokenizer = load_tokenizer(run / "tokenizer.json")
    special = special_ids(tokenizer)
    untrained = build_objective(settings, tokenizer).eval()
    networks = [objective.networks()["discriminator"] for objective in (untrained, trained)]
    swaps = [swap_words(batch, tokenizer) for batch in build_heldout(settings, Path(settings.data), special)]
    before, after = (torch.cat([part.ranks(network) for part in swaps]) for network in networks)

    table = Table(title="one word of each row swapped for a random one: how suspicious is it?")
    for column in ("held-out text (swapped in; what stood there)", "rank before", "rank after"):
        table.add_column(column, justify="left" if "text" in column else "right")
    for number in range(min(EXAMPLES, len(before))):
        table.add_row(
            excerpt(swaps[0], number, tokenizer), str(before[number].item()), str(after[number].item())
        )
    table.add_section()
    rows = f"all {len(before):,} rows of {settings.rows.length} tokens: median rank"
    table.add_row(rows, f"{before.median().item()}", f"{after.median().item()}")
    table.add_row(
        "it is the most suspicious token",
        f"{(before == 1).float().mean():.1%}",
        f"{(after == 1).float().mean():.1%}",
    )
    console.print(table)


def show_finetuning(folder: Path, text: Path, epochs: int, console: Console) -> None:
    """The same network, fine-tuned on few labels from what pre-training learned and from nothing, by the paper's method with
    a higher rate and smaller batches for a network this small. Layer-wise decay would hold random weights near where they
    began, so the untrained network gets one rate for all layers."""
    rows = sorted(
        map(json.loads, text.read_text("utf-8").splitlines()), key=lambda row: mix("label", row["text"])
    )
    dev, train = rows[:LABELLED_DEV], rows[LABELLED_DEV : LABELLED_DEV + LABELLED]
    for name, part in (("dev", dev), ("train", train)):
        path = folder / "labels" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        if not path.is_file():
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in part).encode())
    method = {"length": 64, "epochs": epochs, "lr": 2e-3, "batch": 16, "bias_correction": True}
    scores = {}
    starts = {"pre-trained": {}, "untrained": {"pretrained": False, "layer_decay": 1.0, "lr": 1e-3}}
    logging.getLogger("electra.finetuning.run").setLevel(logging.WARNING)  # the table below says it all
    for name, more in starts.items():
        overrides = {"text": "text", "label": "library", "kind": "classification", "evaluations": 1, **method}
        results = finetune(
            folder / "run",
            [str(folder / "labels")],
            overrides | more,
            folder / "finetune" / name,
        )
        scores[name] = results["tasks"]["labels"]["median"]
    counts = Counter(row["library"] for row in dev)
    table = Table(title=f"accuracy on {len(dev):,} texts after {len(train):,} labelled ones (one seed)")
    table.add_column("start from")
    table.add_column("accuracy", justify="right")
    table.add_row("the pre-trained encoder", f"{scores['pre-trained']:.3f}")
    table.add_row("the same network, untrained", f"{scores['untrained']:.3f}")
    table.add_row(
        f'always saying "{counts.most_common(1)[0][0]}"', f"{counts.most_common(1)[0][1] / len(dev):.3f}"
    )
    console.print(table)


def excerpt(swaps: Swaps, row: int, tokenizer: Tokenizer) -> Text:
    ids, place = swaps.batch.ids[row].tolist(), int(swaps.positions[row])
    text = Text(f"… {tokenizer.decode(ids[max(0, place - CONTEXT) : place])} ")
    text.append(tokenizer.decode([ids[place]]), "bold red")
    text.append(f" ({tokenizer.id_to_token(int(swaps.originals[row]))})", "dim")
    return text.append(f" {tokenizer.decode(ids[place + 1 : place + 1 + CONTEXT])} …")
