"""The same shards whatever happens on the way: other numbers of workers, kills, full disks."""

import fcntl
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings
from tokenizers import Tokenizer

from electra.base.errors import DataError, ElectraError, MachineError, SettingsError
from electra.data import engines, units
from electra.data import prepare as prepare_module
from electra.data.corpus import Corpus, CorpusSettings, unify_lines
from electra.data.prepare import PrepareSettings, prepare
from electra.data.shards import open_data, verify_shards
from electra.data.tokenizer import SPECIAL_TOKENS, TokenizerSettings, adopt_vocabulary, save_tokenizer, train_tokenizer
from electra.data.units import WordCache, words_are_independent
from helpers import decoded

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SMALL_UNITS = PrepareSettings(unit_bytes=20_000, heldout_share=0.1)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = [*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS), "[", "]"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    return save_tokenizer(adopt_vocabulary(folder / "vocab.txt"), folder)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 200 kB in 400 documents: ten small units."""
    path = tmp_path_factory.mktemp("corpus") / "in.txt"
    rng = random.Random(1)
    documents = ("\n".join(" ".join(rng.choices(LETTERS, k=40)) for _ in range(rng.randint(1, 12))) for _ in range(400))
    path.write_text("\n\n".join(documents))
    return path


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="session")
def expected(corpus: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare([corpus], out, tokenizer, SMALL_UNITS, workers=1)
    assert verify_shards(out) == []
    return contents(out)


def refused(kind: type[ElectraError], exit_code: int, *arguments: Any, **named: Any) -> str:
    with pytest.raises(kind) as error:
        prepare(*arguments, **named)
    assert error.value.exit_code == exit_code and "\n" not in str(error.value)
    return str(error.value)


def test_the_output_does_not_depend_on_the_number_of_workers(
    corpus: Path, tokenizer: Path, tmp_path: Path, expected: dict[str, str]
) -> None:
    prepare([corpus], tmp_path / "out", tokenizer, SMALL_UNITS, workers=3)
    assert contents(tmp_path / "out") == expected
    assert len(expected) > 15


def test_no_text_is_lost_and_splits_share_no_document(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    prepare([corpus, corpus], tmp_path / "out", tokenizer, SMALL_UNITS, workers=1)
    train, heldout = decoded(tmp_path / "out", "train"), decoded(tmp_path / "out", "heldout")
    documents = [" ".join(text.split()) for text in corpus.read_text().split("\n\n")]
    assert sorted(train + heldout) == sorted(documents * 2)
    assert not set(train) & set(heldout)
    assert 0.05 < len(heldout) / len(documents * 2) < 0.15


KILLED = """
import sys
from collections.abc import Iterable
from pathlib import Path
from electra.data.prepare import PrepareSettings, prepare
if __name__ == "__main__":
    corpus, out, tokenizer = map(Path, sys.argv[1:])
    prepare([corpus], out, tokenizer, PrepareSettings(unit_bytes=20_000, heldout_share=0.1), workers=2)
"""


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(
    corpus: Path, tokenizer: Path, tmp_path: Path, expected: dict[str, str]
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    out = tmp_path / "out"
    rng = random.Random(2)
    for _ in range(6):
        process = subprocess.Popen([sys.executable, script, corpus, out, tokenizer])
        time.sleep(rng.uniform(0.2, 1.0))
        process.kill()
        process.wait()
    prepare([corpus], out, tokenizer, SMALL_UNITS, workers=2)
    assert contents(out) == expected


def test_workers_do_not_outlive_a_killed_run(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED.replace("20_000", "50"))
    process = subprocess.Popen([sys.executable, script, corpus, tmp_path / "out", tokenizer])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 20
    while not list((tmp_path / "out").glob("units/0*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = children.read_text().split()
    process.kill()
    process.wait()
    assert len(workers) >= 2
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_only_the_missing_units_are_done_again(
    corpus: Path, tokenizer: Path, tmp_path: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(prepare_module, "_finish", fail_with(OSError(5, "Input/output error")))
    assert "Input/output error" in refused(MachineError, 5, [corpus], out, tokenizer, SMALL_UNITS, workers=1)
    monkeypatch.undo()
    assert len(list((out / "units").glob("0????.json"))) > 8 and not (out / "manifest.json").exists()
    (out / "units" / "00003.json").unlink()
    (out / "units" / "00003-00000.json").unlink()
    (out / "train-00005.safetensors").write_bytes(b"cut off")
    (out / ".train-00007.safetensors.123.tmp").write_bytes(b"left over")
    (out / "train-99999.safetensors").write_bytes(b"of other text")
    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    prepare([corpus], out, tokenizer, SMALL_UNITS, workers=1)
    assert contents(out) == expected
    changed = {name for name, old in times.items() if (out / name).exists() and (out / name).stat().st_mtime_ns != old}
    assert changed == {name for name in expected if name.rpartition("-")[2][:5] in ("00003", "00005")}


def test_units_of_text_that_has_changed_are_done_again(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "in.txt", tmp_path / "out"
    settings = PrepareSettings(unit_bytes=20_000, heldout_share=0)
    prepare([corpus], tmp_path / "fresh", tokenizer, settings, workers=1)
    path.write_text(corpus.read_text().translate(str.maketrans("ab", "ba")))
    monkeypatch.setattr(prepare_module, "_finish", fail_with(OSError(5, "Input/output error")))
    refused(MachineError, 5, [path], out, tokenizer, settings, workers=1)
    monkeypatch.undo()
    path.write_bytes(corpus.read_bytes())
    prepare([path], out, tokenizer, settings, workers=1)
    assert contents(out) == contents(tmp_path / "fresh")


def fail_with(error: Exception) -> Any:
    def fail(*_: Any) -> None:
        raise error

    return fail


def test_a_finished_folder_is_left_alone(
    corpus: Path, tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "electra")
    out = tmp_path / "out"
    first = prepare([corpus], out, tokenizer, SMALL_UNITS, workers=1)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir() if path.name != ".lock"}
    assert prepare([corpus], out, tokenizer, SMALL_UNITS, workers=2) == first
    assert "is already prepared: nothing to do" in caplog.text
    assert times == {path: path.stat().st_mtime_ns for path in out.iterdir() if path.name != ".lock"}


def test_text_that_was_changed_later_is_not_taken_for_what_was_prepared(
    tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("One text.\n\nAnother text.")
    prepare([text], out, tokenizer, workers=1)
    prepare([text], out, tokenizer, workers=1)
    assert "was changed" not in caplog.text
    text.write_text("one text.\n\nanother text.")
    prepare([text], out, tokenizer, workers=1)
    assert f"{text} was changed after {out} was prepared, and is not read again" in caplog.text


def test_a_folder_of_other_shards_is_refused_with_what_differs(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([corpus], out, tokenizer, SMALL_UNITS, workers=1)
    before = contents(out)
    other = SMALL_UNITS.model_copy(update={"corpus": CorpusSettings(documents="line")})
    message = refused(SettingsError, 2, [corpus], out, tokenizer, other)
    assert "(corpus.documents: 'blank-line' -> 'line'). Choose another folder" in message
    assert "inputs.files: 1 -> 2" in refused(SettingsError, 2, [corpus, corpus], out, tokenizer, SMALL_UNITS)
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a"]))
    another = save_tokenizer(adopt_vocabulary(tmp_path / "vocab.txt"), tmp_path)
    assert "(tokenizer: " in refused(SettingsError, 2, [corpus], out, another, SMALL_UNITS)
    assert contents(out) == before


@pytest.mark.parametrize("share", [0.01, 0.5])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_documents_still_fill_both_splits(tokenizer: Path, tmp_path: Path, share: float, count: int) -> None:
    for attempt in range(2):
        path = tmp_path / f"{attempt}.txt"
        path.write_text("\n\n".join(f"{LETTERS[attempt]} {LETTERS[n]}" for n in range(count)))
        out = tmp_path / f"out{attempt}"
        settings = PrepareSettings(heldout_share=share, unit_bytes=4)
        manifest = prepare([path], out, tokenizer, settings, workers=1)
        assert manifest.splits["train"].documents and manifest.splits["heldout"].documents
        assert manifest.splits["train"].documents + manifest.splits["heldout"].documents == count
        assert verify_shards(out) == []


def test_documents_that_would_all_be_held_out_leave_one_to_train_on(tokenizer: Path, tmp_path: Path) -> None:
    def would_be_held_out(text: str) -> bool:
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") < 1 << 63

    texts = [text for first in LETTERS for second in LETTERS if would_be_held_out(text := f"{first} {second}")]
    (tmp_path / "in.txt").write_text("\n\n".join(texts[:4]))
    settings = PrepareSettings(heldout_share=0.5)
    manifest = prepare([tmp_path / "in.txt"], tmp_path / "out", tokenizer, settings, workers=1)
    assert (manifest.splits["train"].documents, manifest.splits["heldout"].documents) == (1, 3)
    (tmp_path / "one.txt").write_text(texts[0])
    one = prepare([tmp_path / "one.txt"], tmp_path / "one", tokenizer, settings, workers=1)
    assert (one.splits["train"].documents, one.splits["heldout"].documents) == (1, 0)


def test_nothing_is_held_out_of_one_document_or_if_not_wanted(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a b c\n\na b c")
    one = prepare([tmp_path / "one.txt"], tmp_path / "one", tokenizer, workers=1)
    none = prepare([corpus], tmp_path / "none", tokenizer, PrepareSettings(heldout_share=0), 1)
    assert (one.splits["train"].documents, one.splits["heldout"].documents) == (2, 0)
    assert none.splits["heldout"].documents == 0


def test_pieces_of_a_long_document_stay_together(tokenizer: Path, tmp_path: Path) -> None:
    long = ["".join(f"{letter} " for letter in random.Random(n).choices(LETTERS, k=1_200_000)) for n in range(3)]
    (tmp_path / "in.txt").write_text("\n\n".join(long))
    settings = PrepareSettings(heldout_share=0.3)
    manifest = prepare([tmp_path / "in.txt"], tmp_path / "out", tokenizer, settings)
    heldout, train = (" ".join(decoded(tmp_path / "out", split)) for split in ("heldout", "train"))
    assert sum(text.strip() in f"{heldout}|{train}" for text in long) == 3
    assert manifest.splits["train"].tokens + manifest.splits["heldout"].tokens == 3_600_000
    assert manifest.splits["train"].documents + manifest.splits["heldout"].documents == 9


def test_windows_text_gives_the_same_documents(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    windows = tmp_path / "in.txt"
    windows.write_bytes(b"\xef\xbb\xbf" + corpus.read_bytes().replace(b"\n", b"\r\n"))
    prepare([windows], tmp_path / "windows", tokenizer, SMALL_UNITS, workers=1)
    prepare([corpus], tmp_path / "unix", tokenizer, SMALL_UNITS, workers=1)
    for split in ("train", "heldout"):
        assert decoded(tmp_path / "windows", split) == decoded(tmp_path / "unix", split)


def test_text_that_spells_a_special_token_stays_text(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a [MASK] b [SEP] [PAD] c")
    prepare([tmp_path / "in.txt"], tmp_path / "out", tokenizer, workers=1)
    assert open_data(tmp_path / "out").shards[0].tokens.min() > 4


def test_skipped_documents_and_empty_files_are_in_the_manifest(tokenizer: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"a\n\n\xff\n\nb")
    (folder / "b.txt").write_text("")
    settings = PrepareSettings(corpus=CorpusSettings(on_bad="skip"))
    manifest = prepare([folder], tmp_path / "skip", tokenizer, settings, workers=1)
    assert (manifest.skipped_documents, manifest.replaced_documents, manifest.empty_files) == (1, 0, 1)
    settings = PrepareSettings(corpus=CorpusSettings(on_bad="replace"))
    manifest = prepare([folder], tmp_path / "replace", tokenizer, settings, workers=1)
    assert (manifest.skipped_documents, manifest.replaced_documents) == (0, 1)


def test_bad_input_leaves_no_manifest_and_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n' * 3 + "broken\n")
    assert "bad.jsonl:4 is not valid JSON" in refused(
        DataError, 3, [tmp_path / "bad.jsonl"], tmp_path / "out", tokenizer
    )
    assert not (tmp_path / "out" / "manifest.json").exists()
    (tmp_path / "nothing.txt").write_text("\u200b\u200b")
    message = refused(DataError, 3, [tmp_path / "nothing.txt"], tmp_path / "out", tokenizer)
    assert "nothing left, the tokenizer finds no token" in message


def test_a_second_process_is_refused_with_the_pid_of_the_first(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4242\n")
        lock.flush()
        assert "is in use by process 4242" in refused(MachineError, 5, [corpus], tmp_path, tokenizer)


def test_an_unwritable_folder_is_refused_before_work(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(MachineError, 5, [corpus], tmp_path / "file" / "out", tokenizer)


def test_output_inside_the_input_is_refused(corpus: Path, tokenizer: Path) -> None:
    message = refused(SettingsError, 2, [corpus.parent], corpus.parent / "out", tokenizer)
    assert "is inside the input" in message and not (corpus.parent / "out").exists()


def test_too_little_space_is_refused_before_work(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda _: usage)
    message = refused(MachineError, 5, [corpus], tmp_path / "out", tokenizer)
    assert f"needs at least {corpus.stat().st_size // 3:,} bytes, 1,000 are free" in message


FULL = """
import resource, sys
from collections.abc import Iterable
from pathlib import Path
from electra.data.prepare import PrepareSettings, prepare
from electra.base.errors import ElectraError
if __name__ == "__main__":
    corpus, out, tokenizer = map(Path, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    try:
        prepare([corpus], out, tokenizer, PrepareSettings(unit_bytes=100_000, heldout_share=0), workers=1)
    except ElectraError as error:
        print(error)
        sys.exit(error.exit_code)
"""


def test_a_full_disk_keeps_what_is_done(tokenizer: Path, tmp_path: Path) -> None:
    """The limit on the size of a file stands in for the disk: the last document alone makes too large a shard."""
    (tmp_path / "in.txt.gz").write_bytes(gzip.compress((("a b " * 100 + "\n\n") * 1000 + "a b " * 250_000).encode()))
    script, out = tmp_path / "full.py", tmp_path / "out"
    script.write_text(FULL)
    command = [sys.executable, script, tmp_path / "in.txt.gz", out, tokenizer]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 5, result.stderr
    assert f"{out} is full: about " in result.stdout and "What is done is kept" in result.stdout
    done = {path: path.stat().st_mtime_ns for path in out.glob("train-*.safetensors")}
    assert done and not (out / "manifest.json").exists()
    settings = PrepareSettings(unit_bytes=100_000, heldout_share=0)
    prepare([tmp_path / "in.txt.gz"], out, tokenizer, settings, workers=1)
    assert verify_shards(out) == []
    assert sum(path.stat().st_mtime_ns == when for path, when in done.items()) >= len(done) - 1


def leave(*_: object) -> None:
    os._exit(3)


def test_a_worker_that_dies_is_reported(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "start_worker", leave)
    message = refused(MachineError, 5, [corpus], tmp_path / "out", tokenizer, workers=2)
    assert "a worker process died" in message


def test_a_script_with_one_worker_needs_no_main_guard(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    call = f"prepare({str(corpus)!r}, {str(out)!r}, tokenizer={str(tokenizer)!r}, heldout=0.1, workers=1)"
    script.write_text(f"import electra\nprint(electra.{call}.splits['train'].documents > 0)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_progress_is_plain_lines_where_there_is_no_terminal(
    corpus: Path, tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "electra")
    prepare([corpus], tmp_path / "out", tokenizer, SMALL_UNITS, workers=1)
    assert "prepare: 100% · " in caplog.text and " tokens · 0 s left\n" in caplog.text


MEASURED = """
import resource, sys
from collections.abc import Iterable
from pathlib import Path
from electra.data.prepare import prepare
if __name__ == "__main__":
    corpus, out, tokenizer = map(Path, sys.argv[1:])
    prepare([corpus], out, tokenizer, workers=2)
    # Not ru_maxrss for this process: that one survives exec and would report the process that started us.
    status = Path("/proc/self/status").read_text()
    print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.parametrize("words", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_line_of_200_megabytes_stays_small_in_memory(tokenizer: Path, tmp_path: Path, words: bool) -> None:
    with (tmp_path / "in.txt").open("w") as file:
        for _ in range(200):
            file.write(("lorem ipsum " if words else "loremipsumdo") * (1_000_000 // 12))
    script = tmp_path / "measured.py"
    script.write_text(MEASURED)
    command = [sys.executable, script, tmp_path / "in.txt", tmp_path / "out", tokenizer]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    main, worker = map(int, result.stdout.split())
    print(f"main {main} kB, worker {worker} kB")
    assert main + 2 * worker < 450_000, (main, worker)
    assert verify_shards(tmp_path / "out") == []


def test_workers_import_neither_torch_nor_pyarrow() -> None:
    code = (
        "import electra.data.units, electra.data.engines, sys; sys.exit(bool({'torch', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_interrupt_leaves_the_folder_ready_to_go_on(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    script, out = tmp_path / "killed.py", tmp_path / "out"
    script.write_text(KILLED.replace("20_000", "1_000").replace("[corpus]", "[corpus] * 50"))  # far from over
    process = subprocess.Popen(
        [sys.executable, script, corpus, out, tokenizer],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    while not list(out.glob("units/0*.json")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=20)[1]
    assert json.loads(next(iter((out / "units").glob("0*.json"))).read_text())["key"]


def trained(folder: Path, **named: object) -> Tokenizer:
    (folder / "in.txt").write_text("Der Zug fährt, 日本語 がぎ 한국어 x-y z. " * 50, "utf-8")
    return train_tokenizer(Corpus([folder / "in.txt"]), TokenizerSettings(vocab_size=300, **named))


@pytest.fixture(scope="module", params=[True, False])
def wordpiece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    tokenizer = trained(tmp_path_factory.mktemp("encoder"), lowercase=request.param, strip_accents=request.param)
    assert words_are_independent(tokenizer)
    return tokenizer


def ids(packed: Iterable[bytes], dtype: np.dtype) -> list[list[int]]:
    return [np.frombuffer(line, dtype).tolist() for line in packed]


@given(
    lines=strategies.lists(
        strategies.text(
            strategies.characters(exclude_categories=["Cs"]) | strategies.sampled_from("Zug \t\xa0日.[MASK]")
        )
    )
)
@hypothesis_settings(max_examples=200, deadline=None)
def test_words_one_by_one_give_the_ids_of_the_line(wordpiece: Tokenizer, lines: list[str]) -> None:
    cache = WordCache(wordpiece)
    lines = [unify_lines(line).replace("\n", " ") for line in lines]
    expected = [wordpiece.encode(line, add_special_tokens=False).ids for line in lines]
    for _ in range(2):
        assert ids(map(cache.encode, lines), cache.dtype) == expected


def test_the_memory_for_words_is_bounded(wordpiece: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "_REMEMBERED_CHARACTERS", 100)
    cache = WordCache(wordpiece)
    for number in range(100):
        cache.encode(f"word{number} Zug")
    assert len(cache) < 30


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_other_kinds_get_whole_lines(tmp_path: Path, kind: str) -> None:
    tokenizer = trained(tmp_path, kind=kind)
    assert not words_are_independent(tokenizer)
    cache = WordCache(tokenizer)
    line = "Der  Zug\tfährt"
    assert ids([cache.encode(line)], cache.dtype) == [tokenizer.encode(line, add_special_tokens=False).ids]


def test_a_tokenizer_with_words_of_its_own_gets_whole_lines(wordpiece: Tokenizer) -> None:
    copy = Tokenizer.from_str(wordpiece.to_str())
    copy.add_tokens(["two words"])
    assert not words_are_independent(copy)
