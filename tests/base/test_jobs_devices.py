"""Jobs spread over the GPUs of a machine: each worker sees one."""

import os
import time
from collections import Counter
from unittest import mock

import torch

from electra.base.jobs import run_jobs
from electra.train.device import gpu_names


def seen(number: int) -> tuple[int, str]:
    time.sleep(0.2)  # or the first worker has done it all before the second is there
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "all")


def test_every_worker_sees_one_gpu_in_turn_and_the_parent_what_it_saw_before(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    answers = set(run_jobs(seen, [(number,) for number in range(12)], 2, devices=["4", "7"]))
    assert Counter(device for _, device in answers) == {"4": 1, "7": 1}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_gpus_have_the_names_that_the_environment_gives_them(monkeypatch):
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: 2),
    ):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert gpu_names() == ["0", "1"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
        assert gpu_names() == ["GPU-a", "GPU-b"]
        assert gpu_names("cpu") == []
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: 1),
    ):
        assert gpu_names() == []
