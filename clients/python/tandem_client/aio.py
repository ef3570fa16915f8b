"""The public API for asyncio."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import inference_service_pb2_grpc as inference_grpc
from tandem.inference.v1 import model_pb2
from tandem.status import from_rpc_error
from tandem_client.channel import (
    ADDRESS_VARIABLE,
    DEFAULT_ADDRESS,
    Access,
    BaseConnection,
    ChannelOptions,
)
from tandem_client.events import Completion, completion_from_proto
from tandem_client.many import (
    DEFAULT_CONCURRENCY,
    Item,
    Outcome,
    check_options,
    options_of,
)
from tandem_client.many.shared_tasks import SharedStream
from tandem_client.many.tasks import in_tasks
from tandem_client.model import Model, PromptTokens, model_from_proto, tokens_from_proto
from tandem_client.params import GenerateOptions, TokenizeOptions
from tandem_client.request import build_request, detokenize_request, tokenize_request
from tandem_client.request.names import suggests_names
from tandem_client.streams.aio_stream import AsyncGenerationStream
from tandem_client.streams.resume import complete_request, paths_of_request
from tandem_client.streams.retry import RetryPolicy, UnaryRetries
from tandem_client.streams.stream import deadline_after
from tandem_client.targets import address_of

Answer = TypeVar("Answer")


class AsyncConnection(BaseConnection):
    """
    Connection to one port of a server, for one event loop: it connects in the loop of its first
    call. Leaving its `async with` closes it.

    Attributes:
        address: Address as it was given.
    """

    def __init__(
        self,
        address: str,
        retry: RetryPolicy | None,
        options: ChannelOptions | None,
        stub_class: Callable[[grpc.aio.Channel], Any],
        access: Access | None = None,
    ) -> None:
        super().__init__(address, retry, options, access)
        self._stub_class = stub_class
        self._shared: list[tuple[grpc.aio.Channel, Any]] = []
        """Channel and its stub after the first call, shared with clients of `with_options`."""

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        for channel, _ in self._shared:
            await channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _stub(self) -> Any:
        if not self._shared:
            channel = self._options.open_async(self.address)
            self._shared.append((channel, self._stub_class(channel)))
        return self._shared[0][1]

    async def _unary(
        self,
        method: Callable[..., Awaitable[Answer]],
        request: Any,
        limit_s: float | None,
        *,
        is_patient: bool = False,
    ) -> Answer:
        """Call a unary method until it succeeds; raise the first failure that is final."""
        deadline_s = deadline_after(self._limit_s(limit_s))
        retries = UnaryRetries(self._retry, deadline_s=deadline_s, is_patient=is_patient)
        while True:
            timeout_s = retries.timeout_s(time.monotonic())
            try:
                return await self._call(method, request, timeout_s)
            except grpc.RpcError as failure:
                jitter = random.random()  # noqa: S311  # not a secret
                wait_s = retries.wait_s(from_rpc_error(failure), time.monotonic(), jitter)
            await asyncio.sleep(wait_s)


@suggests_names
class AsyncClient(AsyncConnection):
    """
    A client like `Client`, for one event loop: it connects in the loop of its first call.

    Example:
        async with AsyncClient("127.0.0.1:50051") as client:
            async for piece in client.generate("import os", max_tokens=64).text:
                print(piece, end="")
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        retry: RetryPolicy | None = None,
        options: ChannelOptions | None = None,
        **access: Unpack[Access],
    ) -> None:
        where = address_of(address, ADDRESS_VARIABLE, DEFAULT_ADDRESS)
        super().__init__(where, retry, options, inference_grpc.InferenceServiceStub, access)

    def generate(
        self,
        prompt: str | None = None,
        *,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerationStream:
        """Stream one completion; arguments and errors as in `Client.generate`."""
        request = build_request(prompt, options)
        ends_at_s = deadline_after(self._limit_s(deadline_s))
        return AsyncGenerationStream(self._start, request, self._retry, ends_at_s)

    def generate_many(
        self,
        prompts: Iterable[Item] | AsyncIterable[Item],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Outcome]:
        """
        Complete many prompts; arguments, order and errors as in `Client.generate_many`. Cancelling
        the task that iterates cancels what runs.
        """
        check_options(options, concurrency)

        def open_stream(requests: AsyncIterator[inference.GenerateBatchRequest]) -> Any:
            return self._call(self._stub.GenerateBatch, requests, None)

        shared = SharedStream(open_stream, self._start) if self._can_share_streams else None
        start_call = self._start if shared is None else shared.start

        def start(item: Item) -> AsyncGenerationStream:
            text, given = options_of(item, options)
            ends_at_s = deadline_after(self._limit_s(deadline_s))
            request = build_request(text, given)
            return AsyncGenerationStream(start_call, request, self._retry, ends_at_s)

        return in_tasks(start, prompts, concurrency, shared)

    async def complete(
        self,
        prompt: str | None = None,
        *,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Wait for one whole completion; arguments and errors as in `Client.generate`."""
        request = complete_request(prompt, options, self._retry, secrets.token_hex(16))
        with paths_of_request():
            answer = await self._unary(self._stub.Complete, request, deadline_s, is_patient=True)
        return completion_from_proto(answer)

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        deadline_s: float | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> PromptTokens:
        """Return the ids of a prompt; arguments and errors as in `Client.tokenize`."""
        request = tokenize_request(prompt, options)
        return tokens_from_proto(await self._unary(self._stub.Tokenize, request, deadline_s))

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        model: str | None = None,
        deadline_s: float | None = None,
    ) -> str:
        """Return the text of ids; arguments and errors as in `Client.detokenize`."""
        request = detokenize_request(token_ids, keep_special_tokens, model)
        text: str = (await self._unary(self._stub.Detokenize, request, deadline_s)).text
        return text

    async def abort(
        self, request_id: str, *, tenant: str | None = None, deadline_s: float | None = None
    ) -> None:
        """End a live request of a tenant; arguments and errors as in `Client.abort`."""
        request = inference.AbortRequest(request_id=request_id, tenant=tenant)
        await self._unary(self._stub.Abort, request, deadline_s)

    async def get_model(self, name: str | None = None, *, deadline_s: float | None = None) -> Model:
        """Return a served model; arguments and errors as in `Client.get_model`."""
        request = model_pb2.GetModelRequest(model=name)
        return model_from_proto((await self._unary(self._stub.GetModel, request, deadline_s)).model)

    async def models(self, *, deadline_s: float | None = None) -> list[Model]:
        """Return all models that are served; arguments as in `Client.models`."""
        found: list[Model] = []
        page_token: str | None = None
        while page_token != "":
            request = model_pb2.ListModelsRequest(page_token=page_token)
            page = await self._unary(self._stub.ListModels, request, deadline_s)
            found += map(model_from_proto, page.models)
            page_token = page.next_page_token
        return found

    def _start(self, request: inference.GenerateRequest, timeout_s: float | None) -> Any:
        """Start a Generate call in the running event loop."""
        return self._call(self._stub.Generate, request, timeout_s)
