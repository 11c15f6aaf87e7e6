"""The screens of docs/first-day.md, from commands that are really run: `python docs/screens.py QUICKSTART_FOLDER`.

QUICKSTART_FOLDER is what `electra quickstart QUICKSTART_FOLDER` wrote. The commands run in a temporary folder, with its text, tokenizer, encoder
and labels under the names that a reader would give them; what they print is drawn by rich as SVG, with the middle of long outputs left out.
Their plots are copied as they are.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
WIDTH, MOST_LINES = 100, 75
SENTENCE = "The function returns a list of bananas that were opened by the process."
SCREENS = {
    "help": "electra --help",
    "prepare": "electra prepare my-shards my-text.jsonl --tokenizer my-tokenizer --workers 1",
    "pretrain": "electra pretrain modern-tiny data=my-shards run=short-run train.steps=40 train.log_every=10",
    "finetune": "electra finetune my-encoder my-labels --out my-tasks --seeds 2",
    "alarms": "electra finetune my-encoder my-labels --out in-haste epochs=1 lr=1e-6 length=16",
    "predict": f'electra predict my-tasks/my-labels "{SENTENCE}" --probabilities',
    "detect": f'electra detect my-encoder "{SENTENCE}"',
}


def output_of(command: str, folder: Path) -> str:
    """What a person sees, both streams in their order; without a terminal there are lines in the place of a moving bar."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    words = [str(Path(sys.executable).parent / "electra"), *shlex.split(command)[1:]]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, cwd=folder, env=environment, text=True, check=False, **streams)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def draw(name: str, command: str, output: str) -> Path:
    lines = output.rstrip().splitlines()
    if len(lines) > MOST_LINES:
        lines = [*lines[:12], "…", *lines[-30:]]
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi("\n".join(lines)))
    svg = console.export_svg(title=" ".join(shlex.split(command)[:2]), theme=MONOKAI, unique_id=name)
    svg = re.sub(
        r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL
    )  # the reader's own fonts, and nothing from elsewhere
    path = IMAGES / f"first-day-{name}.svg"
    path.write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE))
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("quickstart", type=Path)
    quickstart = parser.parse_args().quickstart.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = {
            "documentation.jsonl": "my-text.jsonl",
            "tokenizer": "my-tokenizer",
            "run": "my-encoder",
            "labels": "my-labels",
        }
        for theirs, ours in names.items():
            (folder / ours).symlink_to(quickstart / theirs)
        for name, command in SCREENS.items():
            print(draw(name, command, output_of(command, folder)))
        shutil.copy(quickstart / "run" / "curves.png", IMAGES / "first-day-pretraining.png")
        shutil.copy(folder / "my-tasks" / "my-labels" / "curves.png", IMAGES / "first-day-finetuning.png")


if __name__ == "__main__":
    main()
