"""The command line: one file per verb, which parses, calls one function of the library and prints what it returns.

Flags, colours, tables, logging and exit codes are known here and nowhere below. torch and everything that needs it is
imported inside the verbs: `electra --help` must answer at once.
"""

import logging
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from electra.base.errors import ElectraError
from electra.base.progress import show_live_bars
from electra.commands.compare import compare_command
from electra.commands.config import config_app
from electra.commands.detect import detect_command
from electra.commands.doctor import doctor_command
from electra.commands.evaluate import evaluate_command
from electra.commands.export import export_command
from electra.commands.finetune import finetune_command
from electra.commands.flops import flops
from electra.commands.predict import predict_command
from electra.commands.prepare import prepare_command
from electra.commands.pretrain import pretrain_command
from electra.commands.quickstart import quickstart_command
from electra.commands.score import rerank_command, score_command
from electra.commands.speedrun import speedrun_command
from electra.commands.tokenizer import tokenizer_command

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Raw text in, a pre-trained ELECTRA encoder out; fine-tuned, scored and used.",
    epilog="Every verb has its own --help. Errors are one line; `electra --debug VERB …` shows the traceback.",
)


@app.callback()
def root(debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False) -> None:
    pass


VERBS: dict[str, Callable[..., None]] = {
    "quickstart": quickstart_command,
    "tokenizer": tokenizer_command,
    "prepare": prepare_command,
    "pretrain": pretrain_command,
    "compare": compare_command,
    "speedrun": speedrun_command,
    "finetune": finetune_command,
    "predict": predict_command,
    "evaluate": evaluate_command,
    "detect": detect_command,
    "score": score_command,
    "rerank": rerank_command,
    "export": export_command,
    "doctor": doctor_command,
    "flops": flops,
}
for name, verb in VERBS.items():
    app.command(name)(verb)
app.add_typer(config_app, name="config")


class Messages(logging.Handler):
    """Messages of the library as plain lines on standard error, whatever that is at the moment: a live progress bar
    puts itself in its place, to print them above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            text = f"WARNING: {text}"
            text = f"\033[1;33m{text}\033[0m" if sys.stderr.isatty() else text
        print(text, file=sys.stderr, flush=True)


def configure_logging() -> None:
    logger = logging.getLogger("electra")
    logger.handlers = [Messages()]
    logger.setLevel(logging.INFO)
    show_live_bars(sys.stderr.isatty())


def main(arguments: list[str] | None = None) -> None:
    """Errors meant for people are one line and an exit code; everything else is a bug and keeps its traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    configure_logging()
    usage_error: Any = typer.BadParameter.__mro__[2]  # click's, or that of the copy of it inside newer typers
    try:
        result: Any = app(words, standalone_mode=False, obj=words)
        sys.exit(result if isinstance(result, int) else 0)
    except ElectraError as error:
        fail(words, error, error.exit_code)
    except usage_error as error:
        error.show()
        sys.exit(error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        print("electra: interrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # disk full, no permission, a folder that vanished
        fail(words, f"{error}.", 5)


def fail(words: list[str], message: object, code: int) -> None:
    if "--debug" in words:
        raise
    print(f"electra: {message}", file=sys.stderr)
    sys.exit(code)
