"""electra serve: a page and an API for models, runs and results."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from electra.base.errors import MachineError, counted
from electra.commands.console import Trust, say

SWITCH_SECONDS = 1e-4
"""The interval at which Python switches between computing and talking to clients; its default, 5 ms, costs 1 to 4 % of the throughput."""


def serve_command(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="runs, exports, fine-tuned folders, results, or folders of them"),
    ],
    host: Annotated[
        str, typer.Option(help="address to listen on; any but this machine's own needs a token")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0 picks a free one", min=0, max=65535)] = 8420,
    token: Annotated[
        str | None, typer.Option(help="token that clients send", show_default="made and printed where one is needed")
    ] = None,
    allow_origin: Annotated[str, typer.Option(help="another site whose pages may call the API (https://…)")] = "",
    trust: Trust = False,
) -> None:
    """A page to try models, watch runs and compare results, and the same as a JSON API."""
    try:
        from electra.inspector.app import Address, build_server
    except ModuleNotFoundError as error:
        raise MachineError(f"serving needs {error.name}. Install it from the clone: pip install '.[serve]'.") from None
    running = build_server(paths, Address(host, port, token, allow_origin))
    shelves = running.desk.gallery
    counts = ", ".join(
        counted(len(it), noun)
        for noun, it in (("model", shelves.models), ("run", shelves.runs), ("result", shelves.results))
    )
    say(f"{counts}: {running.url}  (Ctrl-C stops it)")
    sys.setswitchinterval(SWITCH_SECONDS)
    with running.socket:
        try:
            running.server.run(sockets=[running.socket])
        except KeyboardInterrupt:  # the usual way to stop it
            say("stopped.")
