"""Start the processes of a run on this machine, as torchrun does, by the same launcher."""

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from electra.base.errors import ElectraError, MachineError, PreemptedError, already_said, error_of
from electra.base.jobs import cpu_count
from electra.train.settings import TrainSettings


def launch(words: Sequence[str], settings: TrainSettings) -> None:
    """`electra words…` in `settings.processes` processes. Where one dies, all begin again, at most `settings.restarts` times.
    What they say is said by themselves; the error that this raises has the exit code of the first that failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in (
        "torch.distributed",
        "torch.distributed.elastic.agent.server.api",
    ):  # the second has a level of its own
        logging.getLogger(name).setLevel(logging.CRITICAL)  # our processes say it in one line
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_count() // settings.processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",  # the machine's own name may not be known anywhere
        max_restarts=settings.restarts,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "electra", *words)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode > 0:
            raise already_said(error_of(failure.exitcode)(f"process {rank} failed.")) from None
        raise MachineError(
            f"process {rank} of {settings.processes} was killed ({failure.signal_name()}; SIGKILL is mostly for lack of memory). "
            "Everything up to the newest checkpoint is saved: run the same command again."
        ) from None
    except SignalException as stopped:
        error: ElectraError = (
            PreemptedError("stopped.") if stopped.sigval.name != "SIGINT" else error_of(130)("stopped.")
        )
        raise already_said(error) from None
