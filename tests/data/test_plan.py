"""Units can be done anywhere, in any order, twice or half, and the folder is the same."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies

from electra.base.errors import DataError, MachineError, SettingsError
from electra.data import files
from electra.data import plan as plan_module
from electra.data.corpus import Corpus, CorpusSettings, Reading
from electra.data.plan import PrepareSettings, plan_corpus, read_plan
from electra.data.prepare import finish_units, plan_units, prepare, run_share
from electra.data.units import run_unit
from helpers import contents, decoded, electra, environment

SMALL = PrepareSettings(unit_bytes=20_000, heldout_share=0.1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of several units, small files that share one, a compressed one and an empty one."""
    import gzip

    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(3)

    def text(count: int) -> str:
        return "\n\n".join(" ".join(rng.choices(["bar", "lon", "tim", "The"], k=30)) for _ in range(count))

    (folder / "a.txt").write_text(text(1500))
    for name in "bcd":
        (folder / f"{name}.txt").write_text(text(3))
    (folder / "e.txt").write_text("\n")
    (folder / "f.txt.gz").write_bytes(gzip.compress(text(400).encode()))
    (folder / "g.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in text(400).split("\n\n")))
    return folder


@pytest.fixture(scope="module")
def tokenizer(prepared: Path) -> Path:
    return prepared / "tokenizer.json"


@pytest.fixture(scope="module")
def expected(corpus: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare([corpus], out, tokenizer, SMALL, workers=2)
    return contents(out)


SEPARATORS = ["\n", "\n\n", "\r\n", "\r\n\r\n", " ", "\n \t\n", "\r", "\f", "\n\u2028\n", "\x85"]


@given(
    parts=strategies.lists(strategies.text("aé字 ") | strategies.sampled_from(SEPARATORS), max_size=40),
    documents=strategies.sampled_from(["blank-line", "line"]),
    step=strategies.integers(1, 30),
)
@example(parts=["a", "\n\n", "\n\n", "b"], documents="blank-line", step=1)
@example(parts=["\ufeff", "a", "\n\n", "b"], documents="blank-line", step=2)
@settings(max_examples=300, deadline=None)
def test_the_sections_of_a_file_hold_its_documents(tmp_path_factory, parts, documents, step):
    path = tmp_path_factory.getbasetemp() / "divided.txt"
    path.write_bytes("".join(["x\n\n", *parts]).encode())
    wanted = PrepareSettings(corpus=CorpusSettings(documents=documents), unit_bytes=step, heldout_share=0)
    corpus = Corpus([path], wanted.corpus)
    plan = plan_corpus(corpus, wanted, "", 5)
    sections = [plan.unit(number, path).sections for number in range(len(plan.units))]
    apart = [document for unit in sections for document in Reading(unit, wanted.corpus)]
    assert apart == list(corpus.read())
    assert len(sections) == -(-path.stat().st_size // step)


@pytest.mark.parametrize("name, end", [("in.jsonl", "\n"), ("in.jsonl", "\r\n"), ("in.json", "\n")])
def test_json_lines_are_divided_whatever_their_name(tokenizer: Path, tmp_path: Path, name: str, end: str) -> None:
    """Documents straddle every cut, one is longer than two units, and the last line has no end."""
    import json

    texts = [f"bar {number} " + "tim " * (number % 7) for number in range(60)]
    texts[30] = "lon tim\n\nbar " * 200
    (tmp_path / name).write_bytes(end.join(json.dumps({"text": text}) for text in texts).encode())
    corpus, wanted = Corpus([tmp_path / name]), PrepareSettings(unit_bytes=500, heldout_share=0.2)
    plan = plan_corpus(corpus, wanted, "", 5)
    assert len(plan.units) == -(-corpus.size // 500) > 9
    read = [[document.text for document in Reading(unit.sections, wanted.corpus)] for unit in plan.all_units(tmp_path)]
    assert [text for unit in read for text in unit] == [text.strip() for text in texts]
    assert sum(map(bool, read)) == 5  # the long one fills the others
    for workers in (1, 2):
        prepare([tmp_path / name], tmp_path / str(workers), tokenizer, wanted, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    whole = tmp_path / "whole"
    prepare([tmp_path / name], whole, tokenizer, wanted.model_copy(update={"unit_bytes": 1 << 20}), workers=1)
    for split in ("train", "heldout"):
        assert decoded(tmp_path / "1", split) == decoded(whole, split) != []


def test_a_cell_of_csv_is_never_divided(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text\n" + '"one\n\ntwo"\n' * 100)
    plan = plan_corpus(Corpus([tmp_path / "in.csv"]), PrepareSettings(unit_bytes=100, heldout_share=0), "", 5)
    assert len(plan.units) == 1


def test_units_of_a_few_bytes_are_refused_with_a_size_that_is_enough(tokenizer: Path, tmp_path: Path) -> None:
    """Who writes 4 for 4 MiB would get a shard and several files for every four bytes of text."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("bar tim\n\n" * 700 * (1 + ord(name) % 3))
    files = [tmp_path / f"{name}.txt" for name in "abc"]
    done = electra("prepare", tmp_path / "out", *files, "--tokenizer", tokenizer, "--unit-bytes", 1)
    assert done.returncode == 2 and "units of 1 byte would make more than 10,000 shards of 37,800 bytes" in done.stderr
    assert "Give at least 8 as unit_bytes" in done.stderr and not (tmp_path / "out").exists()
    assert 4000 < len(plan_corpus(Corpus(files), PrepareSettings(unit_bytes=8, heldout_share=0), "", 5).units) <= 10_000


def test_a_plan_that_divided_otherwise_is_not_mixed_up(tokenizer: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    """As versions did that read JSON lines as a whole. The array that was begun can be finished; a new plan is refused, and
    prepare says that it begins again."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"text": "bar {number} tim"}}\n' for number in range(200)))
    wanted = PrepareSettings(unit_bytes=500, heldout_share=0.1)
    prepare([path], tmp_path / "new", tokenizer, wanted, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(plan_module, "divides", lambda *_: None)
        for name in ("array", "interrupted"):
            plan_units([path], tmp_path / name, tokenizer, wanted)
    run_share(tmp_path / "array", 0, 1)
    with pytest.raises(
        SettingsError, match=r"the same text in 1 unit, which an earlier version .* would be 10\. Finish"
    ):
        plan_units([path], tmp_path / "array", tokenizer, wanted)
    finish_units(tmp_path / "array")
    assert decoded(tmp_path / "array", "train") == decoded(tmp_path / "new", "train")
    run_share(tmp_path / "interrupted", 0, 1)
    caplog.set_level("INFO")
    prepare([path], tmp_path / "interrupted", tokenizer, wanted, workers=1)
    assert "it is prepared again from the start" in caplog.text
    assert contents(tmp_path / "interrupted") == contents(tmp_path / "new")


def test_where_no_document_starts_for_long_there_is_no_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_SEARCH", 1 << 16)
    path = tmp_path / "in.txt"
    path.write_text("a b\n\n" + "x " * 150_000 + "\n\nc d")
    wanted = PrepareSettings(unit_bytes=50_000, heldout_share=0)
    corpus = Corpus([path])
    plan = plan_corpus(corpus, wanted, "", 5)
    read = [[document.text for document in Reading(unit.sections, wanted.corpus)] for unit in plan.all_units(path)]
    assert [len(texts) for texts in read] == [2, 0, 0, 0, 0, 0, 1]
    assert [text for texts in read for text in texts] == [document.text for document in corpus.read()]


def test_a_bad_line_far_into_a_file_has_its_number(tokenizer: Path, tmp_path: Path) -> None:
    lines = ['{"text": "The bar"}\n'] * 1000
    lines[800] = '{"text": \n'
    (tmp_path / "in.jsonl").write_text("".join(lines))
    with pytest.raises(DataError, match=r"in.jsonl:801 is not valid JSON"):
        prepare([tmp_path / "in.jsonl"], tmp_path / "out", tokenizer, PrepareSettings(unit_bytes=3000), workers=1)


def test_an_array_of_jobs_in_any_order_gives_the_same_bytes(
    corpus: Path, tokenizer: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    plan = plan_units([corpus], out, tokenizer, SMALL)
    assert plan and len(plan.units) > 8
    for index in (2, 0, 2, 1):
        run_share(out, index, 3)
    manifest = finish_units(out)
    assert contents(out) == expected
    assert manifest.empty_files == 1
    assert finish_units(out) == manifest and run_share(out, 0, 3) == 0
    assert plan_units([corpus], out, tokenizer, SMALL) is None


def test_commands_of_an_array(corpus: Path, tokenizer: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    words = ("--tokenizer", tokenizer, "--unit-bytes", 20_000, "--heldout", 0.1)
    planned = electra("prepare-plan", out, corpus, *words)
    assert planned.returncode == 0 and f"{out}: " in planned.stdout and " units of 7 files, " in planned.stdout
    assert electra("prepare-unit", out, "--index", "0/2").returncode == 0
    half = electra("prepare-finish", out)
    assert (
        half.returncode == 3
        and "units are not done: 1, 3, 5, 7" in half.stderr
        and "(unit 1 is missing)" in half.stderr
    )
    assert not (out / "manifest.json").exists()
    assert " units done" in electra("prepare-unit", out, "--index", "1/2").stdout
    finished = electra("prepare-finish", out)
    assert finished.returncode == 0 and " tokens in " in finished.stdout, finished.stderr
    assert contents(out) == expected
    for index in ("2/2", "-1/2", "1", "x/y", "0/0", "٠/٢"):
        refused = electra("prepare-unit", out, f"--index={index}")
        assert refused.returncode == 2 and f"{index} is not a" in refused.stderr and refused.stderr.count("\n") == 1
    refused = electra("prepare", out, corpus, *words, "--engine", "array")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "engine 'array' is unknown" in refused.stderr
    assert "prepare-plan, prepare-unit, prepare-finish" in refused.stderr


def test_shares_at_the_same_time_and_killed_ones_do_no_harm(
    corpus: Path, tokenizer: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    plan_units([corpus], out, tokenizer, SMALL)
    code = f"from pathlib import Path; from electra.data.prepare import run_share; run_share(Path({str(out)!r}), 0, 1)"
    command = [sys.executable, "-c", code]
    first, second = (subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) for _ in range(2))
    while not list(out.glob("units/0000?.json")) and first.poll() is None:
        pass
    second.kill()
    second.wait()
    assert first.wait(60) == 0
    finish_units(out)
    assert contents(out) == expected


def test_finish_names_units_that_are_damaged_or_of_another_plan(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = plan_units([corpus], out, tokenizer, SMALL)
    run_share(out, 0, 1)
    (out / "train-00002.safetensors").write_bytes(b"cut")
    (out / "units" / "00001.json").write_text("{")
    shutil.copy(out / "units" / "00004.json", out / "units" / "00005.json")
    with pytest.raises(
        DataError, match=r"units are not done: 1, 2, 5 \(unit 1 has a damaged entry\)\. Run their shares again"
    ):
        finish_units(out)
    for number in (1, 2):
        run_unit(plan.unit(number, out))
    with pytest.raises(DataError, match=r"not done: 5 \(unit 5 belongs to another plan\)"):
        finish_units(out)


def test_another_plan_is_refused_with_what_differs(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan_units([corpus], out, tokenizer, SMALL)
    before = read_plan(out)
    assert plan_units([corpus], out, tokenizer, SMALL) == before
    with pytest.raises(SettingsError, match=r"other units \(heldout_share: 0.1 -> 0.01.*Choose another folder"):
        plan_units([corpus], out, tokenizer)
    with pytest.raises(SettingsError, match=r"inputs.files: 7 -> 1"):
        plan_units([corpus / "a.txt"], out, tokenizer, SMALL)
    assert read_plan(out) == before


def test_text_that_changes_after_the_plan_is_refused(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    shutil.copy(corpus / "a.txt", path)
    plan_units([path], tmp_path / "out", tokenizer, SMALL)
    path.write_text("x" * path.stat().st_size)
    with pytest.raises(DataError, match=r"in.txt has changed since the plan was made"):
        run_share(tmp_path / "out", 0, 1)
    path.unlink()
    with pytest.raises(DataError, match=r"in.txt does not exist here. Every machine must see"):
        run_share(tmp_path / "out", 0, 1)


def test_a_folder_of_before_is_left_alone(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Its manifest lacks what has been added since."""
    import json

    out = tmp_path / "out"
    prepare([corpus], out, tokenizer, SMALL, workers=1)
    manifest = json.loads((out / "manifest.json").read_text())
    for name in ("filters", "duplicates", "near_share"):
        del manifest["settings"][name]
    del manifest["removed_documents"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    before = contents(out)
    prepare([corpus], out, tokenizer, SMALL, workers=1)
    assert contents(out) == before


def test_a_folder_without_a_plan_says_so(tmp_path: Path) -> None:
    for step in (lambda: run_share(tmp_path, 0, 1), lambda: finish_units(tmp_path)):
        with pytest.raises(DataError, match=r"has no plan. Run .electra prepare-plan. first"):
            step()
    with pytest.raises(DataError, match="has no plan"):
        run_share(tmp_path / "nowhere", 0, 1)
    assert not (tmp_path / "nowhere").exists()


def test_two_engines_on_one_folder_are_refused(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    from electra.base.files import lock

    out = tmp_path / "out"
    plan_units([corpus], out, tokenizer, SMALL)
    with lock(out, shared=True):
        run_share(out, 0, 1000)  # another job of the array may join
        with pytest.raises(MachineError, match="is in use by process"):
            prepare([corpus], out, tokenizer, SMALL, workers=1)
    with lock(out), pytest.raises(MachineError, match="is in use by process"):
        run_share(out, 0, 1000)


def test_storage_without_locks_or_renames(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An array can do without locks, and says once that nobody else may write; one process that could lose a race does not."""
    from electra.base import files as base_files

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(base_files.fcntl, "flock", no_locks)
    plan_units([corpus], tmp_path / "out", tokenizer, SMALL)
    assert "cannot be locked (No locks available): make sure that nothing else writes there" in caplog.text
    with pytest.raises(MachineError, match=r"cannot be locked: No locks available. Choose a folder on a local disk"):
        prepare([corpus], tmp_path / "other", tokenizer, SMALL)

    def no_rename(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "replace", no_rename)
    with pytest.raises(MachineError, match=r"cannot be written: Operation not supported") as error:
        plan_units([corpus], tmp_path / "third", tokenizer, SMALL)
    assert error.value.exit_code == 5 and not list((tmp_path / "third").rglob("*.*json*"))
