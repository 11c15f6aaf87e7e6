"""electra push: a model folder to the Hugging Face Hub."""

from pathlib import Path
from typing import Annotated

import typer

from electra.base.errors import counted
from electra.commands.console import Trust, print_table, say


def push_command(
    folder: Annotated[Path, typer.Argument(help="an export or a fine-tuned folder")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub")],
    yes: Annotated[bool, typer.Option("--yes", help="upload; without it, only show what would be uploaded")] = False,
    public: Annotated[bool, typer.Option("--public", help="make the repository public instead of private")] = False,
    trust: Trust = False,
) -> None:
    """Upload a checked model folder to the Hugging Face Hub; says first what would go there."""
    import electra
    from electra.base.progress import Table

    pushed = electra.push(folder, repo, yes, public)
    rows = [(name, f"{size:,}") for name, size in pushed.files.items()]
    if not pushed.url:
        print_table(Table(("file", "bytes"), [*rows, (), ("together", f"{sum(pushed.files.values()):,}")]))
    for name in pushed.left_out:
        say(f"not uploaded, since no manifest names it: {name}")
    for remark in pushed.remarks:
        say(f"note: {remark}")
    if pushed.url:
        say(f"{folder}: {counted(len(rows), 'file')} at {pushed.url}")
    else:
        visibility = "for everybody to read" if public else "private"
        say(f"nothing was sent. --yes uploads {counted(len(rows), 'file')} to {repo}, {visibility}.")
