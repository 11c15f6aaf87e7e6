import errno
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from electra.base.errors import CorruptError, MachineError, MemoryExhaustedError
from electra.base.files import lock
from electra.base.jobs import Signals
from electra.train import checkpoint, device
from electra.train.settings import memory_remedy


def save(root: Path, step: int, value: float = 1.0) -> Path:
    groups = {"model": {"w": torch.full((64, 64), value)}, "optimizer": {"w.exp_avg": torch.zeros(64, 64)}}
    return checkpoint.save_checkpoint(root, step, groups, {"seconds": 1.0})


def test_what_was_saved_is_restored(tmp_path):
    save(tmp_path, 7, value=3.5)
    live = {"model": {"w": torch.zeros(64, 64)}}
    found = checkpoint.newest_checkpoint(tmp_path)
    checkpoint.restore(found, live)
    assert found.step == 7 and (live["model"]["w"] == 3.5).all()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_never_loaded_and_the_one_before_is_used_loudly(tmp_path, name, harm, caplog):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    content = bytearray(file.read_bytes())
    match harm:
        case "flip":
            content[len(content) // 2] ^= 0x10
            file.write_bytes(content)
        case "truncate":
            file.write_bytes(content[:-3])
        case "remove":
            file.unlink()
    assert checkpoint.newest_checkpoint(tmp_path).step == 1
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "step-000000002" in warning and "damaged" in warning


def test_only_damaged_checkpoints_are_an_error_and_not_a_silent_start_from_zero(tmp_path):
    (save(tmp_path, 1) / "model.safetensors").write_bytes(b"")
    with pytest.raises(CorruptError, match="all 1 checkpoints") as error:
        checkpoint.newest_checkpoint(tmp_path)
    assert error.value.exit_code == 4


def test_pruning_keeps_the_newest_and_the_permanent_ones(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, keep=2, permanent_every=3)
    assert [folder.name[-1] for folder in checkpoint.checkpoint_folders(tmp_path)] == ["3", "6", "7"]


def test_damaged_checkpoints_are_set_aside_and_do_not_push_good_ones_out(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    for step in (20, 30):
        (tmp_path / f"step-{step:09d}" / "model.safetensors").write_bytes(b"")
    found = checkpoint.newest_checkpoint(tmp_path)
    checkpoint.set_aside(tmp_path, found.step)
    save(tmp_path, 15)
    checkpoint.prune(tmp_path, keep=2, permanent_every=0)
    assert [folder.name for folder in checkpoint.checkpoint_folders(tmp_path)] == ["step-000000010", "step-000000015"]
    assert len(list(tmp_path.glob("damaged-*"))) == 2


def test_left_overs_of_killed_processes_are_cleaned(tmp_path):
    for name in (".tmp-3-99", ".del-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    save(tmp_path, 1)
    checkpoint.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="disk is full") as error:
        save(tmp_path, 2)
    monkeypatch.undo()
    assert error.value.exit_code == 5
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
    assert checkpoint.newest_checkpoint(tmp_path).step == 1


def test_too_little_space_is_said_before_training(tmp_path):
    with pytest.raises(MachineError, match="too little space"):
        device.check_space(tmp_path, 10**18)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_first_signal_is_remembered_and_a_second_ends_the_process_at_once(number, code, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    before = signal.getsignal(number)
    with Signals() as signals:
        os.kill(os.getpid(), number)
        assert signals.received == number and not ended
        os.kill(os.getpid(), number)
        assert ended == [code]
    assert signal.getsignal(number) is before


def test_training_may_run_in_a_thread_where_nobody_can_listen_for_signals():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: Signals().__enter__().received).result() is None


def test_out_of_memory_becomes_one_line_with_a_way_out():
    with pytest.raises(MemoryExhaustedError, match="do this") as error, device.explain_machine("do this", ""):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    assert error.value.exit_code == 7
    with pytest.raises(MemoryExhaustedError), device.explain_machine("do this", ""):
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("batch", "accumulate", "remedy"),
    [(12, 1, "train.accumulate=2"), (9, 1, "train.accumulate=3"), (4, 4, "single row")],
)
def test_the_way_out_of_memory_trouble_divides_the_batch(batch, accumulate, remedy):
    assert remedy in memory_remedy(batch, accumulate)


def test_a_checkpoint_of_another_network_is_refused_by_name(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CorruptError, match="another network"):
        checkpoint.restore(checkpoint.newest_checkpoint(tmp_path), {"model": {"w": torch.zeros(2, 2)}})


def test_a_stale_lock_file_does_not_block(tmp_path):
    (tmp_path / ".lock").write_text("99999")
    with lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())
