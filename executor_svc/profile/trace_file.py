"""Sending of a trace: compressed and cut into messages, never whole in memory."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from tandem.common.v1.profile_pb2 import TraceChunk
from tandem.errors import InternalError, InvalidParameter
from tandem.link import MAX_CHUNK_BYTES

MAX_TRACE_BYTES = 1 << 30
"""Most bytes of a trace as JSON: some hundred steps of a large model."""
_GZIP = 16 + zlib.MAX_WBITS


def chunks(trace: Path) -> Iterator[TraceChunk]:
    """
    Yield a Chrome trace compressed with gzip, then its sha256.

    Raises:
        InternalError: The file is not complete: its disk is full.
        InvalidParameter: The file is larger than `MAX_TRACE_BYTES`.
    """
    _check(trace)
    digest = hashlib.sha256()
    for chunk in _cut(_compressed(trace)):
        digest.update(chunk.chunk)
        yield chunk
    yield TraceChunk(sha256=digest.hexdigest())


def _check(trace: Path) -> None:
    num_bytes = trace.stat().st_size if trace.exists() else 0
    if num_bytes > MAX_TRACE_BYTES:
        raise InvalidParameter(
            f"the trace has {num_bytes} bytes, over the limit of {MAX_TRACE_BYTES}: record fewer "
            "steps, or no stacks",
            field="options.num_steps",
        )
    with trace.open("rb") if num_bytes else Path(os.devnull).open("rb") as file:
        file.seek(max(0, num_bytes - 16))
        # The profiler does not report a failed write.
        is_complete = file.read().rstrip().endswith(b"}")
    if not is_complete:
        raise InternalError(
            f"the trace could not be written to {trace.parent}: make room there, or choose another "
            "folder with TMPDIR"
        )


def _compressed(trace: Path) -> Iterator[bytes]:
    compressor = zlib.compressobj(wbits=_GZIP)
    with trace.open("rb") as file:
        while content := file.read(MAX_CHUNK_BYTES):
            yield compressor.compress(content)
    yield compressor.flush()


def _cut(pieces: Iterator[bytes]) -> Iterator[TraceChunk]:
    """Cut the same bytes into chunks of equal size, but for the last."""
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        while len(waiting) >= MAX_CHUNK_BYTES:
            yield TraceChunk(chunk=bytes(waiting[:MAX_CHUNK_BYTES]))
            del waiting[:MAX_CHUNK_BYTES]
    if waiting:
        yield TraceChunk(chunk=bytes(waiting))
