"""A table as a value: the library fills it, reports write it as Markdown, the command line draws it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Cells are text as people read it. An empty row is a line between two sections."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def markdown(self) -> str:
        lines = [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
            for cells in (self.columns, *filter(None, self.rows))
        ]
        return "\n".join([lines[0], "|---" * len(self.columns) + "|", *lines[1:]]) + "\n"
