"""electra: raw text in, a pre-trained ELECTRA encoder out; fine-tuned, scored and used.

The public Python API, with the same steps as the command line. torch and everything that needs it is imported on first use.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from electra.base.errors import ElectraError

if TYPE_CHECKING:
    from electra.data.shards import Manifest
    from electra.finetuning.predict import Predicted
    from electra.inspector import Model, load
    from electra.inspector.compare import ComparedRun, Yardsticks
    from electra.inspector.embed import Embedded
    from electra.interop.importing import Imported
    from electra.interop.push import Pushed
    from electra.pretraining.load import Exported

__version__ = "0.1.0"
__all__ = [
    "ElectraError", "FinetuneResult", "Model", "PretrainResult", "__version__", "compare", "embed", "evaluate", "export",
    "extend_tokenizer", "finetune", "import_model", "load", "predict", "prepare", "pretrain", "push", "report",
    "train_tokenizer", "verify",
]  # fmt: skip

PathLike = str | Path
Paths = PathLike | Sequence[PathLike]
Overrides = Mapping[str, Any] | Sequence[str]
"""{"train.steps": 10}, {"train": {"steps": 10}} or ["train.steps=10"]"""


class PretrainResult(NamedTuple):
    """A finished run: its folder, and its metrics on held-out documents after the last step."""

    run: Path
    metrics: dict[str, float]


class FinetuneResult(NamedTuple):
    """The output folder, the fine-tuned folders of each task (one per seed), and the content of results.json, earlier tasks included."""

    out: Path
    models: dict[str, list[Path]]
    results: dict[str, Any]


def train_tokenizer(texts: Paths, out: PathLike, vocab_size: int = 30522, **settings: Any) -> Path:
    """Train a tokenizer on files and folders of text; returns the path of tokenizer.json in `out`. Settings: `kind`
    ("wordpiece", "unigram", "bpe"), `lowercase`, `strip_accents`, `split_cjk`; and how to read files: `text_key`, `documents`,
    `on_bad`.

    >>> electra.train_tokenizer("my-text.txt", "my-tokenizer", vocab_size=300, lowercase=False)
    PosixPath('my-tokenizer/tokenizer.json')
    """
    from electra.base import config
    from electra.data import tokenizer
    from electra.data.corpus import Corpus, CorpusSettings

    reading = {name: settings.pop(name) for name in CorpusSettings.model_fields if name in settings}
    training = config.validate(tokenizer.TokenizerSettings, {"vocab_size": vocab_size, **settings})
    corpus = Corpus(_paths(texts), config.validate(CorpusSettings, reading))
    return tokenizer.save_tokenizer(tokenizer.train_tokenizer(corpus, training), Path(out))


def extend_tokenizer(
    model: PathLike, texts: Paths, out: PathLike, new_tokens: int = 1000, **reading: Any
) -> tuple[Path, dict[str, list[str]]]:
    """Add words of a domain to the tokenizer of a model, a run or a folder: frequent words that it cuts into many pieces. Returns the
    path of tokenizer.json in `out`, and the new tokens with their old pieces. Old tokens keep their ids, so that a run on text
    prepared with the new tokenizer can start from the model.

    >>> path, pieces = electra.extend_tokenizer("my-run", "my-field.txt", "longer-tokenizer", new_tokens=1)
    >>> path, len(pieces)
    (PosixPath('longer-tokenizer/tokenizer.json'), 1)
    """
    from electra.base import config
    from electra.base.files import refuse_edited
    from electra.data import extension, tokenizer
    from electra.data.corpus import Corpus, CorpusSettings

    homes = [Path(model), *(Path(model) / name for name in ("discriminator", "generator"))]
    home = next((it for it in homes if (it / "tokenizer.json").is_file()), Path(model))
    refuse_edited(home)
    old = tokenizer.load_tokenizer(home)
    corpus = Corpus(_paths(texts), config.validate(CorpusSettings, reading))
    new = extension.extend_tokenizer(old, (document.text for document in corpus.read()), new_tokens)
    names = {number: token for token, number in new.get_vocab().items()}
    size, pieces = tokenizer.vocabulary_size(old), extension.added_pieces(old, new) or []
    added = {names[size + number]: [names[piece] for piece in ids] for number, ids in enumerate(pieces)}
    return tokenizer.save_tokenizer(new, Path(out)), added


def prepare(
    texts: Paths,
    out: PathLike,
    tokenizer: PathLike,
    heldout: float = 0.01,
    workers: int | None = None,
    unit_bytes: int = 4 << 20,
    engine: Literal["local", "ray"] = "local",
    **settings: Any,
) -> "Manifest":
    """Turn files and folders of text into token shards in `out`; returns their manifest. A fraction `heldout` of the documents is
    kept for evaluation. `unit_bytes` of text make one shard. `engine`: processes of this machine, or a Ray cluster. How to read
    files: `text_key`, `documents`, `on_bad`; what to leave out: `duplicates` ("keep", "exact", "near"), `near_share`, `filters`
    (a dict). Called again after an interruption, it does what is missing.

    >>> manifest = electra.prepare("my-text.txt", "my-shards", tokenizer="my-tokenizer", heldout=0.1, workers=1)
    >>> manifest.splits["train"].tokens > 1000
    True
    """
    from electra.base.remote import as_place
    from electra.data import prepare as preparation

    inputs = [as_place(text) for text in ([texts] if isinstance(texts, str | Path) else texts)]
    chosen = preparation.prepare_settings(heldout, unit_bytes, settings)
    return preparation.prepare(inputs, as_place(out), Path(tokenizer), chosen, workers, engine)


def pretrain(
    recipe: PathLike,
    overrides: Overrides = (),
    *,
    data: PathLike | None = None,
    run: PathLike | None = None,
    start: PathLike | None = None,
) -> PretrainResult:
    """Pre-train by a shipped recipe ("tiny", "electra-small+masked-lm") or a TOML file, with `overrides` of any setting. `data`
    are token shards, `run` is the folder for everything that the run writes, `start` a model whose weights it starts from.
    Called again after an interruption, it resumes.

    >>> result = electra.pretrain("tiny", {"train.steps": 4, "schedule.warmup": 1}, data="my-shards", run="my-run")
    >>> result.run, 0 < result.metrics["auc"] < 1
    (PosixPath('my-run'), True)
    """
    from electra.base.ranks import is_launched, join
    from electra.pretraining.run import pretrain as train
    from electra.pretraining.run import refuse_uneven
    from electra.pretraining.settings import resolve, warn_without_effect
    from electra.train.distributed import launch
    from electra.train.log import plot_run, read_metrics

    named = {"data": data, "run": run, "start": start}
    words = _words(overrides) + _words({key: value for key, value in named.items() if value is not None})
    command = ["pretrain", str(recipe), *words]
    with join(lambda: resolve(str(recipe), words)[0].train.timeout) as ranks:
        settings, sources = ranks.everyone(lambda: resolve(str(recipe), words))
        warn_without_effect(settings, sources)
        folder = Path(settings.run)
        if settings.train.processes > 1 and not is_launched():
            refuse_uneven(settings.train.batch, settings.train.accumulate, settings.train.processes)
            launch(command, settings.train, folder)
            metrics = (read_metrics(folder, "heldout") or [{}])[-1]
        else:
            metrics = train(settings, shlex.join([*ranks.launcher(settings.train.processes), *command]))
            ranks.first(lambda: plot_run(folder, folder / "curves.png"))
    return PretrainResult(folder, {key: value for key, value in metrics.items() if isinstance(value, float)})


def finetune(
    model: PathLike,
    tasks: Paths,
    out: PathLike = "runs/finetune",
    seeds: int = 1,
    jobs: int = 1,
    untrained: bool = False,
    trials: int = 0,
    **settings: Any,
) -> FinetuneResult:
    """Fine-tune on shipped tasks ("mnli"), TOML files or tables, each with several seeds; tasks joined by + share an encoder.
    Settings are those of the tasks and of the method: `text` and `label` name columns (otherwise they are guessed), `dev` a table
    to score on, `epochs`, `lr`, …. `untrained` adds the same network from random weights to the baselines; `trials` is how many
    settings a search tries first. Called again, it keeps finished runs.

    >>> result = electra.finetune("my-run", "my-table.csv", out="my-tasks", text="review", label="stars", epochs=1)
    >>> result.models
    {'my-table': [PosixPath('my-tasks/my-table/seed-0')]}
    >>> result.results["tasks"]["my-table"]["metric"]
    'accuracy'
    """
    from electra.finetuning.report import run_folder
    from electra.finetuning.run import finetune as train

    items, out = [tasks] if isinstance(tasks, str | Path) else tasks, Path(out)
    overrides = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    if isinstance(overrides.get("text"), str):
        overrides["text"] = [overrides["text"]]
    if "dev" in overrides:
        overrides["files.dev"] = overrides.pop("dev")
    results = train(Path(model), [str(item) for item in items], overrides, out, seeds, jobs, untrained, trials)
    models = {name: [run_folder(out, name, seed) for seed in range(seeds)] for name in results.pop("done")}
    return FinetuneResult(out, models, results)


def predict(
    model: PathLike,
    file: PathLike,
    out: PathLike | None = None,
    probabilities: bool = False,
    text: str | Sequence[str] | None = None,
    force: bool = False,
    escape_formulas: bool = False,
    long: str | None = None,
) -> "Predicted":
    """Write the rows of a file of any size, each with its prediction, in the file's format, to `out` or beside the file. An existing
    file is overwritten only with `force`. `model` is a fine-tuned folder, or the folder of a task with several seeds, whose mean
    answers. `text` names the text columns if they differ from those in training; `escape_formulas` is for csv that a spreadsheet
    will open; `long` ("cut" or "windows") is how a classifier reads long texts, if not as in training. For a few rows use
    `Model.predict`.

    >>> predicted = electra.predict("my-tasks/my-table/seed-0", "my-table.csv", out="answers.csv")
    >>> predicted.out, predicted.rows
    ([PosixPath('answers.csv')], 60)
    """
    from electra.finetuning.predict import predict_file

    columns = _columns(text, None, long)
    return predict_file(Path(model), Path(file), _path(out), probabilities, columns, force, escape_formulas)


def evaluate(
    path: PathLike,
    file: PathLike | None = None,
    data: PathLike | None = None,
    rows: int | None = None,
    text: str | Sequence[str] | None = None,
    label: str | None = None,
    generator: PathLike | None = None,
    long: str | None = None,
) -> dict[str, Any]:
    """Metrics of a run on held-out documents, and those of the untrained network ("trained", "untrained"); `data` are shards to use
    instead of the run's, `rows` how many rows, `generator` another run whose generator corrupts the text, to compare runs. For a
    fine-tuned model and a file with answers: "scores", "baselines" of the majority, and metrics per class; `long` as for `predict`.

    >>> sorted(electra.evaluate("my-run", rows=32))
    ['trained', 'untrained']
    >>> electra.evaluate("my-tasks/my-table/seed-0", "my-table.csv")["rows"]
    60
    """
    if file is not None or (Path(path) / "task.json").is_file():
        from electra.base.errors import SettingsError
        from electra.finetuning.predict import evaluate_file

        if file is None:
            raise SettingsError(f"{path} is a fine-tuned model: give a table to score it on.")
        for name, value in {"data": data, "rows": rows, "generator": generator}.items():
            if value is not None:
                raise SettingsError(f"{name} {value} is for runs, and this scores a table. Leave it out.", (name,))
        return evaluate_file(Path(path), Path(file), _columns(text, label, long))
    from electra.pretraining.evaluate import evaluate_run

    trained, untrained = evaluate_run(Path(path), _path(data), rows, _path(generator))
    return {"trained": trained, "untrained": untrained}


def export(
    model: PathLike,
    out: PathLike,
    language: str | Sequence[str] = (),
    license: str = "",
    datasets: str | Sequence[str] = (),
    **settings: Any,
) -> "list[Exported]":
    """Export a model to a format that other libraries read; a fresh process checks that it gives the same ids and logits. `format`
    is "transformers" (a folder for each network of a run), "onnx" (with `int8` also a quantized copy, whose loss is measured, also
    on the rows of `dev`) or "sentence-transformers" (with `pooling` and `length`). Languages ("en"), a licence ("apache-2.0")
    and data sets are for the header of the model cards, in the Hub's words.

    >>> [exported.folder for exported in electra.export("my-run", "my-model")]
    [PosixPath('my-model/discriminator'), PosixPath('my-model/generator')]
    """
    from electra.base import config
    from electra.inspector.export import ExportSettings, export_model
    from electra.interop.card import Publication

    publication = Publication(_several(language), license, _several(datasets))
    return export_model(Path(model), Path(out), config.validate(ExportSettings, settings), publication)


def embed(
    model: PathLike,
    files: Paths,
    out: PathLike | None = None,
    text: str | None = None,
    keep: str | Sequence[str] = (),
    force: bool = False,
    **settings: Any,
) -> "Embedded":
    """Write a vector for each text of files of any size to one .npy or .parquet file: `out`, or beside a single file. `text` names the
    text column of tables, `keep` the columns to keep beside the vectors in parquet (by default the text). Settings are `pooling`
    ("mean", "cls"), `length` (texts are cut after that many tokens), `device` and `precision`. For texts in memory use
    `Model.embed` and `Model.embed_batches`.

    >>> embedded = electra.embed("my-run", "my-table.csv", out="vectors.npy", text="review")
    >>> embedded.texts, embedded.out
    (60, PosixPath('vectors.npy'))
    """
    from electra.base import config
    from electra.inspector import load
    from electra.inspector.embed import EmbedSettings, embed_files

    chosen, network = config.validate(EmbedSettings, settings), load(model).network
    return embed_files(network, _paths(files), _path(out), text, _several(keep), chosen, force)


def import_model(
    source: PathLike,
    out: PathLike,
    generator: PathLike | None = None,
    *,
    tokenizer: PathLike | None = None,
    lowercase: bool | None = None,
    heads: int | None = None,
    allow_bin: bool = False,
) -> "Imported":
    """Import somebody's checkpoint as a model folder of ours: ELECTRA, BERT, RoBERTa or ModernBERT in transformers' format, ELECTRA
    or BERT of TensorFlow 1. `generator` is the one that belongs to a discriminator; a TensorFlow checkpoint has both. `tokenizer`,
    `lowercase` and `heads` are for sources that lack them; `allow_bin` reads pytorch_model.bin (weights only).

    >>> imported = electra.import_model("their-bert", "my-bert")
    >>> list(imported.folders), imported.recipe
    (['generator'], PosixPath('my-bert/recipe.toml'))
    """
    from electra.interop.importing import ImportOptions, import_network

    options = ImportOptions(_path(tokenizer), lowercase, heads, allow_bin)
    return import_network(Path(source), Path(out), _path(generator), options)


def compare(
    recipes: str | Sequence[str],
    overrides: Overrides = (),
    *,
    budget: str = "2m",
    seeds: int = 3,
    vary: str = "",
    yardsticks: "Yardsticks | None" = None,
    out: PathLike = "runs/compare",
    jobs: int = 1,
) -> "list[ComparedRun]":
    """Train recipes under the same budget ("2m", "3e14 flops", "500 steps", or several: "1e14 flops, 2e14 flops"), each with several
    seeds, and measure them in the same way; `vary` ("generator.width=0.25,0.5") tries values of a setting. `yardsticks` (from
    `electra.inspector.compare`) are a labelled table to probe the frozen encoders with, and fine-tuning tasks.

    >>> results = electra.compare(["tiny", "tiny+masked-lm"], {"data": "my-shards"}, budget="2 steps", seeds=1, out="my-comparison")
    >>> [result.variant for result in results]
    ['tiny', 'tiny+masked-lm']
    """
    from electra.inspector.compare import Yardsticks, run_comparison, variants

    chosen = variants(_several(recipes), _words(overrides), budget, vary)
    return run_comparison(chosen, seeds, yardsticks or Yardsticks(), jobs, Path(out))


def report(run: PathLike, out: PathLike | None = None) -> Path:
    """Write one self-contained HTML file with what `electra serve` shows about a run or results: curves, alarms, settings, held-out
    sentences, scores; returns its path. `out` is run/report.html by default.

    >>> electra.report("my-run")
    PosixPath('my-run/report.html')
    """
    from electra.inspector.report import write_html

    return write_html(Path(run), Path(run) / "report.html" if out is None else Path(out))


def push(folder: PathLike, repository: str, send: bool = False, public: bool = False) -> "Pushed":
    """List what would be uploaded of a checked model folder to the Hugging Face Hub; with `send`, upload it in one commit. A new
    repository is private unless `public`.

    >>> electra.push("my-model/discriminator", "me/my-model").url
    ''
    """
    from electra.interop.push import push as upload

    return upload(Path(folder), repository, send, public)


def verify(path: PathLike) -> list[str]:
    """Everything that was damaged or edited in a run, prepared shards, an export or a fine-tuned folder, one line each.

    >>> electra.verify("my-run")
    []
    """
    from electra.inspector.verify import verify as check

    return check(Path(path))


def __getattr__(name: str) -> Any:
    if name in ("Model", "load"):
        from electra import inspector

        return getattr(inspector, name)
    raise AttributeError(f"module 'electra' has no attribute {name!r}")


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)


def _paths(texts: Paths) -> list[Path]:
    return [Path(texts)] if isinstance(texts, str | Path) else [Path(text) for text in texts]


def _several(names: str | Sequence[str]) -> list[str]:
    """A name alone is one of them, not its letters."""
    return [names] if isinstance(names, str) else list(names)


def _columns(text: str | Sequence[str] | None, label: str | None, long: str | None) -> dict[str, Any]:
    """What of the settings of a task may be otherwise than in training."""
    texts = None if text is None else _several(text)
    given = {"text": texts, "label": label, "long": long}
    return {key: value for key, value in given.items() if value is not None}


def _words(overrides: Overrides) -> list[str]:
    """Overrides as words of the command line: ["train.steps=10"]."""
    from electra.base import config

    if not isinstance(overrides, Mapping):
        return _several(overrides)
    flat = {key: str(value) if isinstance(value, Path) else value for key, value in config.flatten(overrides).items()}
    return [f"{key}={config.toml_value(value)}" for key, value in flat.items()]
