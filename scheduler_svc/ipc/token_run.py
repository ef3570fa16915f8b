"""Runs of output tokens: several steps of the same streams, merged into one message."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scheduler_svc.ipc.messages import Update
from tandem.link.batch import Int32Column

MAX_RUN_BYTES = 256 * 1024
"""
Most bytes of a run's tokens, so that neither end spends long on one message. A single step with
more streams is not divided.
"""


class TokenRun:
    """
    Consecutive tokens of a set of streams: row i has the i-th new token of every stream. A token
    costs 4 bytes, for any number of steps.
    """

    __slots__ = ("_num_rows", "_offsets", "_streams", "_tokens")

    def __init__(self, streams: bytes, offsets: Int32Column, tokens: bytes) -> None:
        """
        Args:
            streams: uint32 stream numbers, shape ``[N]``. With only one row, a stream may occur
                several times, with its tokens in order.
            offsets: Output offsets of the first row, shape ``[N]``.
            tokens: int32 ids, shape ``[rows, N]``.
        """
        self._streams = streams
        self._offsets = offsets
        self._tokens: bytes | bytearray = tokens
        self._num_rows = len(tokens) // max(1, len(streams))

    @property
    def num_streams(self) -> int:
        """Number of streams with tokens in the run."""
        return len(self._streams) // 4

    def try_extend(self, streams: bytes, offsets: Int32Column, tokens: bytes) -> bool:
        """Append tokens of the same streams if they go on where this run ends; return whether."""
        if (
            len(self._tokens) + len(tokens) > MAX_RUN_BYTES
            or streams != self._streams
            or not np.array_equal(self._offsets + self._num_rows, offsets)
        ):
            return False
        if isinstance(self._tokens, bytes):
            self._tokens = bytearray(self._tokens)
        self._tokens += tokens
        self._num_rows += len(tokens) // len(streams)
        return True

    def update(self) -> Update:
        """Return the run as an `Update` with no other news."""
        return Update(
            token_stream=self._streams,
            token_offset=self._offsets.tobytes(),
            token=bytes(self._tokens),
        )

    def by_stream(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield stream number, offset of the first token and int32 ids of every stream."""
        tokens, num_bytes = bytes(self._tokens), 4 * self._num_rows
        if self._num_rows > 1:
            tokens = np.frombuffer(tokens, np.int32).reshape(self._num_rows, -1).T.tobytes()
        streams = memoryview(self._streams).cast("I")
        at = 0
        for stream, offset in zip(streams, self._offsets.tolist(), strict=True):
            yield stream, offset, tokens[at : at + num_bytes]
            at += num_bytes
