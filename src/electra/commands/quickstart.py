"""electra quickstart: the README's commands in order, on the documentation inside the packages of this machine.

It resumes after an interruption; finished parts are not done again.
"""

import json
import re
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from electra.base.errors import command
from electra.base.progress import Table
from electra.commands.console import print_table, resume_hint

EXAMPLES = 3
LABELLED, LABELLED_DEV, LABELLED_WORDS, LABEL_EPOCHS = 500, 1000, 40, 10
SHOWN_METRICS = {"auc": "ROC-AUC", "rtd_accuracy": "accuracy", "recall": "recall", "precision": "precision"}


def quickstart_command(
    folder: Annotated[Path, typer.Argument(help="output folder")] = Path("runs/quickstart"),
    steps: Annotated[int | None, typer.Option(min=1, help="fewer steps than the recipe: faster, learns less")] = None,
) -> None:
    """Tokenizer, shards, pre-training and a result, from documentation that is on this machine; no download."""
    with resume_hint(["quickstart", str(folder), *(["--steps", str(steps)] if steps else [])]):
        run_quickstart(folder, steps)


def run_quickstart(folder: Path, steps: int | None) -> None:
    import electra
    from electra.base.files import refuse_other_kind

    refuse_other_kind(folder, "a quickstart")
    started = time.monotonic()

    def begin(title: str, *words: object) -> None:
        typer.secho(f"\n{title}", bold=True, nl=False)
        typer.secho(f"  ({time.monotonic() - started:.0f} s)", dim=True)
        if words:
            typer.secho(f"$ {command(*words)}", dim=True)

    begin("1. Text: the documentation inside the packages on this machine")
    text = collect_text(folder)

    tokenizer, shards, run = folder / "tokenizer", folder / "shards", folder / "run"
    begin("2. Tokenizer", "tokenizer", tokenizer, text, "--vocab-size", 4096)
    if not (tokenizer / "tokenizer.json").is_file():
        electra.train_tokenizer(text, tokenizer, vocab_size=4096)

    begin("3. Token shards", "prepare", shards, text, "--tokenizer", tokenizer, "--heldout", 0.02)
    manifest = electra.prepare(text, shards, tokenizer, heldout=0.02)
    train, heldout = manifest.splits["train"], manifest.splits["heldout"]
    print(f"{train.tokens:,} tokens to train on, {heldout.tokens:,} held out")

    words = [f"data={shards}", f"run={run}"]
    if steps:
        words.append(f"train.steps={steps}")
        words += [f"train.{key}={max(1, steps // 4)}" for key in ("log_every", "evaluate_every", "save_every")]
    begin("4. Pre-training", "pretrain", "modern-tiny", *words)
    electra.pretrain("modern-tiny", words)

    begin("5. What it learned", "evaluate", run)
    print_table(metrics_table(electra.evaluate(run)))
    print(
        "AUC is the chance that a replaced token scores above an original one; 0.5 is guessing. Both discriminators read "
        "the same text, corrupted by the trained generator at temperature 1. After minutes on a laptop neither network is "
        "good: the generator knows frequent words and neighbours, and the discriminator catches what breaks those.\n"
    )
    print_table(swaps_table(run, shards))

    begin("6. Fine-tuning: which library does a text document?", "finetune", run, folder / "labels", "--untrained")
    print_table(labels_table(folder, 1 if steps else LABEL_EPOCHS))
    print(
        f"\nDone in {time.monotonic() - started:.0f} s. Everything is in {folder}; the curves are {run / 'curves.png'}.\n"
        "What to type next:\n"
        f"  {command('detect', run, 'a sentence of yours')}\n"
        f"  {command('export', run, folder / 'export')}\n"
        f"  {command('finetune', run, 'my-table.csv', '--text', 'review', '--label', 'stars')}\n"
        f"  {command('prepare', 'my-shards', 'my-text.txt', '--tokenizer', tokenizer)}\n"
        "  electra doctor modern-small data=my-shards"
    )


def collect_text(folder: Path) -> Path:
    """Writes documentation.jsonl, the text for pre-training, and labels/, the beginnings of some texts. The texts of dev are not
    pre-trained on; they are chosen by a hash of the text alone."""
    from electra.base.randomness import mix
    from electra.data.corpus import SHORTEST_DOCSTRING, docstrings, drop_copies, libraries

    path = folder / "documentation.jsonl"
    if not path.is_file():
        texts: dict[str, str] = {}
        for library, place in libraries().items():
            before = len(texts)
            for text in docstrings(place):
                texts.setdefault(text, library)
            print(f"{library}: {len(texts) - before:,} docstrings")
        pairs = zip(drop_copies(texts), texts.values(), strict=True)
        rows = [{"text": text, "library": library} for text, library in pairs if len(text) >= SHORTEST_DOCSTRING]
        kept = sum(len(row["text"]) for row in rows) / sum(map(len, texts))
        print(f"{len(rows):,} documents; {1 - kept:.0%} of the text repeated other text and is left out")
        rows.sort(key=lambda row: mix("label", row["text"]))
        begun = [
            row | {"text": " ".join(row["text"].split()[:LABELLED_WORDS])} for row in rows[: LABELLED_DEV + LABELLED]
        ]
        write_rows(folder / "labels" / "dev.jsonl", begun[:LABELLED_DEV])
        write_rows(folder / "labels" / "train.jsonl", begun[LABELLED_DEV:])
        write_rows(path, rows[LABELLED_DEV:])
    print(f"{path.stat().st_size / 1e6:.1f} MB in {path}")
    return path


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    from electra.base.files import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())


def metrics_table(metrics: dict[str, dict[str, float]]) -> Table:
    from electra.base.progress import readable

    trained, untrained = metrics["trained"], metrics["untrained"]
    rows = [(name, readable(key, untrained[key]), readable(key, trained[key])) for key, name in SHOWN_METRICS.items()]
    rows.append(('accuracy of always saying "original"', "", f"{trained['majority_baseline']:.3f}"))
    return Table(("", "untrained", "trained"), rows, title="replaced token detection on held-out documents")


def swaps_table(run: Path, shards: Path) -> Table:
    """Swaps one word of every held-out document for a random one, and ranks it among all tokens by P(replaced)."""
    import electra

    excerpts, texts, places = zip(*swap_words(shards), strict=True)
    ranks, lengths = [], []
    for place, tokens in zip(places, electra.load(run).detect(texts), strict=True):
        (suspicion,) = (token.probability for token in tokens if token.start == place)
        ranks.append(1 + sum(token.probability > suspicion for token in tokens))
        lengths.append(len(tokens))
    examples = zip(excerpts[:EXAMPLES], map(str, ranks), (f"{length / 2:.0f}" for length in lengths), strict=False)
    middle = f"{statistics.median(ranks):.0f}", f"{statistics.median(lengths) / 2:.0f}"
    first = statistics.fmean(rank == 1 for rank in ranks), statistics.fmean(1 / length for length in lengths)
    all_of_them = (f"all {len(ranks):,} documents: median rank", *middle)
    rows = [*examples, (), all_of_them, ("it is the most suspicious token", *(f"{share:.1%}" for share in first))]
    head = ("held-out text (WHAT WAS SWAPPED IN, what stood there)", "rank", "guessing")
    return Table(head, rows, title="one word of each document swapped for a random one: how suspicious is it?")


def swap_words(shards: Path) -> Iterator[tuple[str, str, int]]:
    """Yields (an excerpt for people, the text, where the word is) for the beginning of each document, as long as a row. Which word
    is swapped, and for which, depends on the text alone."""
    import numpy as np

    from electra.base.randomness import mix
    from electra.data.shards import open_data
    from electra.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(shards)
    vocabulary = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and len(word) > 2)
    for shard in open_data(shards, "heldout").shards:
        for tokens in np.split(shard.tokens, shard.documents[:-1]):
            text = tokenizer.decode(tokens[:62].tolist())
            words = [match for match in re.finditer(r"\w+", text) if match[0].isalpha() and len(match[0]) > 2]
            if words:
                old = words[mix("place", text) % len(words)]
                new = vocabulary[mix("word", text) % len(vocabulary)]
                before, after = text[: old.start()], text[old.end() :]
                yield (f"… {before[-20:]}{new.upper()} ({old[0]}){after[:20]} …", before + new + after, len(before))


def labels_table(folder: Path, epochs: int) -> Table:
    """Fine-tunes the pre-trained network and the same network from random weights on few labels. A network this small, trained
    this briefly, needs higher rates and smaller batches than the defaults, which are for larger ones."""
    import electra

    data = {"text": "text", "label": "library", "kind": "classification", "length": 128}
    method = {"lr": 1e-3, "layer_decay": 1.0, "pooling": "mean", "batch": 16, "bias_correction": True, "evaluations": 1}
    settings: dict[str, Any] = {**data, **method, "epochs": epochs}
    result = electra.finetune(folder / "run", folder / "labels", folder / "finetune", untrained=True, **settings)
    scores = result.results["tasks"]["labels"]
    baselines = {name: metrics["accuracy"] for name, metrics in scores["baselines"]["dev"].items()}
    cells = {
        "the pre-trained encoder": scores["median"],
        "the same network, untrained (best of three rates)": baselines["untrained"],
        "no network: TF-IDF and logistic regression": baselines["words"],
        "one answer for all": baselines["majority"],
    }
    title = f"accuracy on {LABELLED_DEV:,} texts after {LABELLED:,} labelled ones (one seed)"
    return Table(("start from", "accuracy"), [(name, f"{score:.3f}") for name, score in cells.items()], title)
