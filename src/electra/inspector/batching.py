"""Batches the requests of many clients: one thread computes, and waiting requests for the same question are answered together.
The models batch texts of similar length. The queue is bounded: a request that finds it full is told when to try again."""

import asyncio
import math
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[Sequence[Any]], Sequence[Any]]
"""Answers all items of a group, one answer each."""
MOST_WAITING, QUEUED_CHARACTERS = 256, 1 << 23  # requests, and the characters of all of them
GROUP_ITEMS, GROUP_CHARACTERS = 128, 1 << 18
LONGEST_RETRY = 60
LINGER, LINGER_SHARE = 0.05, 0.05
"""A small group waits for more at most this many seconds, and at most this fraction of the time that the last group took."""


class BusyError(Exception):
    """The queue is full; worth another attempt after `seconds`."""

    def __init__(self, seconds: int):
        super().__init__(f"too many requests are waiting. Try again in {seconds} s.")
        self.seconds = seconds


@dataclass
class Waiting:
    """A waiting request. Requests with the same `key` ask the same model the same question, and may be answered by one call."""

    key: Hashable
    items: Sequence[Any]
    characters: int
    answer: Answer
    future: "asyncio.Future[Sequence[Any]]"


@dataclass
class Served:
    """Counters for /metrics."""

    groups: int = 0
    requests: int = 0
    items: int = 0
    refused: int = 0
    seconds: float = 0.0


@dataclass
class Batcher:
    counts: Served = field(default_factory=Served)
    waiting: list[Waiting] = field(default_factory=list)
    last_groups: tuple[int, int] = (0, 0)
    last_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.wake = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, "electra-model")
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        if self.task:
            self.task.cancel()
            with suppress(asyncio.CancelledError):
                await self.task
        for it in self.waiting:
            it.future.cancel()
        self.thread.shutdown(wait=False, cancel_futures=True)

    async def ask(self, key: Hashable, items: Sequence[Any], characters: int, answer: Answer) -> Sequence[Any]:
        """Returns the answers to `items`, in order. The request of a client that disconnects leaves the queue."""
        queued = sum(it.characters for it in self.waiting)
        if len(self.waiting) >= MOST_WAITING or queued + characters > QUEUED_CHARACTERS:
            self.counts.refused += 1
            raise BusyError(self.seconds_to_wait())
        own = Waiting(key, items, characters, answer, asyncio.get_running_loop().create_future())
        self.waiting.append(own)
        self.wake.set()
        try:
            return await own.future
        finally:
            with suppress(ValueError):
                self.waiting.remove(own)

    def seconds_to_wait(self) -> int:
        per_request = self.counts.seconds / max(1, self.counts.requests)
        return min(LONGEST_RETRY, max(1, math.ceil(per_request * len(self.waiting))))

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self.waiting:
                self.wake.clear()
                await self.wake.wait()
            await self.linger()
            group = self.take()
            if not group:
                continue
            began = time.monotonic()
            answers = await loop.run_in_executor(self.thread, answer_group, group)
            self.last_seconds = time.monotonic() - began
            self.counts.seconds += self.last_seconds
            self.counts.groups += 1
            self.counts.requests += len(group)
            self.counts.items += (count := sum(len(it.items) for it in group))
            self.last_groups = self.last_groups[1], count
            for it, result in zip(group, answers, strict=True):
                if it.future.done():  # its client has disconnected
                    continue
                it.future.set_exception(result) if isinstance(result, Exception) else it.future.set_result(result)

    async def linger(self) -> None:
        """Waits a moment for more requests. Clients that were answered together come back one after the other: the first would be
        computed alone while the others wait. With half of them here, the next group gathers while this one is computed."""
        end = time.monotonic() + min(LINGER, LINGER_SHARE * self.last_seconds)
        while sum(len(it.items) for it in self.waiting) < max(self.last_groups) // 2 and time.monotonic() < end:
            await asyncio.sleep(0.001)

    def take(self) -> list[Waiting]:
        """Removes the oldest request and others with the same key from the queue, as many as fit into a group."""
        group, items, characters = list[Waiting](), 0, 0
        for it in [it for it in self.waiting if it.key == self.waiting[0].key]:
            items, characters = items + len(it.items), characters + it.characters
            if group and (items > GROUP_ITEMS or characters > GROUP_CHARACTERS):
                break
            group.append(it)
            self.waiting.remove(it)
        return group


def answer_group(group: Sequence[Waiting]) -> list[Sequence[Any] | Exception]:
    """Answers all requests at once; if that fails, each by itself, so that one bad request does not fail the others."""
    if len(group) > 1:
        with suppress(Exception):
            answers, place, parts = group[0].answer([item for it in group for item in it.items]), 0, []
            for it in group:
                parts.append(answers[place : place + len(it.items)])
                place += len(it.items)
            return list(parts)
    return [answer_one(it) for it in group]


def characters_of(content: object) -> int:
    """The number of characters of all text in it."""
    match content:
        case str():
            return len(content)
        case dict():
            return sum(map(characters_of, content.values()))
        case list():
            return sum(map(characters_of, content))
    return 0


def answer_one(waiting: Waiting) -> Sequence[Any] | Exception:
    try:
        return waiting.answer(waiting.items)
    except Exception as error:  # of any kind: the thread must go on to answer others
        return error
