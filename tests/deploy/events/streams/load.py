"""Streams that run all the time while something happens to the pods, and what became of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.deploy.events.streams.callers import Access, Caller, PythonCaller, Received
from tests.deploy.events.streams.prompts import REQUESTS, TOKENS, Request
from tests.waiting import wait_until

RUNNING_LIMIT_S = 90.0
"""Longest time until all streams have tokens at the same time."""
ASK_AGAIN_S = 0.5
"""Seconds after which a client asks again that found no scheduler, or whose stream failed."""

Outputs = Mapping[Request, Sequence[int]]
"""Tokens of each request when nothing disturbs it."""


class UndisturbedFailed(Exception):
    """A stream that failed although nothing disturbed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """
    A stream that failed.

    Attributes:
        client: Name of its client.
        number: Number of the stream among those of the load.
        request_id: Id in the logs of the services; None = it was not accepted.
        error: Error in words.
    """

    client: str
    number: int
    request_id: str | None
    error: str

    def __str__(self) -> str:
        return f"{self.client}, stream {self.number} ({self.request_id}): {self.error}"


@dataclass(slots=True)
class Outcome:
    """
    The streams of one client.

    Attributes:
        running: Number of streams that had some of their tokens when the event began.
        finished: Number of streams whose tokens are those of an undisturbed stream.
        failures: All other streams.
        longest_pause_s: Longest time between two messages of one stream.
    """

    running: int = 0
    finished: int = 0
    failures: list[Failure] = field(default_factory=list)
    longest_pause_s: float = 0.0


class _Clock:
    """Times of the messages of one stream."""

    def __init__(self) -> None:
        self.longest_pause_s = 0.0
        self.num_heard = 0
        self._last_s = 0.0

    def hear(self) -> None:
        now_s = time.monotonic()
        if self.num_heard:
            self.longest_pause_s = max(self.longest_pause_s, now_s - self._last_s)
        self.num_heard += 1
        self._last_s = now_s


class Load:
    """
    A number of threads that each read one stream after another, each by a caller of its own.

    Attributes:
        outcomes: What became of the streams so far, by client.
    """

    def __init__(
        self, callers: Sequence[Caller], outputs: Outputs, *, resumes: bool = False
    ) -> None:
        """
        Args:
            callers: One caller for each thread, which `end` closes.
            outputs: What each request has to bring.
            resumes: True to ask again where no scheduler accepts a request; else that has failed.
        """
        self.outcomes = {caller.name: Outcome() for caller in callers}
        self._outputs = outputs
        self._resumes = resumes
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._clocks: list[_Clock | None] = [None] * len(callers)
        self._callers = callers
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(len(callers))
        ]

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    def wait_until_running(self) -> None:
        """
        Wait until the streams of all threads have some of their tokens.

        Raises:
            TooLate: They do not have within `RUNNING_LIMIT_S`.
        """
        wait_until(self._are_running, "all streams have tokens", RUNNING_LIMIT_S)

    def _are_running(self) -> bool:
        """Count the streams that have some of their tokens now, and return whether all have."""
        running = [bool(clock and clock.num_heard) for clock in self._clocks]
        for outcome in self.outcomes.values():
            outcome.running = 0
        for caller, is_running in zip(self._callers, running, strict=True):
            self.outcomes[caller.name].running += is_running
        return all(running)

    def end(self) -> dict[str, Outcome]:
        """Let the streams that run end, and return what became of all."""
        self.stop()
        for thread in self._threads:
            thread.join()
        for caller in self._callers:
            caller.close()
        return self.outcomes

    def stop(self) -> None:
        """Begin no other stream."""
        self._stopping.set()

    def _run(self, number: int) -> None:
        """Read streams; an error that no caller expects ends the thread, and counts as a failure."""
        try:
            self._read_streams(number)
        except Exception as error:  # noqa: BLE001  # without it the thread would end unnoticed
            self._add_failure(number, None, f"{type(error).__name__}: {error}")

    def _read_streams(self, number: int) -> None:
        turn = 0
        while not self._stopping.is_set():
            request = REQUESTS[(number + turn) % len(REQUESTS)]
            received = self._one_stream(number, request)
            if received.may_ask_again and self._resumes:
                self._stopping.wait(ASK_AGAIN_S)
                continue
            turn += 1
            if not self._count(number, request, received):
                self._stopping.wait(ASK_AGAIN_S)

    def _one_stream(self, number: int, request: Request) -> Received:
        clock = _Clock()
        self._clocks[number] = clock
        received = self._callers[number].stream(request, clock.hear)
        self._clocks[number] = None
        outcome = self.outcomes[self._callers[number].name]
        with self._lock:
            outcome.longest_pause_s = max(outcome.longest_pause_s, clock.longest_pause_s)
        return received

    def _count(self, number: int, request: Request, received: Received) -> bool:
        """Count a stream, and return whether it finished."""
        error = received.error or difference(self._outputs[request], received.token_ids)
        if error:
            error = f"after {len(received.token_ids)} tokens: {error}"
            self._add_failure(number, received.request_id, error)
            return False
        with self._lock:
            self.outcomes[self._callers[number].name].finished += 1
        return True

    def _add_failure(self, number: int, request_id: str | None, error: str) -> None:
        name = self._callers[number].name
        failure = Failure(client=name, number=number, request_id=request_id, error=error)
        with self._lock:
            self.outcomes[name].failures.append(failure)


def undisturbed(access: Access) -> Outputs:
    """
    Return the tokens of each request, which nothing disturbs.

    Raises:
        UndisturbedFailed: A stream failed.
    """
    outputs = {}
    caller = PythonCaller(access, resumes=False)
    for request in REQUESTS:
        received = caller.stream(request, lambda: None)
        if received.error or len(received.token_ids) != TOKENS:
            raise UndisturbedFailed(f"a stream that nothing disturbs failed: {received}")
        outputs[request] = received.token_ids
    caller.close()
    return outputs


def difference(expected: Sequence[int], token_ids: Sequence[int]) -> str:
    """Say where tokens differ from those of an undisturbed stream; empty if nowhere."""
    if list(expected) == list(token_ids):
        return ""
    pairs = enumerate(zip(expected, token_ids, strict=False))
    at = next(
        (at for at, (one, other) in pairs if one != other), min(len(expected), len(token_ids))
    )
    return f"token {at} of {len(expected)} is not that of an undisturbed stream"
