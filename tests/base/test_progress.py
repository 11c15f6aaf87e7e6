import subprocess
import sys

import pytest

from electra.base import progress as progress_module
from electra.base.progress import Progress, metrics_text, show_live_bars


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", "electra")
    return caplog


def test_without_a_live_bar_every_report_of_steps_is_a_line(logged: pytest.LogCaptureFixture) -> None:
    with Progress("step", 10, 2) as progress:
        progress.advance(3)
        progress.report("loss 1.000", 61)
        progress.advance(4)
        progress.report("loss 0.500", float("nan"))
    assert logged.messages == ["step 3/10 loss 1.000 ETA 0:01:01", "step 4/10 loss 0.500 ETA …"]


def test_lines_about_bytes_are_few_and_the_last_is_always_there_once(logged: pytest.LogCaptureFixture) -> None:
    with Progress("prepare", 200, 0, "bytes", seconds_between_lines=1000) as progress:
        for done in (50, 100, 200, 200):
            progress.advance(done)
            progress.report("1 MB/s", 0.4)
    assert logged.messages == ["prepare: 100% · 1 MB/s · 0 s left"]


def test_all_bytes_read_are_not_all_work_done(logged: pytest.LogCaptureFixture) -> None:
    with Progress("embed", 200, 0, "bytes") as progress:
        for text in ("1 text", "2 texts"):
            progress.advance(200)
            progress.report(text)
    assert logged.messages == ["embed: 99% · 1 text", "embed: 99% · 2 texts", "embed: 100% · 2 texts · 0 s left"]


def test_work_that_fails_is_never_said_to_be_finished(logged: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="broken"), Progress("embed", 200, 0, "bytes") as progress:
        progress.advance(200)
        progress.report("1 text")
        raise ValueError("broken")
    assert logged.messages == ["embed: 99% · 1 text"]


def test_a_live_bar_takes_the_place_of_lines(
    logged: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress_module, "_live_bars", False)
    show_live_bars(True)
    with Progress("step", 10) as progress:
        progress.advance(10)
        progress.report("loss 1.000", 0)
    shown = capsys.readouterr()
    assert "10/10" in shown.err and "loss 1.000" in shown.err
    assert not logged.messages and not shown.out


def test_only_the_metrics_that_exist_are_shown_in_the_order_asked_for() -> None:
    metrics = {"tokens_per_second": 12345.6, "rtd_loss": 0.25, "auc": float("nan"), "lr": 1.0}
    assert metrics_text(metrics, ("mlm_loss", "auc", "rtd_loss", "tokens_per_second")) == (
        "AUC - rtd 0.250 tok/s 12,346"
    )


def test_plain_lines_need_no_rich() -> None:
    code = (
        "import sys; from electra.base.progress import Progress\n"
        "with Progress('step', 1) as progress: progress.report('', 0)\n"
        "sys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
