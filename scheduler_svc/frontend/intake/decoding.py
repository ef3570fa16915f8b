"""Decoding of request messages: large ones one at a time, and no more of them than a budget."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog
from google.protobuf.message import DecodeError

from scheduler_svc.frontend.intake.bounds import check_bounds
from scheduler_svc.frontend.intake.memory import FreedMemory
from tandem.errors import InvalidParameter, QueueFull

LARGE_BYTES = 64 << 10
"""Size above which a message is decoded in its turn; others cost the event loop little."""
MAX_UNDECODED_BYTES = 96 << 20
"""Most bytes of large messages that wait to be decoded; a message that is alone may have more."""
CONNECTION_SHARE = 0.667
"""Most of these bytes that one connection may have while no other has any."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

Decode = Callable[[bytes], Any]


class MessageIntake:
    """
    Decoder of the request messages of one process. Owned by the event loop.

    Decoding holds the interpreter, so threads would not help: other calls go on between any two
    large messages instead.

    A connection may have a multiple of the bytes that are still free, so that one alone has its
    share, several have less each, and something is left for the next one in any case: dynamic
    thresholds (Choudhury and Hahne, 1998).
    """

    def __init__(
        self,
        *,
        max_undecoded_bytes: int = MAX_UNDECODED_BYTES,
        connection_share: float = CONNECTION_SHARE,
    ) -> None:
        """
        Args:
            max_undecoded_bytes: Most bytes of large messages that wait to be decoded.
            connection_share: Most of them that one connection may have while no other has any,
                over 0 and up to 1.
        """
        self._max_bytes = max_undecoded_bytes
        self._share = connection_share
        self._num_bytes = 0
        self._of_connection: Counter[str] = Counter()
        """Bytes of connections that have some."""
        self._turn = asyncio.Lock()
        self._freed = FreedMemory()

    async def decode(self, raw: bytes, decode: Decode, method: str, connection: str) -> Any:
        """
        Return the message of a call.

        Args:
            raw: Its bytes.
            decode: `FromString` of the message's class.
            method: Name of the method, for errors.
            connection: Key of the connection that it came by.

        Raises:
            InvalidParameter: The bytes are no valid message, or have more fields than a request.
            QueueFull: Too many bytes wait to be decoded already, of this connection or of all, or
                memory is short.
        """
        if len(raw) <= LARGE_BYTES:
            return _decoded(raw, decode, method)
        self._check_room(len(raw), connection)
        self._num_bytes += len(raw)
        self._of_connection[connection] += len(raw)
        try:
            async with self._turn:
                check_bounds(raw, decode.__self__.DESCRIPTOR)  # type: ignore[attr-defined]  # a class method
                await asyncio.sleep(0)
                return _decoded(raw, decode, method)
        finally:
            self._num_bytes -= len(raw)
            self._of_connection[connection] -= len(raw)
            if not self._of_connection[connection]:
                del self._of_connection[connection]
            self._freed.give_back_soon()

    def _check_room(self, num_bytes: int, connection: str) -> None:
        """
        Raises:
            QueueFull: There is no room for another message of so many bytes.
        """
        free = self._max_bytes - self._num_bytes
        if not self._num_bytes:
            return
        if num_bytes > free:
            raise QueueFull(
                f"{self._num_bytes} bytes of large messages wait to be decoded, the limit is "
                f"{self._max_bytes}: try again in a moment",
                metadata={"limit": "max_undecoded_bytes"},
            )
        own = self._of_connection[connection]
        if (own + num_bytes) * (1 - self._share) > free * self._share:
            raise QueueFull(
                f"{own} bytes of large messages of this connection wait to be decoded, and with "
                f"{num_bytes} more too few of {self._max_bytes} would be left for others: try "
                "again in a moment",
                metadata={"limit": "undecoded_share"},
            )


def _decoded(raw: bytes, decode: Decode, method: str) -> Any:
    try:
        return decode(raw)
    except (DecodeError, ValueError) as error:
        if "alloc" in str(error):  # the one sign by which a lack of memory differs
            _log.error("memory_short", method=method, message_bytes=len(raw))
            raise QueueFull(
                "there is not enough memory for this message now: try again in a moment",
                metadata={"limit": "memory"},
            ) from error
        raise InvalidParameter(
            f"the request bytes are not a valid message for {method}; "
            "send protobuf of this contract, with UTF-8 in all strings",
            field="",
        ) from error
