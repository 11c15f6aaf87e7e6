"""Signals that ask a process to stop at the next safe point."""

import os
import signal
import threading
from types import FrameType

from electra.base.errors import ElectraError, InterruptedRunError, PreemptedError


class Signals:
    """SIGTERM and SIGINT ask for a stop at the next safe point; a second one ends the process at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():  # python lets no other thread listen
            self.previous = {}
            return self
        self.previous = {
            number: signal.signal(number, self.handle) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def handle(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            os._exit(130 if number == signal.SIGINT else 143)
        self.received = number

    def stop(self, message: str) -> ElectraError:
        return PreemptedError(message) if self.received == signal.SIGTERM else InterruptedRunError(message)
