"""English text that every machine with electra on it already has: the documentation inside its installed packages.

The quickstart needs a corpus without a download and without shipping anybody's text. Docstrings are found by their
triple quotes in the source files, which takes seconds; parsing every file would take half a minute.
"""

import inspect
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = ("stdlib", "torch", "numpy", "sympy", "networkx")
TRIPLE_QUOTED = re.compile(r"""("{3}|'{3})(.*?)\1""", re.DOTALL)
MIN_CHARACTERS = 80


def libraries() -> dict[str, Path]:
    """Where each documented library lives; those not installed are left out."""
    paths = sysconfig.get_paths()
    found = {"stdlib": Path(paths["stdlib"])} | {
        name: Path(paths["purelib"]) / name for name in LIBRARIES[1:]
    }
    return {name: path for name, path in found.items() if path.is_dir()}


def docstrings(folder: Path) -> Iterator[str]:
    """Documentation of every module under `folder`, in the order of the paths; tests are skipped."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if "site-packages" in parts or {"test", "tests", "testing"} & set(parts):
            continue
        source = path.read_text("utf-8", errors="ignore")
        for match in TRIPLE_QUOTED.finditer(source):
            text = prose(match.group(2))
            if len(text) >= MIN_CHARACTERS:
                yield text


def prose(text: str) -> str:
    """A docstring's sentences: examples at the prompt, tables and rulers are dropped, wrapped lines joined, so that a
    line is a paragraph."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = [line.strip() for line in block.splitlines()]
        if any(line.startswith((">>>", "...", "|", "+-", "In [", "$ ")) for line in lines):
            continue
        joined = " ".join(line for line in lines if line.strip("-=~^*#. "))
        letters = sum(character.isalpha() or character == " " for character in joined)
        if len(joined) >= 20 and letters >= 0.8 * len(joined):
            paragraphs.append(joined)
    return "\n".join(paragraphs)
