"""The folder order is the dependency order, files stay short, and --help does not import torch."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "electra"
FILES = sorted(SOURCE.rglob("*.py"))

# A module may import from layers before its own, and from its own. data and model do not know each other.
ORDER = {
    "base": 0,
    "kernels": 1,
    "data": 1,
    "model": 2,
    "objectives": 3,
    "train": 4,
    "interop": 5,
    "pretraining": 6,
    "finetuning": 7,
    "inspector": 8,
    "commands": 9,
    "__main__": 10,
}
STRANGERS = [
    ("model", "data"),
    ("data", "model"),
    ("data", "kernels"),
    ("objectives", "data"),
    ("objectives", "train"),
    ("train", "data"),
    ("train", "model"),
    ("finetuning", "kernels"),
    ("finetuning", "objectives"),
]


def layer(module: str) -> str:
    return module.removeprefix("electra.").split(".")[0]


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("electra"):
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "electra"
                else [node.module]
            )
            found |= {layer(name) for name in names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down_the_tree(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for other in imports_of(path) - {own}:
        assert ORDER[other] <= ORDER[own], f"{path} imports {other}"
        assert (own, other) not in STRANGERS, f"{path} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_stay_short(path):
    assert len(path.read_text("utf-8").splitlines()) <= 600


def test_help_answers_at_once_and_without_torch():
    """Processor time, not time on the wall: other tests run beside this one."""
    code = (
        "import resource, sys; sys.argv = ['electra', '--help']\n"
        "from electra.commands import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(usage.ru_utime + usage.ru_stime)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        for _ in range(5)
    ]
    assert min(float(run.stdout.split()[-1]) for run in runs) < 0.3


def test_the_public_names_exist():
    import electra

    for _ in range(2):  # a name must not turn into the module it lives in once that is imported
        for name, home in electra._HOMES.items():
            assert getattr(electra, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        electra.nonsense  # noqa: B018
