"""The command line: one file per verb, which parses, calls one function of the library and prints what it returns.

Flags, colours, tables, logging and exit codes are handled here and nowhere below. torch and everything that needs it is
imported inside the verbs, so that `electra --help` answers at once.
"""

import errno
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import electra
from electra.base.errors import (
    DataError,
    ElectraError,
    MachineError,
    PipeClosedError,
    is_first_process,
    is_said,
    shortened,
)
from electra.base.files import trusting
from electra.base.jobs import ending_at_signals, stop_at_closed_pipe
from electra.base.progress import show_live_bars, visible
from electra.commands.compare import compare_command
from electra.commands.config import config_app
from electra.commands.detect import detect_command
from electra.commands.doctor import doctor_command
from electra.commands.embed import embed_command
from electra.commands.evaluate import evaluate_command
from electra.commands.export import export_command
from electra.commands.finetune import finetune_command
from electra.commands.flops import flops
from electra.commands.import_ import import_command
from electra.commands.predict import predict_command
from electra.commands.prepare import prepare_command, prepare_finish_command, prepare_plan_command, prepare_unit_command
from electra.commands.pretrain import pretrain_command
from electra.commands.push import push_command
from electra.commands.quickstart import quickstart_command
from electra.commands.report import report_command
from electra.commands.score import rerank_command, score_command
from electra.commands.serve import serve_command
from electra.commands.speedrun import speedrun_command
from electra.commands.tokenizer import tokenizer_command
from electra.commands.verify import verify_command

VERBS: dict[str, dict[str, Callable[..., None]]] = {
    "First steps": {"quickstart": quickstart_command},
    "Data": {
        "tokenizer": tokenizer_command,
        "prepare": prepare_command,
        "prepare-plan": prepare_plan_command,
        "prepare-unit": prepare_unit_command,
        "prepare-finish": prepare_finish_command,
    },
    "Pre-training": {"pretrain": pretrain_command, "compare": compare_command, "speedrun": speedrun_command},
    "Fine-tuning": {"finetune": finetune_command, "predict": predict_command, "evaluate": evaluate_command},
    "Models": {
        "detect": detect_command,
        "score": score_command,
        "rerank": rerank_command,
        "embed": embed_command,
        "import": import_command,
        "export": export_command,
        "push": push_command,
        "verify": verify_command,
    },
    "Looking at it": {"serve": serve_command, "report": report_command},
    "Machine and settings": {"doctor": doctor_command, "flops": flops},
}


class Grouped(TyperGroup):
    """Lists the verbs in sections, each with the whole of its first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, verb in self.commands.items():
            sections.setdefault(verb.rich_help_panel, []).append((name, verb.get_short_help_str(limit=1000)))  # type: ignore[attr-defined]
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    cls=Grouped,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Raw text in, a pre-trained ELECTRA encoder out; fine-tuned, scored and used.",
    epilog="Every verb has its own --help. Errors are one line; `electra --debug VERB …` shows the traceback.",
)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"electra {electra.__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="show the version", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    pass


for title, verbs in VERBS.items():
    for name, verb in verbs.items():
        app.command(name, rich_help_panel=title)(verb)
app.add_typer(config_app, name="config", rich_help_panel=title)


class Messages(logging.Handler):
    """Prints the library's messages as plain lines on `sys.stderr` as it is at the moment: a live progress bar replaces it, to
    print them above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        text = "\n".join(map(shortened, visible(record.getMessage()).split("\n")))
        if record.levelno >= logging.WARNING:
            text = f"WARNING: {text}"
            text = f"\033[1;33m{text}\033[0m" if sys.stderr.isatty() else text
        try:
            print(text, file=sys.stderr, flush=True)
        except BrokenPipeError:
            close_output()
            stop_at_closed_pipe()
        except OSError:  # the terminal is gone, or the log's disk is full: the work matters more than its log
            pass


def configure_logging() -> None:
    logger = logging.getLogger("electra")
    logger.handlers = [Messages()]
    logger.setLevel(logging.INFO)
    show_live_bars(sys.stderr.isatty() and is_first_process())


def share_processors() -> None:
    """Shortens OpenMP's busy-waiting; must run before torch is loaded. Threads that wait for each other spin for milliseconds (300,000
    turns); if a processor has other work, they keep it from the thread they wait for, and a step takes many times as long."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "5000"


def at_home(word: str) -> str:
    """The word with the home folder for `~`, also after `=`, where most shells leave it: `data=~/shards`, `--out=~/model`."""
    return re.sub(r"^([\w.-]+=)?~(?=/)", lambda match: f"{match[1] or ''}{Path.home()}", word)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. One of several processes ends by os._exit: now and then threads of torch's libraries abort a process
    while the interpreter shuts down, and the launcher would not see its exit code."""
    share_processors()
    try:
        run(sys.argv[1:] if arguments is None else arguments)
    except SystemExit as stop:
        if "RANK" not in os.environ:
            raise
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(stop.code if isinstance(stop.code, int) else bool(stop.code))


def run(words: list[str]) -> None:
    """Runs a command. An error meant for people is one line and an exit code; any other is a bug, whose traceback --debug shows."""
    open_closed_streams()
    configure_logging()
    usage_error: Any = typer.BadParameter.__mro__[2]  # click's, or that of the copy of it inside newer typers
    try:
        for word in words:
            if any("\ud800" <= character <= "\udfff" for character in word):
                raise DataError(f"{word[:60]!r} has bytes that are not UTF-8. Convert it, or rename the file.")
        try:
            Path.cwd()  # without a current folder some libraries end the process
        except FileNotFoundError:
            raise MachineError("the folder that this command was started in is gone. Change to another.") from None
        words = list(map(at_home, words))
        with trusting("--trust" in words), ending_at_signals(lambda number: SystemExit(128 + number)):
            result: Any = app(words, standalone_mode=False, obj=words)
        sys.stdout.flush()
        sys.exit(result if isinstance(result, int) else 0)
    except PipeClosedError as error:
        sys.exit(error.exit_code)
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        close_output()  # click would exit with code 1 after printing to a closed pipe
        sys.exit(0)
    except ElectraError as error:
        if is_said(error):
            sys.exit(error.exit_code)
        options = " and ".join(f"--{name.replace('_', '-')}" for name in error.parameters)
        fail(words, f"{error} Here that is {options}." if options else error, error.exit_code)
    except usage_error as error:
        text = io.StringIO()
        error.show(text)
        if type(error).__name__ == "NoSuchOption" and any(
            "KEY=VALUE" in (it.metavar or "") for it in error.ctx.command.params
        ):
            text.write(f"Settings have no dashes: {error.option_name.lstrip('-')}=VALUE\n")
        print(visible(text.getvalue()), end="", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        print("electra: interrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away
        close_output()
        sys.exit(0)
    except OSError as error:  # no permission, a folder that is gone
        give_up_full_output()
        reason = f"{error if error.filename else f'standard output cannot be written: {error.strerror}'}."
        fail(words, shortened(reason), 2 if error.errno == errno.ENAMETOOLONG else 5)
    except MemoryError:
        fail(words, "out of memory. Close other programs, or use smaller files or settings.", 7)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        reason = next(iter(str(error).splitlines()), "")
        fail(words, f"{type(error).__name__} at {place}: {reason} A bug in electra: electra --debug … shows more.", 1)


def open_closed_streams() -> None:
    """Opens /dev/null for every standard stream that is closed (`>&-`): otherwise the next file to be opened would get its number and
    everything printed. Also makes standard output escape characters that its encoding lacks."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    nowhere = Path(os.devnull).open("r+")  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = (it or nowhere for it in (sys.stdin, sys.stdout, sys.stderr))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def fail(words: list[str], message: object, code: int) -> None:
    if "--debug" in words:
        raise
    who = "electra" if is_first_process() else f"electra, process {os.environ['RANK']}"
    with suppress(OSError):
        print(visible(f"{who}: {message}"), file=sys.stderr, flush=True)
    sys.exit(code)


def give_up_full_output() -> None:
    """Closes standard output if its disk is full: it would fail again when the interpreter exits, with another exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        close_output(1)


def close_output(*numbers: int) -> None:
    """Sends all further output, including the interpreter's at exit, to /dev/null, because nobody reads it any more."""
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115
    sys.stdout, sys.stderr = nowhere, sys.stderr if numbers else nowhere
    with suppress(OSError, ValueError):
        for number in numbers or (1, 2):
            os.dup2(nowhere.fileno(), number)
