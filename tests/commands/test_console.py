"""Tables, messages and hints as people see them."""

import logging

import pytest

from electra.base.errors import DataError, MachineError
from electra.base.progress import Table
from electra.commands import configure_logging
from electra.commands.console import print_table, read_lines, resume_hint
from helpers import electra

TABLE = Table(
    ("class", "F1", "meaning"), [("a|b", "0.5000", "[bold] words"), (), ("c", "–", "more")], title="scores [x]"
)


def test_one_table_is_drawn_and_written_as_markdown(capsys):
    assert TABLE.markdown().splitlines() == [
        "| class | F1 | meaning |",
        "|---|---|---|",
        "| a\\|b | 0.5000 | [bold] words |",
        "| c | – | more |",
    ]
    print_table(TABLE)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "scores [x]" and "[bold] words" in lines[4]
    assert "│ c     │      – │ more " in lines[6], "words stand left, numbers right"
    assert lines[5].startswith("├")


def test_words_of_a_table_that_just_fits_are_not_cut_in_two(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    head = ("task", "metric", "median ± sd", "ensemble", "majority", "words", "untrained")
    print_table(
        Table(head, [("sst_train", "accuracy", "0.7890 ± 0.0123", "0.7950", "0.5100", "0.8000", "0.7800")], title="")
    )
    out = capsys.readouterr().out
    assert "│ sst_train │ accuracy " in out and max(map(len, out.splitlines())) <= 80


def test_a_title_is_not_broken_to_the_width_of_its_table(capsys):
    title = "runs/my-run: step 1,800 on 200 held-out rows, beside the same network untrained"
    print_table(Table(("metric", "value"), [("auc", "0.84")], title=title))
    assert capsys.readouterr().out.splitlines()[0] == title


def test_only_a_line_feed_ends_a_line_of_text(tmp_path):
    path = tmp_path / "my.txt"
    lines = ["a form feed\x0c in it", "U+2028 \u2028 and U+0085 \x85", "", "last"]
    path.write_bytes("\ufeff".encode() + "\r\n".join([*lines, ""]).encode())
    assert read_lines(str(path), keep_blank=True) == lines, "the n-th answer belongs to the n-th line"
    assert read_lines(str(path)) == [line for line in lines if line]


def test_messages_of_the_library_are_plain_lines_on_standard_error(capsys):
    configure_logging()
    log = logging.getLogger("electra.somewhere")
    log.info("reading %s", "[x]")
    log.warning("careful")
    log.debug("never seen")
    assert capsys.readouterr().err == "reading [x]\nWARNING: careful\n"


@pytest.mark.parametrize(("error", "begun", "hint"), [
    (MachineError("disk full"), True, True),
    (MachineError("disk full"), False, False),
    (DataError("no text"), True, False),
    (KeyboardInterrupt(), True, True),
])  # fmt: skip
def test_the_command_that_goes_on_is_named_where_it_can(error, begun, hint, capsys):
    with pytest.raises(type(error)), resume_hint(["pretrain", "tiny", "data=my text"], lambda: begun):
        raise error
    assert ("to resume: electra pretrain tiny 'data=my text'" in capsys.readouterr().err) == hint


def test_the_command_to_go_on_with_is_the_one_that_was_called(monkeypatch):
    """Also where Python calls it, whose own command line is another."""

    def fail(*_, **__):
        raise MachineError("disk full")

    monkeypatch.setattr("electra.finetune", fail)
    words = ("finetune", "my-run", "my-table.csv", "--seeds", 2)
    assert "to resume: electra finetune my-run my-table.csv --seeds 2\n" in electra(*words).stderr
