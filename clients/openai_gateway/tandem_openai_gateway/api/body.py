"""Bodies of requests: how much of them is read and by when, and where they are decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from tandem_openai_gateway.errors import RETRY_AFTER_S, ApiError, retry_headers

BODY_LIMIT_S = 30.0
"""Seconds within which a client must have sent a body."""
MAX_HELD_BYTES = 96 << 20
"""Most bytes of all bodies that are being read or wait to be decoded."""
IN_THREAD_BYTES = 32 << 10
"""Size from which a body is decoded in a thread, so that streams go on meanwhile."""

Decoded = TypeVar("Decoded")


class Bodies:
    """Bodies that have arrived and are not decoded yet; their sum is bounded."""

    def __init__(
        self,
        max_bytes: int,
        *,
        max_held_bytes: int = MAX_HELD_BYTES,
        limit_s: float = BODY_LIMIT_S,
    ) -> None:
        """
        Args:
            max_bytes: Size of the largest body.
            max_held_bytes: Most bytes of all together.
            limit_s: Seconds within which a body must have arrived.
        """
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._limit_s = limit_s
        self._held_bytes = 0
        # One thread: two that decode at once are no faster in Python, and hold more.
        self._thread = ThreadPoolExecutor(1, "decode body")

    async def decoded(self, request: Request, decode: Callable[[bytes], Decoded]) -> Decoded:
        """
        Read the body of a request; return what `decode` makes of it, one large body at a time.

        Raises:
            ApiError: The body is too large or too slow, there is no room for it now, or `decode`
                refuses it.
        """
        self._check_length(request.headers.get("content-length", ""))
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self._limit_s):
                    async for part in request.stream():
                        self._held_bytes += len(part)
                        body += part
                        self._check(len(body))
            except TimeoutError:
                raise self._too_slow() from None
            if len(body) < IN_THREAD_BYTES:
                return decode(bytes(body))
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, decode, bytes(body))
        finally:
            self._held_bytes -= len(body)

    def close(self) -> None:
        """Decode no further body."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, said: str) -> None:
        """Refuse a body by the length that its client gives, before any of it is read."""
        if said.isdecimal() and int(said) > self._max_bytes:
            raise self._too_large()

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise self._too_large()
        if self._held_bytes > self._max_held_bytes:
            raise ApiError(
                503,
                "too many bodies are being read: try again when some have been",
                code="overloaded",
                headers=retry_headers(RETRY_AFTER_S),
            )

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._max_bytes} bytes", code="request_too_large"
        )

    def _too_slow(self) -> ApiError:
        return ApiError(
            408,
            f"the body did not arrive within {self._limit_s:g} s",
            code="request_timeout",
            headers={"Connection": "close"},  # what comes of the body now is of no use
        )
