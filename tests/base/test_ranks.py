"""What processes say that do not meet. Faults of those that have met: tests/faults/test_processes.py."""

import socket

import pytest

from together import Together


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_nobody_knows_is_one_line_with_the_reason_in_every_process(
    rank, recipe, prepared, tmp_path, monkeypatch
):
    """Also in process 0, whose store would say it in pages."""

    def unknown(*_):  # by a name server that answers at once
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    words = ["pretrain", recipe, f"data={prepared}", f"run={tmp_path / 'run'}", "train.timeout=1"]
    variables = {"MASTER_ADDR": "nobody.invalid"}
    process = Together(2, tmp_path / "said", *words, missing=[1 - rank], variables=variables)
    assert process.codes(60) == [5]
    (line,) = process.lines()
    assert "nobody.invalid" in line and "within 1 s (train.timeout): Name or service not known." in line
    assert "frame #" not in process.said(rank) and not (tmp_path / "run").exists()
