"""Verbs -> functions. torch and everything that needs it is imported inside the verbs: --help must answer at once."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from electra.errors import ElectraError, SettingsError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Raw text in, a pre-trained ELECTRA encoder out.",
    epilog="Every verb has its own --help. Errors are one line; `electra --debug VERB …` shows the traceback.",
)
config_app = typer.Typer(no_args_is_help=True, help="Look at recipes and settings.", rich_markup_mode=None)
app.add_typer(config_app, name="config")

Inputs = Annotated[
    list[Path], typer.Argument(help="files and folders of .txt, .jsonl, .parquet or arrow; plain or packed")
]
TextKey = Annotated[str, typer.Option(help="key or column that holds the text")]
Documents = Annotated[
    Literal["blank-line", "file", "line"], typer.Option(help="what ends a document in .txt")
]
OnBad = Annotated[Literal["stop", "skip", "replace"], typer.Option(help="broken bytes, NULs, JSON lines")]
Recipe = Annotated[str, typer.Argument(help='a shipped recipe ("electra config list") or a TOML file')]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="settings, such as train.steps=2000")
]


@app.callback()
def root(debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False) -> None:
    pass


@app.command()
def quickstart(
    folder: Annotated[Path, typer.Argument(help="where everything goes")] = Path("runs/quickstart"),
    steps: Annotated[
        int | None, typer.Option(help="fewer steps than the recipe: faster, learns less")
    ] = None,
) -> None:
    """Tokenizer, shards, pre-training and a result from the documentation on this machine; no download."""
    from electra.quickstart import run_quickstart

    try:
        run_quickstart(folder, steps)
    except BaseException:
        print(
            f"to go on: electra quickstart {shlex.quote(str(folder))}"
            + (f" --steps {steps}" if steps else ""),
            file=sys.stderr,
        )
        raise


@app.command()
def tokenizer(
    out: Annotated[Path, typer.Argument(help="folder for tokenizer.json")],
    inputs: Annotated[list[Path] | None, typer.Argument(help="text to train on, as for prepare")] = None,
    kind: Annotated[Literal["wordpiece", "unigram", "bpe"], typer.Option()] = "wordpiece",
    vocab_size: Annotated[int, typer.Option()] = 30522,
    lowercase: Annotated[bool, typer.Option("--lowercase/--cased")] = True,
    strip_accents: Annotated[
        bool | None,
        typer.Option("--strip-accents/--keep-accents", show_default="kept; with --from-vocab as BERT does"),
    ] = None,
    split_cjk: Annotated[
        bool, typer.Option("--split-cjk/--keep-cjk", help="every Chinese character is a word")
    ] = True,
    from_vocab: Annotated[
        Path | None, typer.Option(help="adopt a BERT vocab.txt instead of training")
    ] = None,
    from_json: Annotated[Path | None, typer.Option(help="adopt a tokenizer.json instead of training")] = None,
    text_key: TextKey = "text",
    documents: Documents = "blank-line",
    on_bad: OnBad = "stop",
) -> None:
    """Train a tokenizer from text, or adopt one."""
    from electra import config
    from electra.data.corpus import Corpus, CorpusSettings
    from electra.data.tokenizer import (
        TokenizerSettings,
        adopt_vocabulary,
        load_tokenizer,
        save_tokenizer,
        train_tokenizer,
    )

    if sum(map(bool, (inputs, from_vocab, from_json))) != 1:
        raise SettingsError("give either text to train on, or --from-vocab, or --from-json.")
    if from_vocab:
        made = adopt_vocabulary(from_vocab, lowercase, strip_accents, split_cjk)
    elif from_json:
        made = load_tokenizer(from_json)
    else:
        assert inputs is not None
        tree = {
            "kind": kind,
            "vocab_size": vocab_size,
            "lowercase": lowercase,
            "strip_accents": bool(strip_accents),
        }
        settings = config.validate(TokenizerSettings, tree | {"split_cjk": split_cjk})
        corpus = CorpusSettings(text_key=text_key, documents=documents, on_bad=on_bad)
        made = train_tokenizer(Corpus(inputs, corpus), settings)
    path = save_tokenizer(made, out)
    print(f"{path}: {made.get_vocab_size():,} tokens")


@app.command()
def prepare(
    out: Annotated[Path, typer.Argument(help="folder for the token shards")],
    inputs: Inputs,
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json or a folder with one")],
    heldout: Annotated[float, typer.Option(help="share of documents kept for evaluation")] = 0.01,
    workers: Annotated[int | None, typer.Option(help="processes", show_default="all cores")] = None,
    text_key: TextKey = "text",
    documents: Documents = "blank-line",
    on_bad: OnBad = "stop",
) -> None:
    """Documents -> token shards. Run it again after an interruption: it does what is missing."""
    from electra import config
    from electra.data.prepare import PrepareSettings
    from electra.data.prepare import prepare as run

    corpus = {"text_key": text_key, "documents": documents, "on_bad": on_bad}
    settings = config.validate(PrepareSettings, {"corpus": corpus, "heldout_share": heldout})
    manifest = run(inputs, out, tokenizer, settings, workers)
    train, held = manifest.splits["train"], manifest.splits["heldout"]
    print(
        f"{out}: {train.tokens:,} tokens in {train.documents:,} documents, "
        f"{held.documents:,} documents ({held.tokens:,} tokens) held out"
    )
    left = {
        "skipped": manifest.skipped_documents,
        "repaired": manifest.replaced_documents,
        "empty files": manifest.empty_files,
    }
    if any(left.values()):
        print(", ".join(f"{name}: {count}" for name, count in left.items() if count))


@app.command()
def pretrain(recipe: Recipe, words: Words = None) -> None:
    """Pre-train a generator and a discriminator. The same command again goes on where it stopped."""
    from electra.plot import plot_run
    from electra.pretrain import pretrain as run
    from electra.pretrain import resolve, resume_command

    settings, _ = resolve(recipe, words or [])
    command = resume_command(recipe, words or [])
    folder = Path(settings.run)
    try:
        figures = run(settings, command)
    except Exception as error:
        if getattr(error, "exit_code", 1) not in (2, 3, 6, 7):  # those need another command
            print(f"to go on: {command}", file=sys.stderr)
        raise
    plot_run(folder, folder / "curves.png")
    shown = ", ".join(
        f"{name} {figures[name]:.3f}" for name in ("auc", "mlm_loss") if figures.get(name) is not None
    )
    print(
        f"{folder}: finished"
        + (f", held-out {shown}" if shown else " (no held-out documents, so no figures)")
    )
    print(f'next: electra detect {folder} "some text"   or   electra export {folder} my-model')


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    data: Annotated[Path | None, typer.Option(help="other prepared shards than the run's")] = None,
    rows: Annotated[
        int | None, typer.Option(help="how many held-out rows", show_default="as in training", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="figures for machines")] = False,
) -> None:
    """Figures on held-out documents, and the run's curves as curves.png."""
    from rich.console import Console

    from electra.evaluate import evaluate_run, figures_table
    from electra.files import write_json
    from electra.plot import plot_run
    from electra.train.runlog import finite_or_none

    figures, untrained = evaluate_run(run, data, rows)
    result = {"trained": figures, "untrained": untrained}
    clean = {
        name: {key: finite_or_none(value) for key, value in part.items()} for name, part in result.items()
    }
    if as_json:
        print(json.dumps(clean))
    else:
        Console().print(figures_table(f"{run}, held-out documents", figures, untrained))
        print(f"{run / 'evaluation.json'} · {run / 'curves.png'}")
    write_json(run / "evaluation.json", clean)
    plot_run(run, run / "curves.png")


@app.command()
def detect(
    model: Annotated[Path, typer.Argument(help="a run folder or an exported model folder")],
    text: Annotated[str | None, typer.Argument(help="text, or a file; standard input without it")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line of text")] = False,
) -> None:
    """Each token with its probability of having been replaced."""
    from dataclasses import asdict

    from rich.console import Console

    from electra.data.tokenizer import special_ids
    from electra.inspector.analyse import detect as score
    from electra.inspector.show import coloured, read_lines
    from electra.pretrain import load_detector

    loaded = load_detector(model)
    console = Console(highlight=False)
    for line in read_lines(text):
        tokens = score(line, loaded.encoder, loaded.head, loaded.tokenizer, special_ids(loaded.tokenizer))
        if as_json:
            print(
                json.dumps({"text": line, "tokens": [asdict(token) for token in tokens]}, ensure_ascii=False)
            )
        else:
            console.print(coloured(tokens), soft_wrap=True)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="a run folder")],
    out: Annotated[Path, typer.Argument(help="new folder: gets discriminator/ and generator/")],
) -> None:
    """transformers folders of discriminator and generator, checked: same ids, same logits."""
    from electra.pretrain import export_run

    for line in export_run(run, out):
        print(line)


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="a recipe to try")] = None, words: Words = None
) -> None:
    """Check the machine, the shards and the settings before hours are spent."""
    from electra.doctor import examine

    raise typer.Exit(examine(recipe, words or []))


@config_app.command("show")
def config_show(recipe: Recipe, words: Words = None) -> None:
    """The resolved settings, and where each value came from."""
    from electra import config
    from electra.pretrain import resolve

    given = words or []
    if "data" in config.parse_overrides(given).keys() | config.read_recipe(recipe).keys():
        settings, sources = resolve(recipe, given)
    else:  # the one setting without a default: to look at the others it is not needed
        settings, sources = resolve(recipe, [*given, 'data=""'])
        sources |= {"data": "not set"}
    flat = config.flatten(config.dump(settings))
    width = max(map(len, flat))
    for key, value in flat.items():
        print(f"{key:<{width}} = {config.toml_value(value):<14} # {sources[key]}")


@config_app.command("list")
def config_list() -> None:
    """The shipped recipes."""
    from electra import config

    for name in config.recipe_names():
        print(name)


def main(arguments: list[str] | None = None) -> None:
    """Errors meant for people are one line and an exit code; everything else is a bug and keeps its traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        result: Any = app(words, standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except ElectraError as error:
        if "--debug" in words:
            raise
        print(f"electra: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        print("electra: interrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # disk full, no permission, a folder that vanished
        if "--debug" in words:
            raise
        print(f"electra: {error}.", file=sys.stderr)
        sys.exit(5)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # click's usage errors
            error.show()
            sys.exit(error.exit_code)
        raise
