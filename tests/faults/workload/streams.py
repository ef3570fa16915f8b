"""Clients: 64 workers that each send their request again and again, and note all they see."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import TandemError
from tandem_client import AsyncClient, Delta, Done, Finished, RetryPolicy, Started
from tests.faults.workload.load import Output, StormRequest

GAP_S = 0.2
"""Shortest silence of a stream, in seconds, that is noted."""
_NUM_CLIENTS = 4
_AFTER_FAILURE_S = 0.3


@dataclass(slots=True, eq=False)
class Run:
    """
    One request from its start to its end.

    Attributes:
        request: The request.
        outputs: Outputs by choice.
        problems: Offsets that were wrong, output after an end.
        error: Error that ended it.
        prompt_tokens: Length of the prompt; 0 before Started.
        num_tokens: Output tokens as the server counted them; None before Done.
    """

    request: StormRequest
    outputs: dict[int, Output] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    error: TandemError | None = None
    prompt_tokens: int = 0
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """A silence of one worker's stream, monotonic seconds."""

    worker: int
    begin_s: float
    end_s: float


class Streams:
    """
    The load of a storm, in a thread and event loop of its own.

    Attributes:
        runs: Every request that ended.
        gaps: Every silence longer than `GAP_S`.
    """

    def __init__(self, address: str, requests: Sequence[StormRequest], retry: RetryPolicy) -> None:
        self.runs: list[Run] = []
        self.gaps: list[Gap] = []
        self._requests = requests
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._clients = [AsyncClient(address, retry=retry) for _ in range(_NUM_CLIENTS)]
        self._last_s = [time.monotonic()] * len(requests)
        self._current: list[Run | None] = [None] * len(requests)
        self._is_stopping = False
        self._workers: list[Future[None]] = []
        self._thread.start()

    def begin(self, *, once: bool = False) -> None:
        """Let every worker begin; with `once` each sends its request a single time."""
        self._last_s = [time.monotonic()] * len(self._requests)
        self._is_stopping = once
        self._workers = [self._run(self._work(index)) for index in range(len(self._requests))]

    def end(self, limit_s: float = 300.0) -> None:
        """Let every worker finish its request; raise the error of a worker that broke."""
        self._is_stopping = True
        for worker in self._workers:
            worker.result(limit_s)
        self._workers = []

    def ask(self, request: StormRequest) -> Future[Run]:
        """Send one more request beside the load."""
        return self._run(self._ask(request, None))

    def flows_since(self, moment_s: float) -> bool:
        """Return if every worker got a token after that moment."""
        return min(self._last_s) > moment_s

    def num_silent_since(self, moment_s: float) -> int:
        """Return the number of workers that got no token after that moment."""
        return sum(last_s <= moment_s for last_s in self._last_s)

    def num_held_tokens(self) -> int:
        """
        Return the prompt and output tokens of all requests in progress, which a new server computes
        again.
        """
        return sum(
            run.prompt_tokens + sum(len(output.token_ids) for output in run.outputs.values())
            for run in self._current
            if run is not None
        )

    def close(self) -> None:
        """End all streams at once."""

        async def end() -> None:
            for client in self._clients:
                await client.close()

        self._is_stopping = True
        for worker in self._workers:
            worker.cancel()
        self._run(end()).result(300)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self, what: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    async def _work(self, worker: int) -> None:
        while True:
            run = await self._ask(self._requests[worker], worker)
            self.runs.append(run)
            if self._is_stopping:
                return
            if run.error is not None:
                await asyncio.sleep(_AFTER_FAILURE_S)

    async def _ask(self, request: StormRequest, worker: int | None) -> Run:
        run = Run(request)
        if worker is not None:
            self._current[worker] = run
        client = self._clients[(worker or 0) % _NUM_CLIENTS]
        try:
            async for event in client.generate(request.prompt or None, **request.options):
                if isinstance(event, Delta):
                    self._hear(worker)
                _note(run, event)
        except TandemError as error:
            run.error = error
        if worker is not None:
            self._current[worker] = None
        return run

    def _hear(self, worker: int | None) -> None:
        if worker is None:
            return
        now = time.monotonic()
        if now - self._last_s[worker] > GAP_S:
            self.gaps.append(Gap(worker, self._last_s[worker], now))
        self._last_s[worker] = now


def _note(run: Run, event: object) -> None:
    match event:
        case Started():
            run.prompt_tokens = event.prompt_tokens
        case Delta():
            output = run.outputs.setdefault(event.choice, Output())
            if event.first_token_offset != len(output.token_ids):
                run.problems.append(
                    f"choice {event.choice}: offset {event.first_token_offset} came after "
                    f"{len(output.token_ids)} tokens"
                )
            output.token_ids += event.token_ids
            output.text += event.text
            if output.reason is not None:
                run.problems.append(f"choice {event.choice}: output after its end")
        case Finished():
            output = run.outputs.setdefault(event.choice, Output())
            if output.reason is not None:
                run.problems.append(f"choice {event.choice} finished twice")
            output.reason = event.reason
            output.matched = event.matched
        case Done():
            run.num_tokens = event.usage.output_tokens
