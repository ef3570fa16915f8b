"""Clients of one stream at a time: Python over gRPC, and OpenAI's API over HTTP."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from tandem.errors import TandemError
from tandem_client import NO_RETRY, Client
from tandem_client.events import Delta, Started
from tests.deploy.events.streams.prompts import Request

SILENCE_S = 300.0
"""Longest time without a message of a stream over HTTP."""
PYTHON = "python"
HTTP = "OpenAI over HTTP"
TRANSIENT_CODES = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "503", "429", "connect")
"""Codes of errors after which a client may ask again later."""


@dataclass(slots=True, kw_only=True)
class Access:
    """
    Addresses of the services, and how a client of them is known.

    Attributes:
        scheduler: Address of the scheduler.
        gateways: Addresses of the gateways, if there are any.
        files: Folder with ca.crt, tls.crt and tls.key of a client, another one after a rotation;
            None = plain text.
        server_name: Name in the scheduler's certificate; None = that of its address.
        token: Bearer token; None = none is asked for.
    """

    scheduler: str
    gateways: tuple[str, ...] = ()
    files: Path | None = None
    server_name: str | None = None
    token: str | None = None

    def paths(self) -> dict[str, str]:
        """Return the files by the name that clients give them."""
        if self.files is None:
            return {}
        names = {"ca": "ca.crt", "cert": "tls.crt", "key": "tls.key"}
        return {name: str(self.files / file) for name, file in names.items()}


@dataclass(slots=True)
class Received:
    """
    Content of one stream.

    Attributes:
        token_ids: All tokens, in the order in which they came.
        request_id: Id in the logs of the services; None = no server has accepted the request.
        error: Error in words; empty = the stream came to its end.
        code: Code of the error; empty = it has none.
    """

    token_ids: list[int] = field(default_factory=list)
    request_id: str | None = None
    error: str = ""
    code: str = ""

    @property
    def may_ask_again(self) -> bool:
        """True if no server has accepted the request and the error is one that passes."""
        return self.request_id is None and self.code in TRANSIENT_CODES


class Caller(Protocol):
    """
    A client that reads one stream at a time.

    Attributes:
        name: Name of the client, which is a column of the table.
    """

    name: str

    def stream(self, request: Request, heard: Callable[[], None]) -> Received:
        """Read a stream to its end, and call `heard` for each message with tokens."""

    def close(self) -> None:
        """Close its connections."""


class PythonCaller:
    """The Python client; over TLS each stream has a connection of its own."""

    name = PYTHON

    def __init__(self, access: Access, *, resumes: bool) -> None:
        self._access = access
        self._retry = None if resumes else NO_RETRY
        self._kept = None if access.files else self._client()

    def _client(self) -> Client:
        paths: dict[str, Any] = dict(self._access.paths())
        if paths:
            paths |= {"server_name": self._access.server_name, "api_key": self._access.token}
        return Client(self._access.scheduler, retry=self._retry, **paths)

    def stream(self, request: Request, heard: Callable[[], None]) -> Received:
        """Read a stream to its end, and call `heard` for each message with tokens."""
        received = Received()
        try:
            client = self._kept or self._client()
            try:
                for event in client.generate(**request.options()):
                    if isinstance(event, Started):
                        received.request_id = event.request_id
                    elif isinstance(event, Delta):
                        received.token_ids += event.token_ids
                        heard()
            finally:
                if client is not self._kept:
                    client.close()
        except TandemError as error:
            received.error, received.code = str(error), error.code
        return received

    def close(self) -> None:
        """Close the connection."""
        if self._kept:
            self._kept.close()


class HttpCaller:
    """OpenAI's API of a gateway, as server-sent events."""

    name = HTTP

    def __init__(self, access: Access, gateways: Sequence[str]) -> None:
        """
        Args:
            access: Credentials.
            gateways: Addresses of the gateway, and of those that are asked where it accepts nothing.
        """
        headers = {"Authorization": f"Bearer {access.token}"} if access.token else {}
        self._clients = [
            httpx.Client(
                base_url=f"http://{gateway}",
                headers=headers,
                timeout=SILENCE_S,
                trust_env=False,
                verify=ssl.create_default_context(),
            )
            for gateway in gateways
        ]

    def stream(self, request: Request, heard: Callable[[], None]) -> Received:
        """Read a stream to its end, and call `heard` for each message with tokens."""
        received = Received()
        for client in self._clients:
            received = self._stream(client, request, heard)
            if not received.may_ask_again:
                break
        return received

    def _stream(
        self, client: httpx.Client, request: Request, heard: Callable[[], None]
    ) -> Received:
        received = Received()
        try:
            with client.stream("POST", "/v1/completions", json=request.body()) as answer:
                if answer.status_code != httpx.codes.OK:
                    received.error = f"{answer.status_code}: {answer.read().decode()}"
                    received.code = str(answer.status_code)
                    return received
                received.request_id = answer.headers["x-request-id"]
                received.error = self._read(answer, received, heard)
        except httpx.ConnectError as error:
            received.error, received.code = f"connect: {error}", "connect"
        except httpx.HTTPError as error:
            received.error = f"{type(error).__name__}: {error}"
        return received

    @staticmethod
    def _read(answer: httpx.Response, received: Received, heard: Callable[[], None]) -> str:
        """Read all events; return the error, or nothing after the last one."""
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return ""
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return str(event["error"])
            for choice in event["choices"]:
                if token_ids := choice.get("token_ids"):
                    received.token_ids += token_ids
                    heard()
        return "the stream ended before [DONE]"

    def close(self) -> None:
        """Close its connections."""
        for client in self._clients:
            client.close()
