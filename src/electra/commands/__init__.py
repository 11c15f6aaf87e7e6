"""Verbs -> functions. torch and everything that needs it is imported inside the verbs: --help must answer at once."""

import sys
from typing import Annotated, Any

import typer

from electra.base.errors import ElectraError
from electra.commands import comparing, data, finetuning, flops, pretraining, scoring, settings

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


for verb in (
    pretraining.quickstart,
    data.tokenizer,
    data.prepare,
    pretraining.pretrain,
    comparing.compare,
    finetuning.finetune,
    finetuning.predict,
    pretraining.evaluate,
    pretraining.detect,
    scoring.score,
    scoring.rerank,
    pretraining.export,
    settings.doctor,
    flops.flops,
):
    app.command()(verb)

config_app = typer.Typer(no_args_is_help=True, help="Look at recipes and settings.", rich_markup_mode=None)
config_app.command("show")(settings.config_show)
config_app.command("list")(settings.config_list)
config_app.command("tasks")(settings.config_tasks)
app.add_typer(config_app, name="config")


def main(arguments: list[str] | None = None) -> None:
    """Errors meant for people are one line and an exit code; everything else is a bug and keeps its traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        result: Any = app(words, standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except ElectraError as error:
        if "--debug" in words:
            raise
        print(f"electra: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        print("electra: interrupted.", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # disk full, no permission, a folder that vanished
        if "--debug" in words:
            raise
        print(f"electra: {error}.", file=sys.stderr)
        sys.exit(5)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # click's usage errors
            error.show()
            sys.exit(error.exit_code)
        raise
