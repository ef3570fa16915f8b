"""
One load process: `python -m tandem_bench.load.worker`.

The process reads one JSON line (a Task) from stdin, connects, warms up, prints "ready", waits for a
line, sends its requests, and prints its outcomes as one JSON line.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import grpc

from tandem.errors import TandemError
from tandem.inference.v1 import inference_service_pb2_grpc as inference_grpc
from tandem.status import from_rpc_error
from tandem_bench.load.workload import Workload
from tandem_client.channel import Access, ChannelOptions
from tandem_client.many.shared_tasks import SharedStream
from tandem_client.request import build_request

WARM_UP_TOKENS = 8
CUT_AFTER_S = 5.0
"""Seconds that running requests may still take after the time in which new ones are started."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """
    Share of one process: requests `first`, `first + step` and so on, `concurrency` at a time, as
    calls of their own or, `as_batch`, as items of one GenerateBatch call.

    `access` holds the certificates and the API key of the connection. The key travels over standard
    input, since arguments of a process can be read by other users of the machine.
    """

    address: str
    workload: Workload
    first: int
    step: int
    concurrency: int
    num_warm_up: int
    max_time_s: float
    as_batch: bool = False
    access: Access = dataclasses.field(default_factory=Access)

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Decode the result of `to_json`."""
        content = json.loads(text)
        workload = content.pop("workload")
        return cls(workload=Workload(**workload | {"lines": tuple(workload["lines"])}), **content)

    def to_json(self) -> str:
        """Encode as one line."""
        return json.dumps(dataclasses.asdict(self))


def sent_access(channel: ChannelOptions) -> Access:
    """Return the certificates and the API key of a connection as JSON can hold them."""
    values = {name: getattr(channel, name) for name in Access.__optional_keys__}
    return cast("Access", {name: str(value) for name, value in values.items() if value is not None})


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcomes:
    """
    Measurements of one process. Times are CLOCK_MONOTONIC seconds, durations milliseconds.

    An entry of `itl_ms` is the time between two messages with tokens, spread evenly over the tokens
    of the later one. A request cut off at the end of the time counts only in `num_cut`, but its
    tokens count in `num_tokens`.
    """

    first_start_s: float = float("inf")
    last_token_s: float = 0.0
    num_tokens: int = 0
    num_done: int = 0
    num_cut: int = 0
    errors: dict[str, int] = dataclasses.field(default_factory=dict)
    ttft_ms: list[float] = dataclasses.field(default_factory=list)
    itl_ms: list[float] = dataclasses.field(default_factory=list)
    e2e_ms: list[float] = dataclasses.field(default_factory=list)


class Load:
    """Sender of the requests of one task; owns its connection and its outcomes."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._options = ChannelOptions(**task.access)
        self._channel = self._options.open_async(task.address)
        self._stub: Any = inference_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._shared = SharedStream(self._open_batch, self._start_call) if task.as_batch else None
        self.outcomes = Outcomes()

    async def warm_up(self) -> None:
        """
        Send a few short requests that are not measured.

        Raises:
            TandemError: One of them failed, so all requests would fail.
        """
        await asyncio.gather(*(self._warm_up_one(i) for i in range(self._task.num_warm_up)))

    async def run(self) -> None:
        """Send all requests, or as many as the time allows."""
        try:
            await self._run()
        finally:
            if self._shared is not None:
                await self._shared.close()
            await self._channel.close(None)

    async def _run(self) -> None:
        task = self._task
        numbers = iter(range(task.first, task.workload.num_requests, task.step))
        stop_s = time.monotonic() + task.max_time_s
        users = [asyncio.create_task(self._user(numbers, stop_s)) for _ in range(task.concurrency)]
        _, unfinished = await asyncio.wait(users, timeout=task.max_time_s + CUT_AFTER_S)
        for user in unfinished:
            user.cancel()
        results = await asyncio.gather(*users, return_exceptions=True)
        for result in results:
            if isinstance(result, asyncio.CancelledError):
                self.outcomes.num_cut += 1
            elif isinstance(result, BaseException):
                raise result

    async def _warm_up_one(self, index: int) -> None:
        ask = self._task.workload.ask(index)
        ask.options["max_tokens"] = WARM_UP_TOKENS
        try:
            async for _ in self._generate(build_request(ask.prompt, ask.options)):
                pass
        except grpc.RpcError as failure:
            raise from_rpc_error(failure) from None

    def _generate(self, request: Any) -> Any:
        start = self._start_call if self._shared is None else self._shared.start
        return start(request, None)

    def _start_call(self, request: Any, timeout_s: float | None) -> Any:
        return self._stub.Generate(
            request, timeout=timeout_s, metadata=self._options.call_metadata()
        )

    def _open_batch(self, requests: AsyncIterator[Any]) -> Any:
        return self._stub.GenerateBatch(requests, metadata=self._options.call_metadata())

    async def _user(self, numbers: Iterator[int], stop_s: float) -> None:
        for number in numbers:
            if time.monotonic() >= stop_s:
                return
            ask = self._task.workload.ask(number)
            request = build_request(ask.prompt, ask.options)
            try:
                await self._one(request)
            except grpc.RpcError as failure:
                reason = from_rpc_error(failure).reason
                self.outcomes.errors[reason] = self.outcomes.errors.get(reason, 0) + 1

    async def _one(self, request: Any) -> None:
        outcomes = self.outcomes
        start_s = time.monotonic()
        outcomes.first_start_s = min(outcomes.first_start_s, start_s)
        previous_s = None
        gaps_ms: list[float] = []
        ttft_ms = None
        async for response in self._generate(request):
            if not response.HasField("delta") or not response.delta.token_ids:
                continue
            now = time.monotonic()
            num_tokens = len(response.delta.token_ids)
            outcomes.num_tokens += num_tokens
            outcomes.last_token_s = now
            if previous_s is None:
                ttft_ms = (now - start_s) * 1000
            else:
                gaps_ms += [round((now - previous_s) * 1000 / num_tokens, 3)] * num_tokens
            previous_s = now
        outcomes.num_done += 1
        outcomes.e2e_ms.append((time.monotonic() - start_s) * 1000)
        outcomes.itl_ms += gaps_ms
        if ttft_ms is not None:
            outcomes.ttft_ms.append(ttft_ms)


async def _main() -> None:
    load = Load(Task.from_json(sys.stdin.readline()))
    await load.warm_up()
    print("ready", flush=True)  # noqa: T201  # the protocol with the parent
    await asyncio.to_thread(sys.stdin.readline)
    await load.run()
    print(json.dumps(dataclasses.asdict(load.outcomes)), flush=True)  # noqa: T201  # see above


def main() -> None:
    """Run one task; report a failure as one line on stderr."""
    try:
        asyncio.run(_main())
    except TandemError as error:
        sys.exit(f"{error.reason}: {error.message}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
