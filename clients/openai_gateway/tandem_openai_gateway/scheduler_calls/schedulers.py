"""Connections to the schedulers: which of them is ready, and which gets the next call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import TandemError
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import inference_service_pb2_grpc as inference_grpc
from tandem.inference.v1 import model_pb2, tokens_pb2
from tandem.status import from_rpc_error
from tandem_client.channel import ChannelOptions
from tandem_openai_gateway.scheduler_calls.batch_call import BatchCalls, Metadata
from tandem_openai_gateway.scheduler_calls.watched_call import WatchedCall, WatchedCalls
from tandem_openai_gateway.upstream import (
    LoopCalls,
    Model,
    PromptTokens,
    RetryPolicy,
    is_transient,
    model_from_proto,
    tokens_from_proto,
)

READY, PROGRESS = "tandem.ready", "tandem.progress"
"""
Names whose health a scheduler reports: SERVING while it serves requests, and while its core answers
and no step is late.
"""
WATCH_AGAIN_S = 0.5
MODEL_LIMIT_S = 10.0
STALL_S = 2.0
"""
Seconds without a message after which a stream leaves a scheduler that serves no requests, if
another one does. A stalled scheduler keeps its connections, so that no stream would break there.
"""
KEEPALIVE_S = 10.0
"""Seconds between pings of a silent scheduler, and to wait for their answers."""

Answer = TypeVar("Answer")

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class TryAllAtOnce(RetryPolicy):
    """
    Policy that tries all schedulers without a wait. When all have refused a call, it is left to the
    HTTP client to come again; a stream that broke is tried again after waits, as ever.
    """

    def delay_s(self, error: TandemError, num_failures: int, jitter: float) -> float | None:
        """Return 0 while a scheduler is left to be tried, else None; arguments as in the base."""
        del jitter
        return 0.0 if num_failures < self.max_attempts and is_transient(error) else None

    def resume_delay_s(
        self, error: TandemError, num_failures: int, broken_s: float, jitter: float
    ) -> float | None:
        """Return 0 while a scheduler is left to be tried, else as the base."""
        delay = super().resume_delay_s(error, num_failures, broken_s, jitter)
        return 0.0 if delay is not None and num_failures < self.max_attempts else delay


class Scheduler:
    """
    Connection to one scheduler.

    Attributes:
        address: Its address.
        stub: Its methods.
        is_ready: True while it says that it serves requests.
        is_stuck: True while it says that requests make no progress.
        streams: Calls of streams that run there.
    """

    def __init__(
        self, address: str, options: ChannelOptions, *, joins: bool, is_ready: bool = False
    ) -> None:
        """
        Args:
            address: Its address.
            options: Encryption and limits of the connection.
            joins: True: output that a slow HTTP client has not taken is joined.
            is_ready: What is known of it.
        """
        self.address = address
        self.is_ready = is_ready
        self.is_stuck = False
        self.streams = WatchedCalls()
        self._channel = options.open_async(address)
        self.stub: Any = inference_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._batches = BatchCalls(self.stub, joins=joins)
        self._watching = [
            asyncio.create_task(self._watch(name, hear), name=f"watch {address} {name}")
            for name, hear in ((READY, self._hear_ready), (PROGRESS, self._hear_progress))
        ]

    @property
    def serves(self) -> bool:
        """True while requests are served and make progress."""
        return self.is_ready and not self.is_stuck

    def generate(self, request: inference.GenerateRequest, metadata: Metadata) -> WatchedCall:
        """Start a request; return its call."""
        return self.streams.watch(self._batches.generate(request, metadata))

    def stop_watching(self) -> None:
        """Leave `is_ready` and `is_stuck` as they are from now on."""
        for task in self._watching:
            task.cancel()

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self.stop_watching()
        await self._batches.close()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._channel.close(None)

    async def _watch(self, name: str, hear: Callable[[int | None, str], None]) -> None:
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=name)
        while True:
            try:
                async for answer in health.Watch(request):
                    hear(answer.status, "")
            except grpc.RpcError as failure:
                hear(None, from_rpc_error(failure).message)
            await asyncio.sleep(WATCH_AGAIN_S)

    def _hear_progress(self, status: int | None, _why: str) -> None:
        is_stuck = status == health_pb2.HealthCheckResponse.NOT_SERVING
        if is_stuck != self.is_stuck:
            self.is_stuck = is_stuck
            _log.info("scheduler_stuck" if is_stuck else "scheduler_goes_on", at=self.address)

    def _hear_ready(self, status: int | None, why: str) -> None:
        ready = status == health_pb2.HealthCheckResponse.SERVING
        if ready == self.is_ready:
            return
        self.is_ready = ready
        if ready:
            self._batches.try_again()
        _log.info("scheduler_ready" if ready else "scheduler_unready", at=self.address, why=why)


class Schedulers:
    """
    All schedulers, which take turns. It is made in the event loop that uses it, and owns the
    connections.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        options: Callable[[], ChannelOptions] = ChannelOptions,
        *,
        joins_output: bool = True,
        on_resume: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            addresses: Addresses of the schedulers, at least one.
            options: Tells encryption and limits of the connections; once they are others than
                before, new calls go over new connections, and running ones end where they are.
            joins_output: True: output that waits for its HTTP client becomes one delta.
            on_resume: Called whenever a broken stream is about to be resumed.
        """
        self._newest_options = options
        self._joins = joins_output
        self._options = options()
        self._all = [self._connected(address) for address in addresses]
        self._replaced: list[tuple[Scheduler, float]] = []
        """Connections that new calls do not use, and when they may be closed at the earliest."""

        def on_break(error: TandemError, wait_s: float) -> None:
            _log.info(
                "stream_broke", reason=error.reason, why=error.message, wait_s=round(wait_s, 3)
            )
            on_resume()

        self._policy = TryAllAtOnce(max_attempts=len(self._all), on_break=on_break)
        self._turn = 0
        self._looking = asyncio.create_task(self._look_again(), name="look at schedulers")

    @property
    def num_ready(self) -> int:
        """Number of schedulers that serve requests now."""
        return sum(one.is_ready for one in self._all)

    @property
    def readiness(self) -> Mapping[str, bool]:
        """True for each address whose scheduler serves requests now."""
        return {one.address: one.is_ready for one in self._all}

    def generate(self, request: inference.GenerateRequest, metadata: Metadata) -> LoopCalls:
        """Stream one completion; each of its calls goes to the scheduler that is next then."""
        tried: dict[str, int] = {}

        def start_call(message: inference.GenerateRequest, _timeout_s: float | None) -> WatchedCall:
            return self._next(tried).generate(message, metadata)

        return LoopCalls(start_call, request, self._policy, deadline_s=None)

    async def get_model(self, metadata: Metadata) -> Model:
        """
        Return the model that is served.

        Raises:
            TandemError: No scheduler answers; this is the last one's error.
        """
        request = model_pb2.GetModelRequest()
        answer = await self._call(
            lambda stub: stub.GetModel(request, timeout=MODEL_LIMIT_S, metadata=metadata)
        )
        return model_from_proto(answer.model)

    async def tokenize(
        self, request: tokens_pb2.TokenizeRequest, metadata: Metadata
    ) -> PromptTokens:
        """
        Return the ids of a prompt.

        Raises:
            TandemError: The prompt cannot be used, or no scheduler answers.
        """
        answer = await self._call(
            lambda stub: stub.Tokenize(request, timeout=MODEL_LIMIT_S, metadata=metadata)
        )
        return tokens_from_proto(answer)

    async def detokenize(self, request: tokens_pb2.DetokenizeRequest, metadata: Metadata) -> str:
        """
        Return the text of ids.

        Raises:
            TandemError: An id is wrong, or no scheduler answers.
        """
        answer = await self._call(
            lambda stub: stub.Detokenize(request, timeout=MODEL_LIMIT_S, metadata=metadata)
        )
        text: str = answer.text
        return text

    async def close(self) -> None:
        """Close all connections."""
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        replaced = [one for one, _ in self._replaced]
        await asyncio.gather(*(one.close() for one in self._all + replaced))

    async def _look_again(self) -> None:
        """
        Give up streams that stand still where no requests are served, while others serve; follow
        the options of connections.
        """
        while True:
            await asyncio.sleep(STALL_S)
            serving = {one.address for one in self._all if one.serves}
            for one in [*self._all, *(one for one, _ in self._replaced)]:
                one.streams.look(give_up=bool(serving) and one.address not in serving)
            await self._renew_connections()

    async def _renew_connections(self) -> None:
        """Open new connections if the options changed; close replaced ones without calls."""
        now_s = asyncio.get_running_loop().time()
        idle = [one for one, from_s in self._replaced if now_s >= from_s and not one.streams]
        self._replaced = [each for each in self._replaced if each[0] not in idle]
        for one in idle:
            await one.close()
        options = self._newest_options()
        if options == self._options:
            return
        self._options = options
        before = self._all
        self._all = [self._connected(one.address, is_ready=one.is_ready) for one in before]
        for one in before:
            one.stop_watching()
            # Calls other than streams are not counted, and end within this time.
            self._replaced.append((one, now_s + MODEL_LIMIT_S))
        _log.info("scheduler_connections_renewed", at=[one.address for one in before])

    def _connected(self, address: str, *, is_ready: bool = False) -> Scheduler:
        options = _with_pings(self._options)
        return Scheduler(address, options, joins=self._joins, is_ready=is_ready)

    async def _call(self, method: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """Call a method of one scheduler, and of the next ones while it is unavailable."""
        tried: dict[str, int] = {}
        while True:
            scheduler = self._next(tried)
            try:
                return await method(scheduler.stub)
            except grpc.RpcError as failure:
                error = from_rpc_error(failure)
                if not is_transient(error) or max(tried.values()) >= len(self._all):
                    raise error from None

    def _next(self, tried: dict[str, int]) -> Scheduler:
        """
        Choose a scheduler for a call: among those that serve, or else ready ones, or else all,
        those that the request has not tried or has tried longest ago; they take turns.

        Args:
            tried: Number of the request's last call to each address; the chosen one is added.
        """
        ready = [one for one in self._all if one.is_ready] or self._all
        ready = [one for one in ready if one.serves] or ready
        longest_ago = min(tried.get(one.address, 0) for one in ready)
        fresh = [one for one in ready if tried.get(one.address, 0) == longest_ago]
        chosen = fresh[self._turn % len(fresh)]
        self._turn += 1
        tried[chosen.address] = max(tried.values(), default=0) + 1
        return chosen


def _with_pings(options: ChannelOptions) -> ChannelOptions:
    return replace(options, keepalive_s=KEEPALIVE_S, keepalive_timeout_s=KEEPALIVE_S)
