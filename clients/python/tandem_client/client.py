"""The public API for threads."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Self, TypeVar, Unpack

import grpc

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
from tandem_client.many.shared_threads import SharedStream
from tandem_client.many.threads import in_threads
from tandem_client.model import Model, PromptTokens, model_from_proto, tokens_from_proto
from tandem_client.params import GenerateOptions, TokenizeOptions
from tandem_client.request import build_request, detokenize_request, tokenize_request
from tandem_client.request.names import suggests_names
from tandem_client.streams.resume import complete_request, paths_of_request
from tandem_client.streams.retry import RetryPolicy, UnaryRetries
from tandem_client.streams.stream import GenerationStream, StartCall, deadline_after
from tandem_client.targets import address_of

Answer = TypeVar("Answer")


class Connection(BaseConnection):
    """
    Connection to one port of a server, for threads; leaving its `with` closes it.

    Attributes:
        address: Address as it was given.
    """

    def __init__(
        self,
        address: str,
        retry: RetryPolicy | None,
        options: ChannelOptions | None,
        access: Access | None = None,
    ) -> None:
        super().__init__(address, retry, options, access)
        self._channel = self._options.open(address)

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unary(
        self,
        method: Callable[..., Answer],
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
                return self._call(method, request, timeout_s)
            except grpc.RpcError as failure:
                jitter = random.random()  # noqa: S311  # not a secret
                wait_s = retries.wait_s(from_rpc_error(failure), time.monotonic(), jitter)
            time.sleep(wait_s)


@suggests_names
class Client(Connection):
    """
    A connection to one Tandem server; safe to share between threads. Every failure is a
    `tandem.errors.TandemError`, which can be matched by class or by `reason`.

    Example:
        with Client("127.0.0.1:50051") as client:
            for piece in client.generate("import os", max_tokens=64).text:
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
        """
        Args:
            address: HOST:PORT, [IPv6]:PORT or unix:PATH; several by IP address, or dns:///NAME:PORT,
                take turns. None = that of TANDEM_ADDRESS, else the default one.
            retry: How calls recover by themselves.
            options: Metadata and limits of the connection.
            **access: API key and TLS files, see ChannelOptions; they win over those of `options`.

        Raises:
            InvalidConfig: `address` is not the address of a server, or a file cannot be used.
        """
        where = address_of(address, ADDRESS_VARIABLE, DEFAULT_ADDRESS)
        super().__init__(where, retry, options, access)
        self._stub = inference_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    def generate(
        self,
        prompt: str | None = None,
        *,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationStream:
        """
        Stream one completion.

        Args:
            prompt: Text to continue, unless `messages` or `token_ids` is given.
            deadline_s: Seconds after which the request is cancelled, retries included; None = the
                client's own limit (`with_options`), infinity = none.
            **options: See GenerateOptions.

        Returns:
            The stream; the call starts with its first iteration.

        Raises:
            TandemError: The server refused the request or the stream broke; raised by iterating.
            InvalidParameter: A value cannot be sent; raised at once.
            TypeError: An option has an unknown name; raised at once.
        """
        request = build_request(prompt, options)
        start_call = partial(self._call, self._stub.Generate)
        ends_at_s = deadline_after(self._limit_s(deadline_s))
        return GenerationStream(start_call, request, self._retry, ends_at_s)

    def generate_many(
        self,
        prompts: Iterable[Item],
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[Outcome]:
        """
        Complete many prompts, several at a time, and yield the outcomes in the prompts' order.

        A prompt that fails yields its error instead of raising it, and the others go on. Prompts
        are taken from the iterable as they are needed, at most `2 * concurrency` ahead of the
        outcome that is waited for. Closing the iterator, or leaving a loop over it, cancels what
        runs.

        Args:
            prompts: Texts, or mappings of GenerateOptions and `prompt`, which override `options`.
            concurrency: Largest number of requests that run at once.
            deadline_s: Seconds after which one request is cancelled, counted from its start.
            **options: See GenerateOptions; they hold for every prompt.

        Raises:
            InvalidParameter: An option cannot be sent; raised at once.
            TypeError: An option has an unknown name; raised at once.
        """
        check_options(options, concurrency)

        start_call: StartCall = partial(self._call, self._stub.Generate)
        open_stream = partial(self._call, self._stub.GenerateBatch, timeout_s=None)
        shared = SharedStream(open_stream, start_call) if self._can_share_streams else None
        if shared is not None:
            start_call = shared.start

        def start(item: Item) -> GenerationStream:
            text, given = options_of(item, options)
            ends_at_s = deadline_after(self._limit_s(deadline_s))
            return GenerationStream(start_call, build_request(text, given), self._retry, ends_at_s)

        return in_threads(start, prompts, concurrency, shared)

    def complete(
        self,
        prompt: str | None = None,
        *,
        deadline_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Wait for one whole completion; arguments and errors as in `generate`."""
        request = complete_request(prompt, options, self._retry, secrets.token_hex(16))
        with paths_of_request():
            answer = self._unary(self._stub.Complete, request, deadline_s, is_patient=True)
        return completion_from_proto(answer)

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        deadline_s: float | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> PromptTokens:
        """
        Return the ids that a request with this prompt would run with.

        Args:
            prompt: Text, unless `messages` is given.
            deadline_s: Longest wait for the answer in seconds.
            **options: See TokenizeOptions.
        """
        request = tokenize_request(prompt, options)
        return tokens_from_proto(self._unary(self._stub.Tokenize, request, deadline_s))

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        model: str | None = None,
        deadline_s: float | None = None,
    ) -> str:
        """
        Return the text of ids.

        Args:
            token_ids: Ids of the model's vocabulary.
            keep_special_tokens: True: special tokens are written by their names.
            model: Name of the model; None = the one that is served.
            deadline_s: Longest wait for the answer in seconds.
        """
        request = detokenize_request(token_ids, keep_special_tokens, model)
        text: str = self._unary(self._stub.Detokenize, request, deadline_s).text
        return text

    def abort(
        self, request_id: str, *, tenant: str | None = None, deadline_s: float | None = None
    ) -> None:
        """
        End a live request of a tenant; its stream keeps the output produced so far.

        Args:
            request_id: Id of the request, as in `Started.request_id`.
            tenant: Tenant of the request; None = the credential's, or none.
            deadline_s: Longest wait for the answer in seconds.

        Raises:
            RequestNotFound: The tenant has no live request of this id.
        """
        request = inference.AbortRequest(request_id=request_id, tenant=tenant)
        self._unary(self._stub.Abort, request, deadline_s)

    def get_model(self, name: str | None = None, *, deadline_s: float | None = None) -> Model:
        """
        Return a served model with its limits.

        Args:
            name: Name of the model; None = the one that is served.
            deadline_s: Longest wait for the answer in seconds.

        Raises:
            ModelNotFound: No model of this name is served.
        """
        request = model_pb2.GetModelRequest(model=name)
        return model_from_proto(self._unary(self._stub.GetModel, request, deadline_s).model)

    def models(self, *, deadline_s: float | None = None) -> list[Model]:
        """
        Return all models that are served, by name.

        Args:
            deadline_s: Longest wait for each page of the answer in seconds.
        """
        found: list[Model] = []
        page_token: str | None = None
        while page_token != "":
            request = model_pb2.ListModelsRequest(page_token=page_token)
            page = self._unary(self._stub.ListModels, request, deadline_s)
            found += map(model_from_proto, page.models)
            page_token = page.next_page_token
        return found
