"""What runs the measurements of a GPU one after another (bench/one_gpu.py): with a GPU that can be taken away, nothing may hang or be lost."""

import argparse
import sys
import tarfile
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench"
sys.path.append(str(BENCH))
import one_gpu  # noqa: E402


def test_a_stage_that_takes_too_long_is_stopped_with_all_its_processes(tmp_path):
    (tmp_path / "log").mkdir()
    children = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    record = one_gpu.perform(one_gpu.Stage("slow", 1, f'{sys.executable} -c "{children}"'), tmp_path, left=60)
    assert record["code"] == -15
    assert record["seconds"] < 20
    assert one_gpu.perform(one_gpu.Stage("quick", 1, f"{sys.executable} -c pass"), tmp_path, left=60)["code"] == 0
    assert "sleep" in (tmp_path / "log/slow.log").read_text()


def test_what_is_kept_can_be_put_together_again(tmp_path, monkeypatch):
    monkeypatch.setattr(one_gpu, "PIECE", 4096)
    weights = tmp_path / "out/models/speed/model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(range(256)) * 40)
    for name in ("stages.json", "tokenizer.json"):  # the latter is in every run and every fine-tuned folder
        (tmp_path / "out" / name).write_text("{}")
    keeper = one_gpu.Keeper(tmp_path / "out", tmp_path / "keep")
    keeper.copy()
    assert not list((tmp_path / "keep").glob("models*"))  # an export may be half written
    keeper.copy_models()
    pieces = sorted((tmp_path / "keep").glob("models.tar.*"), key=lambda path: int(path.suffix[1:]))
    assert len(pieces) > 2
    (tmp_path / "whole.tar").write_bytes(b"".join(path.read_bytes() for path in pieces))
    with tarfile.open(tmp_path / "whole.tar") as archive:
        assert archive.extractfile("models/speed/model.safetensors").read() == weights.read_bytes()
    with tarfile.open(tmp_path / "keep/small.tar.gz") as archive:
        assert archive.getnames() == ["stages.json"]


def test_names_with_spaces_stay_whole(tmp_path):
    folder = tmp_path / "my data"
    given = argparse.Namespace(
        data=folder, glue=folder, out=folder, recipe="modern-small", tasks="cola", seed=1, seeds=5, jobs=2, minutes=10
    )
    for stage in one_gpu.stages(given):
        assert "data" not in one_gpu.shlex.split(stage.command), stage.name
