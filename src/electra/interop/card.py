"""Model cards: the README.md of a model folder, with the Hub's header and what a run knows about itself.

Labels, paths and file names come from users and may contain anything: in the header they are double-quoted YAML, in the text
they are escaped, and settings are in a code fence longer than any run of backticks inside.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from electra.base.errors import SettingsError
from electra.base.files import FOLDER_MANIFEST, manifest_entry, read_bytes, read_object, write_atomically
from electra.base.progress import Table, literal
from electra.interop.formats import FORMATS, NetworkKind

CARD = "README.md"
PIPELINES = {"tagging": "token-classification", "span": "question-answering"}
"""The Hub's pipeline tags of fine-tuned models; all others are text classifiers."""
TO_FILL = {"language": "[en]", "license": "apache-2.0", "datasets": "[the name of your text]"}
YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off")
LIMITS = """- It knows the text it was trained on, with the biases of that text, and no other language. Nobody has looked for harmful or false
  answers: test it on what you want it for."""


@dataclass(frozen=True)
class Publication:
    """What only the owner of a model can say: language codes, a licence identifier of the Hub, and names of datasets on the Hub."""

    language: Sequence[str] = ()
    license: str = ""
    datasets: Sequence[str] = ()

    def __post_init__(self) -> None:
        for text in (*self.language, *([self.license] if self.license else ()), *self.datasets):
            if not re.fullmatch(r"[\w.+-]+(/[\w.+-]+)?", text):
                example = "en, apache-2.0, wikipedia"
                raise SettingsError(f"{text!r} is not the code of a language, licence or dataset, such as {example}.")

    def entries(self) -> dict[str, Any]:
        return {"language": list(self.language), "license": self.license, "datasets": list(self.datasets)}


UNSAID = Publication()


@dataclass(frozen=True)
class Card:
    """The content of a model card. `about`, `use` and `sections` (by heading) are Markdown; `results` are the Hub's model-index."""

    title: str
    about: str
    use: str
    tags: Sequence[str]
    pipeline: str
    sections: Mapping[str, str]
    settings: str
    publication: Publication = UNSAID
    results: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def text(self) -> str:
        body = "".join(f"\n## {name}\n\n{text.rstrip()}\n" for name, text in self.sections.items() if text)
        return (
            f"{self.header()}\n# {literal(self.title)}\n\n{self.about}\n\n## Use\n\n{self.use}\n{body}\n## Settings\n\n"
            f"{fenced(self.settings, 'toml')}"
        )

    def header(self) -> str:
        entries: dict[str, Any] = {
            "language": list(self.publication.language),
            "license": self.publication.license,
            "library_name": "transformers",
            "pipeline_tag": self.pipeline,
            "tags": list(dict.fromkeys(self.tags)),
            "datasets": list(self.publication.datasets),
        }
        lines = [f"{key}: {yaml(value)}" if value else f"# {key}: {TO_FILL[key]}" for key, value in entries.items()]
        if self.results:
            metrics = dict.fromkeys(it["type"] for one in self.results for it in one["metrics"])
            lines.append(f"metrics: {yaml(list(metrics))}")
            lines.append(f"model-index: {yaml([{'name': self.title, 'results': list(self.results)}])}")
        return "\n".join(["---", *lines, "---", ""])


def yaml(value: Any) -> str:
    """A value as one line of YAML. JSON is valid YAML, except for escapes beyond 16 bits and a few unprintable characters."""
    match value:
        case dict():
            return "{" + ", ".join(f"{yaml(str(key))}: {yaml(it)}" for key, it in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(yaml, value)) + "]"
        case str() if re.fullmatch(r"[a-z][a-z0-9_-]*[a-z0-9]", value) and value not in YAML_WORDS:
            return value
        case str():
            safe = (it if it.isprintable() and it not in '"\\' else f"\\U{ord(it):08x}" for it in value)
            return f'"{"".join(safe)}"'
    return json.dumps(value)


def fenced(text: str, language: str = "") -> str:
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """A table of the rows whose value is known."""
    return Table(("", ""), [(name, value) for name, value in rows if value]).markdown()


def numbers(metrics: Mapping[str, Any]) -> str:
    rows = [(literal(name), f"{value:.4f}") for name, value in metrics.items() if isinstance(value, float)]
    return Table(("metric", "value"), rows).markdown() if rows else ""


# How to use a folder, in lines that run in it


def usage(architecture: str, note: str = "") -> str:
    reader = "AutoModel" + "".join(architecture.partition("For")[1:])
    output = "logits" if "For" in architecture else "last_hidden_state"
    output = "start_logits" if architecture.endswith("QuestionAnswering") else output
    return f"""```python
from transformers import {reader}, AutoTokenizer
name = "."   # this folder, or its name on the Hub
tokenizer, model = AutoTokenizer.from_pretrained(name), {reader}.from_pretrained(name)
inputs = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt")
print(model(**inputs).{output}){note}
```"""


ENCODER_AND_DETECTOR = """```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer
name = "."   # this folder, or its name on the Hub
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)   # with a new head, to fine-tune
```

This is the encoder; every AutoModel class that has a ModernBERT reads it. `detector/` is the same with the head that tells which
tokens were replaced:

```python
from transformers import pipeline
pipeline("token-classification", "detector")("The quick brown fox jumps over the lazy dog.")
```"""

FILL_MASK = """```python
from transformers import pipeline
name = "."   # this folder, or its name on the Hub
print(pipeline("fill-mask", name)("Hello [MASK]!"))
```

The discriminator of the same run is the model to fine-tune; this is the network that proposed replacements."""


ENERGIES = """

An Electric model: its head gives every token an energy E, of which log p(token | all others) is about -E. It does not say which tokens were
replaced. `electra score FOLDER "some text"` sums -E over a text; transformers reads the encoder, to be fine-tuned."""


def pretrained_card(
    kind: NetworkKind,
    encoder: str,
    settings: str,
    sections: Mapping[str, str],
    objective: str = "electra",
    publication: Publication = UNSAID,
    parameters: int = 0,
) -> str:
    """The card of a pre-trained network of one `kind`, whose `encoder` is of either kind. Electric's head gives energies."""
    form = FORMATS[encoder]
    match kind:
        case "discriminator" if objective == "electric":
            use = usage("") + ENERGIES
        case "discriminator" if form.detector:
            use = ENCODER_AND_DETECTOR
        case "discriminator":
            use = usage(form.discriminator, "   # above 0: the token was replaced")
            use += f"\n\nFine-tune it with any of transformers' {form.family} classes."
        case "generator":
            use = FILL_MASK
        case "encoder":
            use = usage("")
            use += "\n\nWithout its token head, which is narrower than the layers: transformers has no form for such a one."
    return Card(
        f"{form.title} {kind}",
        "Pre-trained with the `electra` toolkit" + (f": {parameters:,} parameters." if parameters else "."),
        use,
        ("electra", encoder, kind),
        "fill-mask" if kind == "generator" else "feature-extraction",
        sections,
        settings,
        publication,
    ).text()


# The card of a model in another form


def with_header(card: str, entries: Mapping[str, Any]) -> str:
    """The card with these header entries, whether they were there, commented out or missing; None removes one, "" is ignored."""
    card = card.replace("\r\n", "\n")
    header = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    blocks = re.split(r"\n(?=[#\w])", header[1]) if header else []  # a list may go on below its key
    for key, value in entries.items():
        if value or value is None:
            place = next((number for number, it in enumerate(blocks) if re.match(rf"(# )?{key}:", it)), len(blocks))
            blocks[place : place + 1] = [] if value is None else [f"{key}: {yaml(value)}"]
    body = card[header.end() :] if header else f"\n{card}"
    return "\n".join(["---", *blocks, "---", body]) if blocks else card


def with_section(card: str, title: str, text: str) -> str:
    """The card with this text under that heading, replacing such a section or at the end; without the section if `text` is empty."""
    before, heading, after = card.partition(f"\n## {title}\n")
    rest = re.split(r"\n(?=## )", after, maxsplit=1)[1:] if heading else []
    section = [f"## {title}\n\n{text.strip()}\n"] if text else []
    return "\n".join([f"{before.rstrip()}\n", *section, *rest])


# A folder whose card can say more than when it was written


def update_card(folder: Path, text: str) -> None:
    """Writes a new card unless somebody has edited the old one. Between the two writes it differs from the manifest, which does no harm."""
    manifest, data = read_object(folder / FOLDER_MANIFEST), text.encode()
    entry = manifest_entry(data)
    there = manifest_entry(read_bytes(folder / CARD)) if (folder / CARD).is_file() else {}
    if manifest.get(CARD) == entry or there not in (entry, manifest.get(CARD)):
        return
    write_atomically(folder / CARD, data)
    write_atomically(folder / FOLDER_MANIFEST, json.dumps(manifest | {CARD: entry}, indent=1).encode())
