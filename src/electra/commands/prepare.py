"""electra prepare: text to token shards, in one command or as jobs of a scheduler."""

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from electra.base.errors import SettingsError, counted
from electra.commands.console import Documents, OnBad, TextKey, refuse_swapped, say

if TYPE_CHECKING:
    from electra.data.shards import Manifest


def refuse_memory(out: str) -> str:
    """Refuses memory: URLs, which are useful only in Python, where the process goes on."""
    if out.startswith("memory:"):
        raise SettingsError(f"{out} would be gone when this command ends. Give a folder, or a URL such as s3://….")
    return out


Out = Annotated[
    str, typer.Argument(help="folder for the token shards, or a URL of one (s3://…)", callback=refuse_memory)
]
Inputs = Annotated[
    list[str], typer.Argument(help="files, folders and URLs of .txt, .jsonl, .parquet or arrow; plain or compressed")
]
TokenizerPath = Annotated[Path, typer.Option(help="tokenizer.json or a folder with one")]
Heldout = Annotated[float, typer.Option(help="fraction of documents held out for evaluation")]
UnitBytes = Annotated[int, typer.Option(help="bytes of text per shard; an interruption loses at most one")]

Duplicates = Annotated[
    Literal["keep", "exact", "near"], typer.Option(help="duplicates to remove, ignoring case and spacing")
]
NearShare = Annotated[
    float | None, typer.Option(help="fraction of word 5-grams that near duplicates share", show_default="0.8")
]
Filters = Annotated[
    list[str] | None,
    typer.Option("--filter", metavar="KEY=VALUE", help="language=en, min_characters=200, symbol_share=0.3, …"),
]


def prepare_command(
    out: Out,
    inputs: Inputs,
    tokenizer: TokenizerPath,
    heldout: Heldout = 0.01,
    unit_bytes: UnitBytes = 4 << 20,
    engine: Annotated[
        str, typer.Option(metavar="<local|ray>", help="here or on Ray; for job arrays: prepare-plan, -unit and -finish")
    ] = "local",
    workers: Annotated[int | None, typer.Option(help="processes", show_default="all cores")] = None,
    text_key: TextKey = "text",
    documents: Documents = "blank-line",
    on_bad: OnBad = "stop",
    duplicates: Duplicates = "keep",
    near_share: NearShare = None,
    filters: Filters = None,
) -> None:
    """Documents -> token shards. Run it again after an interruption: it does what is missing."""
    import electra

    refuse_swapped(out, "prepare")
    more: dict[str, Any] = {"text_key": text_key, "documents": documents, "on_bad": on_bad, "engine": engine}
    more |= left_out(duplicates, near_share, filters)
    manifest = electra.prepare(inputs, out, tokenizer, heldout, workers, unit_bytes, **more)
    show_manifest(out, manifest, heldout)


def prepare_plan_command(
    out: Out,
    inputs: Inputs,
    tokenizer: TokenizerPath,
    heldout: Heldout = 0.01,
    unit_bytes: UnitBytes = 4 << 20,
    text_key: TextKey = "text",
    documents: Documents = "blank-line",
    on_bad: OnBad = "stop",
    duplicates: Duplicates = "keep",
    near_share: NearShare = None,
    filters: Filters = None,
) -> None:
    """The first of three steps for an array of jobs: a list of units, which prepare-unit does on any machine."""
    from electra.base.remote import as_place
    from electra.data.prepare import plan_units, prepare_settings

    refuse_swapped(out, "prepare-plan")
    more: dict[str, Any] = {"text_key": text_key, "documents": documents, "on_bad": on_bad}
    more |= left_out(duplicates, near_share, filters)
    settings = prepare_settings(heldout, unit_bytes, more)
    if plan := plan_units([as_place(path) for path in inputs], as_place(out), tokenizer, settings):
        units, files = counted(len(plan.units), "unit"), counted(len(plan.sources), "file")
        say(f"{out}: {units} of {files}, {counted(plan.size, 'byte')}")


def prepare_unit_command(
    out: Out, index: Annotated[str, typer.Option(metavar="I/N", help="part of the units: 0/8 to 7/8 are all")]
) -> None:
    """The second step, in each of N jobs: every N-th unit of the plan that is not done yet."""
    from electra.base.remote import as_place
    from electra.data.prepare import run_share

    number, _, count = index.partition("/")
    if not re.fullmatch("[0-9]{1,18}/[0-9]{1,18}", index):
        raise SettingsError(f"{index} is not a part of the units. Give --index I/N, such as 0/8.")
    units = run_share(as_place(out), int(number), int(count))
    say(f"{out}: {counted(units, 'unit')} done")


def prepare_finish_command(out: Out) -> None:
    """The last step, once: check everything the units made and put it together."""
    from electra.base.remote import as_place
    from electra.data.prepare import finish_units

    manifest = finish_units(as_place(out))
    show_manifest(out, manifest, manifest.settings["heldout_share"])


def left_out(duplicates: str, near_share: float | None, filters: list[str] | None) -> dict[str, Any]:
    """The settings that say which documents to leave out."""
    if near_share is not None and duplicates != "near":
        raise SettingsError(f"--near-share {near_share:g} is for near copies. Add --duplicates near, or leave it out.")
    share = {} if near_share is None else {"near_share": near_share}
    return {"duplicates": duplicates, "filters": filter_words(filters), **share}


def filter_words(words: list[str] | None) -> dict[str, str]:
    from electra.data.filters import FilterSettings

    for word in words or []:
        if "=" not in word:
            raise SettingsError(f"--filter {word} has no value. Give KEY=VALUE, such as min_characters=200.")
        if (key := word.partition("=")[0]) not in FilterSettings.model_fields:
            raise SettingsError(f"--filter {key} is unknown. There are {', '.join(FilterSettings.model_fields)}.")
    pairs = [word.partition("=")[::2] for word in words or []]
    if again := next((key for key, count in Counter(key for key, _ in pairs).items() if count > 1), None):
        raise SettingsError(f"--filter {again} has several values. Give it once.")
    return dict(pairs)


def show_manifest(out: str, manifest: "Manifest", heldout: float) -> None:
    from electra.data.shards import few_held_out

    train, held = manifest.splits["train"], manifest.splits["heldout"]
    say(
        f"{out}: {counted(train.tokens, 'token')} in {counted(train.documents, 'document')}, "
        f"{counted(held.documents, 'document')} ({counted(held.tokens, 'token')}) held out"
    )
    if heldout and not held.documents:
        say(
            f"Nothing is held out, so training will have no held-out metrics: this text is {counted(train.documents, 'document')}. Where "
            "every line is one, give --documents line; where every file is one, --documents file."
        )
    if warning := few_held_out(manifest):
        say(f"WARNING: {warning}")
    skipped, replaced, empty = manifest.skipped_documents, manifest.replaced_documents, manifest.empty_files
    if removed := manifest.removed_documents:
        say(f"removed: {', '.join(f'{name} {count:,}' for name, count in removed.items())}")
    exceptions = {"skipped": skipped, "with characters replaced by \ufffd": replaced, "empty files": empty}
    if any(exceptions.values()):
        say(", ".join(f"{name}: {count}" for name, count in exceptions.items() if count))
