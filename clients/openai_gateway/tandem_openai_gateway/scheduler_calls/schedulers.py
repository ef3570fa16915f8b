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
from tandem.inference.v1 import model_pb2
from tandem.status import from_rpc_error
from tandem_client.channel import ChannelOptions
from tandem_openai_gateway.scheduler_calls.watched_call import WatchedCalls
from tandem_openai_gateway.upstream import (
    AsyncGenerationStream,
    Model,
    PromptTokens,
    RetryPolicy,
    detokenize_request,
    is_transient,
    model_from_proto,
    tokenize_request,
    tokens_from_proto,
)

READY = "tandem.ready"
"""Health service that a scheduler reports SERVING while it serves requests."""
WATCH_AGAIN_S = 0.5
MODEL_LIMIT_S = 10.0
STALL_S = 2.0
"""
Seconds without a message after which a stream leaves a scheduler that serves no requests, if
another one does. A stalled scheduler keeps its connections, so that no stream would break there.
"""
KEEPALIVE_S = 10.0
"""Seconds between pings of a silent scheduler, and to wait for their answers."""

Metadata = tuple[tuple[str, str], ...]
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
        streams: Calls of streams that run there.
    """

    def __init__(self, address: str, options: ChannelOptions) -> None:
        self.address = address
        self.is_ready = False
        self.streams = WatchedCalls()
        self._channel = options.open_async(address)
        self.stub: Any = inference_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._watching = asyncio.create_task(self._watch(), name=f"watch {address}")

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._channel.close(None)

    async def _watch(self) -> None:
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=READY)
        while True:
            try:
                async for answer in health.Watch(request):
                    serving = health_pb2.HealthCheckResponse.SERVING
                    self._set_ready(answer.status == serving)
            except grpc.RpcError as failure:
                self._set_ready(False, why=from_rpc_error(failure).message)
            await asyncio.sleep(WATCH_AGAIN_S)

    def _set_ready(self, ready: bool, why: str = "") -> None:
        if ready == self.is_ready:
            return
        self.is_ready = ready
        _log.info("scheduler_ready" if ready else "scheduler_unready", at=self.address, why=why)


class Schedulers:
    """
    All schedulers, which take turns. It is made in the event loop that uses it, and owns the
    connections.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        options: ChannelOptions | None = None,
        *,
        on_resume: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            addresses: Addresses of the schedulers, at least one.
            options: Encryption and limits of the connections.
            on_resume: Called whenever a broken stream is about to be resumed.
        """
        chosen = replace(
            ChannelOptions() if options is None else options,
            keepalive_s=KEEPALIVE_S,
            keepalive_timeout_s=KEEPALIVE_S,
        )
        self._all = [Scheduler(address, chosen) for address in addresses]

        def on_break(error: TandemError, wait_s: float) -> None:
            _log.info(
                "stream_broke", reason=error.reason, why=error.message, wait_s=round(wait_s, 3)
            )
            on_resume()

        self._policy = TryAllAtOnce(max_attempts=len(self._all), on_break=on_break)
        self._turn = 0
        self._looking = asyncio.create_task(self._leave_stalled(), name="leave stalled schedulers")

    @property
    def num_ready(self) -> int:
        """Number of schedulers that serve requests now."""
        return sum(one.is_ready for one in self._all)

    @property
    def readiness(self) -> Mapping[str, bool]:
        """True for each address whose scheduler serves requests now."""
        return {one.address: one.is_ready for one in self._all}

    def generate(
        self, request: inference.GenerateRequest, metadata: Metadata
    ) -> AsyncGenerationStream:
        """Stream one completion; each of its calls goes to the scheduler that is next then."""
        tried: dict[str, int] = {}

        def start_call(message: inference.GenerateRequest, timeout_s: float | None) -> Any:
            scheduler = self._next(tried)
            return scheduler.streams.watch(
                scheduler.stub.Generate(message, timeout=timeout_s, metadata=metadata)
            )

        return AsyncGenerationStream(start_call, request, self._policy, None)

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
        self, prompt: str | None, options: Mapping[str, Any], metadata: Metadata
    ) -> PromptTokens:
        """
        Return the ids of a prompt; `options` are those of the client's `tokenize`.

        Raises:
            TandemError: The prompt cannot be used, or no scheduler answers.
        """
        request = tokenize_request(prompt, options)  # type: ignore[arg-type]  # the names are ours
        answer = await self._call(
            lambda stub: stub.Tokenize(request, timeout=MODEL_LIMIT_S, metadata=metadata)
        )
        return tokens_from_proto(answer)

    async def detokenize(self, token_ids: Sequence[int], metadata: Metadata) -> str:
        """
        Return the text of ids.

        Raises:
            TandemError: An id is wrong, or no scheduler answers.
        """
        request = detokenize_request(token_ids, keep_special_tokens=False, model=None)
        answer = await self._call(
            lambda stub: stub.Detokenize(request, timeout=MODEL_LIMIT_S, metadata=metadata)
        )
        text: str = answer.text
        return text

    async def close(self) -> None:
        """Close all connections."""
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in self._all))

    async def _leave_stalled(self) -> None:
        """Give up streams that stand still where no requests are served, while others serve."""
        while True:
            await asyncio.sleep(STALL_S)
            for one in self._all:
                one.streams.look(give_up=self.num_ready > 0 and not one.is_ready)

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
        Choose a scheduler for a call: among ready ones, or all if none is, those that the request
        has not tried or has tried longest ago; they take turns.

        Args:
            tried: Number of the request's last call to each address; the chosen one is added.
        """
        ready = [one for one in self._all if one.is_ready] or self._all
        longest_ago = min(tried.get(one.address, 0) for one in ready)
        fresh = [one for one in ready if tried.get(one.address, 0) == longest_ago]
        chosen = fresh[self._turn % len(fresh)]
        self._turn += 1
        tried[chosen.address] = max(tried.values(), default=0) + 1
        return chosen
