"""Requests whose bodies arrive when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request

from tandem_openai_gateway.api.body import Bodies
from tandem_openai_gateway.errors import ApiError


class Sent:
    """A request whose parts arrive when the test says so."""

    def __init__(self, key: bytes = b"") -> None:
        self.key = key
        self._parts: asyncio.Queue[tuple[bytes, bool] | None] = asyncio.Queue()
        self.request = Request({"type": "http", "method": "POST", "headers": []}, self._receive)

    def send(self, part: bytes, *, more: bool = True) -> None:
        """Let a part arrive."""
        self._parts.put_nowait((part, more))

    def disconnect(self) -> None:
        """Let the client go."""
        self._parts.put_nowait(None)

    async def is_read(self) -> None:
        """Wait until all parts were taken."""
        await self._parts.join()

    async def _receive(self) -> dict[str, object]:
        part = await self._parts.get()
        self._parts.task_done()
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part[0], "more_body": part[1]}


async def decoded(bodies: Bodies, sent: Sent, decode: Callable[[bytes], Any] = bytes) -> Any:
    """Return what is made of a body, which is then held no more."""
    async with bodies.decoded(sent.request, sent.key, decode) as found:
        return found


async def refusal(reading: Awaitable[object]) -> ApiError:
    """Return the error that reading a body ends with."""
    with pytest.raises(ApiError) as refused:
        await reading
    return refused.value
