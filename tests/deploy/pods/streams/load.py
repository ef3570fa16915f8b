"""Streams that run all the time while something happens to the pods, and what became of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.deploy.pods.streams.callers import Access, Caller, HttpCaller, PythonCaller, Received
from tests.deploy.pods.streams.programs import ProgramCaller, Programs
from tests.deploy.pods.streams.prompts import REQUESTS, TOKENS, Request

PYTHON = "python"
HTTP = "OpenAI over HTTP"
ASK_AGAIN_S = 0.5
"""Seconds after which a client asks again that found no scheduler, or whose stream failed."""

Outputs = Mapping[Request, Sequence[int]]
"""Tokens of each request when nothing disturbs it."""


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
    A number of threads that each read one stream after another, and take turns among clients.

    Attributes:
        outcomes: What became of the streams so far, by client.
    """

    def __init__(
        self,
        access: Access,
        programs: Programs,
        outputs: Outputs,
        num_streams: int,
        *,
        resumes: bool = False,
    ) -> None:
        """
        Args:
            access: Addresses and credentials.
            programs: Programs of clients in other languages.
            outputs: What each request has to bring.
            num_streams: Number of threads.
            resumes: True for clients that resume their streams, as by default, and ask again where
                no scheduler is; False for such that do neither, so that each stream must run to its
                end by itself. The gateway resumes always.
        """
        clients = client_names(programs)
        self.outcomes = {name: Outcome() for name in clients}
        self._outputs = outputs
        self._resumes = resumes
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._clocks: list[_Clock | None] = [None] * num_streams
        self._names = [clients[number % len(clients)] for number in range(num_streams)]
        self._callers = [
            _caller(name, number // len(clients), access, programs, resumes)
            for number, name in enumerate(self._names)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(num_streams)
        ]

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    def note_running(self) -> None:
        """Count the streams that have received some of their tokens now."""
        for name, clock in zip(self._names, self._clocks, strict=True):
            self.outcomes[name].running += bool(clock and clock.num_heard)

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
        outcome = self.outcomes[self._names[number]]
        with self._lock:
            outcome.longest_pause_s = max(outcome.longest_pause_s, clock.longest_pause_s)
        return received

    def _count(self, number: int, request: Request, received: Received) -> bool:
        """Count a stream, and return whether it finished."""
        error = received.error or difference(self._outputs[request], received.token_ids)
        name = self._names[number]
        with self._lock:
            if not error:
                self.outcomes[name].finished += 1
                return True
            error = f"after {len(received.token_ids)} tokens: {error}"
            failure = Failure(
                client=name, number=number, request_id=received.request_id, error=error
            )
            self.outcomes[name].failures.append(failure)
            return False


def client_names(programs: Programs) -> tuple[str, ...]:
    """Return the names of all clients, which are columns of the table."""
    return (PYTHON, *programs.players, HTTP)


def undisturbed(access: Access) -> Outputs:
    """
    Return the tokens of each request, which nothing disturbs.

    Raises:
        ValueError: A stream failed.
    """
    outputs = {}
    caller = PythonCaller(access, resumes=False)
    for request in REQUESTS:
        received = caller.stream(request, lambda: None)
        if received.error or len(received.token_ids) != TOKENS:
            raise ValueError(f"a stream that nothing disturbs failed: {received}")
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


def _caller(name: str, turn: int, access: Access, programs: Programs, resumes: bool) -> Caller:
    if name == PYTHON:
        return PythonCaller(access, resumes=resumes)
    if name == HTTP:
        return HttpCaller(access, access.gateways[turn % len(access.gateways)])
    return ProgramCaller(programs.players[name], access, resumes=resumes)
