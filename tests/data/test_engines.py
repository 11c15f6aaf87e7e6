"""Ray with a worker that is killed, a store of objects, memory: the same bytes as one process on a disk."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from electra.base import files
from electra.base.errors import DataError, MachineError, SettingsError
from electra.base.jobs import STOPPED
from electra.base.progress import Progress
from electra.base.remote import RemotePath, as_place
from electra.data.plan import PrepareSettings
from electra.data.prepare import finish_units, plan_units, prepare, run_share
from helpers import command, contents, electra, environment
from together import free_port

SMALL = PrepareSettings(unit_bytes=10_000, heldout_share=0.1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(5)
    for name, count in (("a.txt", 600), ("b.txt", 3)):
        words = (" ".join(rng.choices(["bar", "lon", "tim", "The"], k=30)) for _ in range(count))
        (folder / name).write_text("\n\n".join(words))
    return folder


@pytest.fixture(scope="module")
def tokenizer(prepared: Path) -> Path:
    return prepared / "tokenizer.json"


@pytest.fixture(scope="module")
def expected(corpus: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare([corpus], out, tokenizer, SMALL, workers=1)
    return contents(out)


@pytest.mark.parametrize("verb", ["prepare", "prepare-unit"])
def test_sigterm_ends_with_75_and_the_same_command_goes_on(
    verb: str,
    corpus: Path,
    tokenizer: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, how = tmp_path / "out", ["--tokenizer", tokenizer, "--unit-bytes", 10_000, "--heldout", 0.1]
    words = ["prepare", out, corpus, *how, "--workers", 1]
    if verb == "prepare-unit":
        assert electra("prepare-plan", out, corpus, *how).returncode == 0
        words = ["prepare-unit", out, "--index", "0/1"]
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        stopped = electra(*words)
    assert stopped.returncode == 75
    assert stopped.stderr.strip().splitlines()[-1] == f"electra: {STOPPED}"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not multiprocessing.active_children()
    done = list((out / "units").glob("00*.json"))
    assert done and not (out / "manifest.json").exists()
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert electra(*words).returncode == 0
    if verb == "prepare-unit":
        assert electra("prepare-finish", out).returncode == 0
    assert contents(out) == expected
    assert all(path.stat().st_mtime_ns == time for path, time in before.items() if path.exists())


def test_a_signal_that_comes_while_a_row_is_parsed_is_no_bad_row(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `skip` its document would be left out for good, in shards that are called whole."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"bar lon tim {number}"}) + "\n" for number in range(50)))
    words = ["--tokenizer", tokenizer, "--heldout", 0, "--on-bad", "skip"]
    for out in ("out", "undisturbed"):
        assert electra("prepare-plan", tmp_path / out, rows, *words).returncode == 0
    parsed = []

    def signalled(*given: object) -> object:
        parsed.append(given)
        if len(parsed) == 20:
            os.kill(os.getpid(), signal.SIGTERM)
        return files.parse_json(*given)

    with monkeypatch.context() as patch:
        patch.setattr("electra.data.files.parse_json", signalled)
        stopped = electra("prepare-unit", tmp_path / "out", "--index", "0/1")
    assert stopped.returncode == 75 and STOPPED in stopped.stderr
    for out in ("out", "undisturbed"):
        assert electra("prepare-unit", tmp_path / out, "--index", "0/1").returncode == 0
        assert electra("prepare-finish", tmp_path / out).returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


KILLED_ON_RAY = """
import os, sys
from pathlib import Path
from electra.data import engines, units
from electra.data.plan import PrepareSettings
from electra.data.prepare import prepare

corpus, out, tokenizer, marker = map(Path, sys.argv[1:])

def run_unit_or_die(unit):
    if unit.number == 3 and not marker.exists():
        marker.touch()
        units.finish_unit = lambda *_: os.kill(os.getpid(), 9)  # its shards are written, its entry is not
    return units.run_unit(unit)

engines.run_unit = run_unit_or_die
prepare([corpus], out, tokenizer, PrepareSettings(unit_bytes=10_000, heldout_share=0.1), workers=2, engine="ray")
"""


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Ray's sockets need a short path."""
    folder = tempfile.mkdtemp(prefix="r")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_ray_does_again_what_a_killed_worker_did_not_finish(
    corpus: Path, tokenizer: Path, tmp_path: Path, expected: dict[str, bytes], ray_folder: str
) -> None:
    pytest.importorskip("ray")
    words = [corpus, tmp_path / "out", tokenizer, tmp_path / "marker"]
    env = environment({"RAY_TMPDIR": ray_folder})
    env.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-c", KILLED_ON_RAY, *words], env=env, timeout=200, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "marker").exists()
    assert contents(tmp_path / "out") == expected


ALONE = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Ray listens on every interface, whatever address it is given: here it has a network of its own, with nothing but loopback. With the
shell that is the first process there all others end."""
JOINED_RAY = """
ip link set lo up
"$1" -m ray.scripts.scripts start --head --num-cpus 2 --temp-dir "$HOME" --include-dashboard false --object-store-memory 134217728 >&2
shift
"$@" && grep --quiet gcs_server /proc/[0-9]*/comm
"""


def has_own_network() -> bool:
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    return subprocess.run([*ALONE, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
def test_a_ray_cluster_that_runs_already_is_joined_and_left_running(
    corpus: Path, tokenizer: Path, tmp_path: Path, expected: dict[str, bytes], ray_folder: str
) -> None:
    pytest.importorskip("ray")
    if not has_own_network():
        pytest.skip("this user may not have a network of its own")
    settings = ["--tokenizer", tokenizer, "--unit-bytes", 10_000, "--heldout", 0.1, "--engine", "ray"]
    words = command("prepare", tmp_path / "out", corpus, *settings)
    env = environment({"HOME": ray_folder, "RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"})
    env.pop("RAY_ADDRESS", None)
    script = [*ALONE, "sh", "-e", "-c", JOINED_RAY, "sh", sys.executable, *words]
    done = subprocess.run(script, env=env, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Ray runtime started" in done.stderr and "No Ray cluster is running" not in done.stderr
    assert contents(tmp_path / "out") == expected


def test_ray_that_is_missing_or_elsewhere_is_one_line(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MachineError, match=r"needs Ray. Install it from the clone: pip install '.\[ray\]'"):
        prepare([corpus], tmp_path / "out", tokenizer, SMALL, engine="ray")
    with pytest.raises(SettingsError, match="is seen by one process only"):
        prepare([corpus], RemotePath("memory://nowhere"), tokenizer, SMALL, engine="ray")


def test_memory_of_this_process(corpus: Path, tokenizer: Path, expected: dict[str, bytes]) -> None:
    source, out = RemotePath("memory://texts"), RemotePath("memory://shards")
    for file in corpus.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    prepare([source], out, tokenizer, SMALL)
    assert contents(out) == expected
    prepare([source], out, tokenizer, SMALL)
    with pytest.raises(SettingsError, match="already holds other shards"):
        prepare([source], out, tokenizer)
    out.remove()
    source.remove()


def test_memory_of_a_command_is_refused_for_it_ends_with_the_command(corpus: Path, tokenizer: Path) -> None:
    reading = [corpus, "--tokenizer", tokenizer]
    for verb, more in {
        "prepare": reading,
        "prepare-plan": reading,
        "prepare-unit": ["--index", "0/1"],
        "prepare-finish": [],
    }.items():
        done = electra(verb, "memory://out", *more)
        assert done.returncode == 2 and "memory://out would be gone" in done.stderr, verb
        assert done.stderr.count("\n") == 1 and not RemotePath("memory://out").exists()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield "s3://bucket"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_a_store_of_objects(corpus: Path, tokenizer: Path, tmp_path: Path, bucket: str) -> None:
    units = PrepareSettings(unit_bytes=20_000, heldout_share=0.1)
    prepare([corpus], tmp_path / "expected", tokenizer, units, workers=1)
    expected = contents(tmp_path / "expected")
    source, out = RemotePath(f"{bucket}/texts"), RemotePath(f"{bucket}/shards")
    for file in corpus.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    plan_units([source], out, tokenizer, units)
    run_share(out, 1, 2)
    with pytest.raises(DataError, match=r"units are not done: 0, 2"):
        finish_units(out)
    run_share(out, 0, 2)
    finish_units(out)
    assert contents(out) == expected
    done = electra(
        "prepare",
        tmp_path / "out",
        source,
        "--tokenizer",
        tokenizer,
        *["--unit-bytes", "20000", "--heldout", "0.1", "--workers", "1"],
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == expected
    with pytest.raises(DataError, match=r"s3://bucket/nothing does not exist or has no file to read"):
        prepare([RemotePath(f"{bucket}/nothing")], tmp_path / "none", tokenizer)


def test_addresses_that_cannot_be_opened_are_one_line(tokenizer: Path, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}/x.jsonl"
    for url, code in (("nonsense://x/y", 2), ("s3://", 5), (nobody, 5)):
        done = electra("prepare", tmp_path / "out", url, "--tokenizer", tokenizer)
        assert done.returncode == code and url in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_file_url_is_a_path() -> None:
    assert as_place("file:///tmp/x") == Path("/tmp/x") and as_place("s3://a/b") == RemotePath("s3://a/b")
    assert as_place("file://localhost/a%20b") == Path("/a b") == as_place("FILE:///a b")
    assert as_place("local:///a%20b") == Path("/a%20b") == as_place("/a%20b")
    assert as_place("file://localhostile/x") == Path("localhostile/x")
    assert as_place("a/b") == Path("a/b") and as_place(Path("c")) == Path("c")
