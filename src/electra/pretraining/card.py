"""The parts of a model card that a run knows: data, recipe, hardware, time, operations, energy, metrics, limits.

Everything is read from the run folder, so that a card written again elsewhere is the same."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from electra.base.errors import ElectraError, counted
from electra.base.files import read_object
from electra.base.progress import duration, literal
from electra.data.shards import Manifest
from electra.interop.card import LIMITS, facts, numbers
from electra.pretraining.settings import PretrainSettings
from electra.pretraining.trial import POWER, known_device, paper_flops, step_flops
from electra.train.log import read_metrics

ENVIRONMENT = "environment.json"
CORE_POWER = 10  # watts of a busy CPU core; there are too many kinds for a table
PUE = 1.5  # power usage effectiveness: watts a data centre draws per watt of its machines; large new ones less


DATA_KEYS = ("tokens", "documents", "heldout_tokens", "heldout_documents", "files", "bytes", "vocab_size")


def described_data(manifest: Manifest) -> dict[str, int]:
    """What a run keeps of the shards' manifest, because the shards may be gone when it is exported."""
    train, heldout, inputs = manifest.splits["train"], manifest.splits["heldout"], manifest.inputs
    values = (train.tokens, train.documents, heldout.tokens, heldout.documents, inputs.files, inputs.bytes)
    return dict(zip(DATA_KEYS, (*values, manifest.vocab_size), strict=True))


def run_sections(run: Path, settings: PretrainSettings, metrics: Mapping[str, Any]) -> dict[str, str]:
    """The sections for a network at the step of `metrics` (held-out ones) or, if they name none, at the end."""
    environment = read_environment(run)
    data: dict[str, int] = environment["data"]
    train = read_metrics(run, "train")
    last = next((it for it in reversed(train) if it["step"] <= metrics.get("step", it["step"])), {})
    # a checkpoint may lie between two lines of the log
    last |= {"step": metrics.get("step", last.get("step", 0))}
    step, tokens = last["step"], last.get("tokens") or 0
    software = ", ".join(f"{it} {environment[it]}" for it in ("electra", "torch", "python") if environment.get(it))
    text = trained = heldout = ""
    if data:
        text = f"{data['bytes']:,} bytes, {counted(data['files'], 'file')}"
        trained = f"{counted(data['documents'], 'document')}, {counted(data['tokens'], 'token')}"
        heldout = f"{counted(data['heldout_documents'], 'document')}, {counted(data['heldout_tokens'], 'token')}"
    passes = f", {tokens / data['tokens']:.1f} times the text" if data else ""
    about_data = [
        ("text", text),
        ("trained on", trained),
        ("held out", heldout),
        ("sha256 of the token shards' manifest", environment.get("data_manifest_sha256", "")),
        ("sha256 of the tokenizer", environment.get("tokenizer_sha256", "")),
        ("began with the weights of", literal(settings.start)),
    ]
    about_training = [
        ("objective", settings.objective.kind),
        ("seed", str(settings.seed)),
        ("steps", f"{step:,} of {settings.train.batch:,} rows of {settings.rows.length} tokens" if step else ""),
        ("tokens seen", f"{tokens:,.0f}{passes}" if tokens else ""),
        *cost(settings, environment, last, data.get("vocab_size")),
        ("software", literal(software)),
    ]
    return {
        "Data": facts(about_data),
        "Training": facts(about_training),
        "Held-out metrics": numbers({key: value for key, value in metrics.items() if key != "step"}),
        "Limits": limits(settings, tokens),
    }


def read_environment(run: Path) -> dict[str, Any]:
    """The values of environment.json that are of the right type: a file that somebody edited must not prevent an export."""
    try:
        stored = read_object(run / ENVIRONMENT)
    except ElectraError:
        stored = {}
    data = stored.get("data")
    whole = isinstance(data, dict) and all(isinstance(data.get(key), int) for key in DATA_KEYS)
    counts = ("torch_threads", "processes")
    plain = {key: value for key, value in stored.items() if isinstance(value, int if key in counts else str)}
    return plain | {"data": data if whole else {}}


def cost(
    settings: PretrainSettings, environment: Mapping[str, Any], last: Mapping[str, Any], vocab_size: int | None
) -> list[tuple[str, str]]:
    """Hardware, time, energy and operations of the steps up to `last`."""
    step, seconds = last.get("step", 0), last.get("seconds") or 0.0
    training = duration(last.get("training_seconds") or seconds)
    rows = hardware(environment, settings.train.device, seconds, f"{duration(seconds)}, of which training {training}")
    if step and vocab_size:
        done = settings.model_copy(update={"train": settings.train.model_copy(update={"steps": step})})
        rows.append(("operations", f"{step * step_flops(settings, vocab_size):.3g} FLOPs in matrix products"))
        rows.append(("as the ELECTRA paper counts", f"{paper_flops(done, vocab_size):.3g} FLOPs"))
    return rows


def hardware(environment: Mapping[str, Any], device: str, seconds: float, time: str) -> list[tuple[str, str]]:
    """The rows of the card about the machine, the time and the energy."""
    gpu = environment.get("gpu") if device != "cpu" else None
    cores, count = environment.get("torch_threads") or 1, environment.get("processes") or 1
    watts = ((POWER.get(known_device(gpu)) if gpu else CORE_POWER * cores) or 0) * count
    assumed = "the full power of the board" if gpu else f"{CORE_POWER} W for each thread"
    machine = literal(gpu or f"a processor, {counted(cores, 'thread')}, {environment.get('platform', '')}")
    rows = [("hardware", f"{count} x {machine}" if count > 1 else machine)]
    if seconds:
        rows.append(("time", time))
    if seconds and watts:
        how = f"{assumed} ({watts:,} W) all the time, times {PUE} for the building"
        rows.append(("energy, an estimate", f"{watts * seconds * PUE / 3.6e6:.2g} kWh: {how}"))
    return rows


def limits(settings: PretrainSettings, tokens: float) -> str:
    lines = [
        f"- No row was longer than {settings.rows.length} tokens; positions beyond were never trained.",
        LIMITS,
        "- The held-out metrics say how well it tells its own generator's replacements from the text, or fills masks; only fine-tuning"
        "\n  shows what it is worth for a task.",
    ]
    if tokens and tokens < 1e9:
        lines.append(f"- {tokens:,.0f} tokens are few: ELECTRA-Small saw 16 billion.")
    return "\n".join(lines)
