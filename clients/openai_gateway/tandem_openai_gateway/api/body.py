"""Bodies of requests: how much of them is read and by when, and where they are decoded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from tandem_openai_gateway.api.held_bytes import BodyBytes, HeldBytes
from tandem_openai_gateway.errors import ApiError

BODY_LIMIT_S = 30.0
"""Seconds within which a client must have sent a body."""
IN_THREAD_BYTES = 32 << 10
"""Size from which a body is decoded in a thread, so that streams go on meanwhile."""

Decoded = TypeVar("Decoded")


class Bodies:
    """Bodies that arrive, are decoded, and are held until a scheduler has what was made of them."""

    def __init__(
        self, max_bytes: int, *, held: HeldBytes | None = None, limit_s: float = BODY_LIMIT_S
    ) -> None:
        """
        Args:
            max_bytes: Size of the largest body.
            held: Bytes of all together; None = with the usual limits.
            limit_s: Seconds within which a body must have arrived.
        """
        self._max_bytes = max_bytes
        self._held = held or HeldBytes()
        self._limit_s = limit_s
        # One thread: two that decode at once are no faster in Python, and hold more.
        self._thread = ThreadPoolExecutor(1, "decode body")

    @contextlib.asynccontextmanager
    async def decoded(
        self, request: Request, key: bytes, decode: Callable[[bytes], Decoded]
    ) -> AsyncIterator[Decoded]:
        """
        Read the body of a request; yield what `decode` makes of it, one large body at a time. That
        counts as held until the block ends.

        Args:
            request: The request.
            key: Key that it came with, whose bodies share what one key may hold.
            decode: Function that decodes a body; it runs in a thread for a large one.

        Raises:
            ApiError: The body is too large or too slow, there is no room for it now, or `decode`
                refuses it.
        """
        self._check_length(request.headers.get("content-length", ""))
        body = BodyBytes(self._held, key)
        work: Future[Decoded] | None = None
        try:
            await self._read(request, body)
            if len(body) < IN_THREAD_BYTES:
                decoded = decode(body.take_raw())
            else:
                work = self._thread.submit(lambda: decode(body.take_raw()))
                decoded = await asyncio.wrap_future(work)
            body.note_decoded()
            yield decoded
        finally:
            if work is None or work.done():
                body.release()
            else:  # the task was cancelled, but a thread cannot be: it still holds the body
                work.add_done_callback(_releasing(body))

    def close(self) -> None:
        """Decode no further body."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read(self, request: Request, body: BodyBytes) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                async for part in request.stream():
                    if len(body) + len(part) > self._max_bytes:
                        raise self._too_large()
                    body.add(part)
        except TimeoutError:
            raise self._too_slow() from None

    def _check_length(self, said: str) -> None:
        """Refuse a body by the length that its client gives, before any of it is read."""
        if said.isdecimal() and int(said) > self._max_bytes:
            raise self._too_large()

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


def _releasing(body: BodyBytes) -> Callable[[object], None]:
    """Return a function that has the loop of this task release a body."""
    loop = asyncio.get_running_loop()

    def release(_work: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing counts any more
            loop.call_soon_threadsafe(body.release)

    return release
