"""Ways out that only a process has: a reader that goes away, Ctrl-C."""

import json
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from faults.world import PRETRAIN, long_word, run_words
from helpers import command, environment


def start(words: str, folder: Path, **more) -> subprocess.Popen:
    def answer_ctrl_c() -> None:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        command(*shlex.split(words)), cwd=folder, env=environment(), preexec_fn=answer_ctrl_c, **more
    )


def test_a_run_whose_reader_goes_away_is_saved_and_goes_on(world, tmp_path):
    words = f"pretrain {world / 'recipe.toml'} data={world / 'shards'} run={tmp_path / 'run'} train.steps=4000 train.save_every=100000"
    process = start(words, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    for _ in range(4):
        process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) == 141
    state = json.loads((tmp_path / "run/run_state.json").read_text())
    assert state["state"] == "interrupted" and state["step"] > 0
    assert (tmp_path / f"run/checkpoints/step-{state['step']:09d}").is_dir()


@pytest.mark.parametrize("words", ["detect export many.txt", "config show tiny", "--help"])
def test_a_verb_that_only_prints_ends_quietly_at_a_closed_pipe(words, world, tmp_path):
    (world / "many.txt").write_text("the timak walks\n" * 3000)
    process = start(words, world, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(120) in (0, 141) and errors == "", errors


@pytest.mark.parametrize(
    ("words", "streams", "code", "says"),
    [
        ("--help", ">/dev/full", 5, "standard output cannot be written: No space left"),
        ("--help", ">&- 2>&- <&-", 0, ""),
        ("config show zebra", "2>/dev/full", 2, ""),
        ("config show zebra", ">&-", 2, "no recipe 'zebra'"),
        ("predict tasks/table/seed-0", "<&-", 3, "no text"),
    ],
)
def test_streams_that_are_closed_or_full_change_no_exit_code(words, streams, code, says, world):
    line = f"{shlex.join(command(*shlex.split(words)))} {streams}"
    done = subprocess.run(line, shell=True, cwd=world, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == code and says in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "variables",
    [{"RANK": "x"}, {"RANK": "-1"}, {"RANK": "1"}, {"WORLD_SIZE": "x"}, {"LOCAL_RANK": "zz"}]
    + [{"MASTER_PORT": it} for it in ("soon", "65536", "1e300")],
)
def test_variables_of_a_launcher_that_are_no_numbers_are_named(variables, world, monkeypatch):
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | variables
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    done = run_words(f"{PRETRAIN}2", world)
    assert done.returncode == 5 and f"{next(iter(variables))}=" in done.stderr and "bug" not in done.stderr
    assert not (world / "run2").exists()


def test_a_folder_that_is_gone_is_said(tmp_path):
    gone = tmp_path / "gone"
    line = f"mkdir {gone}; cd {gone}; rmdir {gone}; {shlex.join(command('detect', 'x', 'y'))}"
    done = subprocess.run(line, shell=True, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 5 and "is gone. Change to another" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", ["tokenizer new word.txt --vocab-size 30000 --kind bpe", "detect export word.txt"])
def test_ctrl_c_is_answered_within_a_second_of_processor_time(words, world, tmp_path):
    (tmp_path / "word.txt").write_text(" ".join(long_word(300) for _ in range(2)) + long_word(60_000_000))
    (tmp_path / "export").symlink_to(world / "export")
    process = start(words, tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(5)
    assert process.poll() is None, "it was over before it could be asked to stop"
    process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    assert process.wait(60) == 130
    assert time.monotonic() - asked < 5  # a busy machine; a second on one that is not
