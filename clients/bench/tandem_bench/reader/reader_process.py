"""
Process that opens many Generate streams at once and counts what comes.

    python -m tandem_bench.reader.reader_process ADDRESS CONNECTIONS [batch] [ca=FILE] < input

ADDRESS is host:port or unix:path. FILE has the certificates that sign the server's; calls are
encrypted with it, and in plain text without. Standard input begins with the number of requests
and, for each, its length and its bytes (numbers: 4 bytes, little-endian); one command per line
follows:

    report        answer with one line of JSON, the `ReadCounts` since the start
    stall N       stop reading the N last streams; answers like report
    resume        read them again; answers like report
    quit, or the end of input: close everything

Stream i is on connection i modulo CONNECTIONS; with `batch` all requests are items of one stream,
which cannot be stalled. Exit codes: 0 quit, 2 wrong arguments.

The streams are grpcio's. They cost about as much CPU as the server's end of them, which shows only
where clients and service share few cores: on two cores of an AMD EPYC (Zen 3), 256 clients got 9 %
fewer tokens/s than from a reader in C that did nothing but count, and the frontends' CPU per
message (`tandem bench stream`) was the same within 3 %.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, BinaryIO

import grpc
import msgspec
from google.rpc.status_pb2 import Status

from tandem.inference.v1.batch_pb2 import BatchEvent, GenerateBatchResponse
from tandem.inference.v1.inference_service_pb2 import (
    DESCRIPTOR,
    BatchItem,
    GenerateBatchRequest,
    GenerateRequest,
    GenerateResponse,
)
from tandem_bench.reader.counts import ReadCounts

_METHOD = f"/{DESCRIPTOR.services_by_name['InferenceService'].full_name}/Generate"
_BATCH_METHOD = f"{_METHOD}Batch"
ITEMS_PER_MESSAGE = 64
"""Items that one message of a batch adds."""
_CA = "ca="
STREAM_WINDOW = 8192
"""
Bytes that a server may send on a stream before they are read: few, so that a stream which is no
longer read soon holds up its server.
"""


class _Stream:
    """One call."""

    def __init__(self) -> None:
        self.is_readable = asyncio.Event()
        self.is_readable.set()
        self.tokens = 0
        self.status: str | None = None
        self._next_offset: dict[int, int] = {}

    def is_next(self, choice: int, offset: int, num_tokens: int) -> bool:
        """Count these tokens; return True where the choice's output continues at `offset`."""
        expected = self._next_offset.get(choice, 0)
        self._next_offset[choice] = offset + num_tokens
        self.tokens += num_tokens
        return offset == expected


class ReaderProcess:
    """All streams of one reader process."""

    def __init__(
        self,
        address: str,
        num_connections: int,
        requests: list[bytes],
        *,
        as_batch: bool = False,
        ca: Path | None = None,
    ) -> None:
        """
        Args:
            address: Address of the service.
            num_connections: Number of connections.
            requests: One serialized GenerateRequest per stream.
            as_batch: Send all of them as items of one GenerateBatch, on the first connection.
            ca: File of the certificates that sign the service's; None = plain text.
        """
        self._counts: Counter[str] = Counter()
        self._streams = [_Stream() for _ in requests]
        self._num_stalled = 0
        # Channels to one address share a connection, unless each has its own subchannel pool.
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.lookahead_bytes", STREAM_WINDOW),
            ("grpc.http2.bdp_probe", 0),
        ]
        credentials = None if ca is None else grpc.ssl_channel_credentials(ca.read_bytes())
        self._channels = [
            grpc.aio.insecure_channel(address, options=options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=options)
            for _ in range(num_connections)
        ]
        self._tasks = [
            asyncio.create_task(work)
            for work in ([self._read_batch(requests)] if as_batch else self._reads(requests))
        ]

    def _reads(self, requests: list[bytes]) -> list[Coroutine[None, None, None]]:
        return [
            self._read(self._channels[index % len(self._channels)], request, one)
            for index, (request, one) in enumerate(zip(requests, self._streams, strict=True))
        ]

    def obey(self, command: str) -> bytes | None:
        """Carry out a command; return the answer, or None to quit."""
        word, _, argument = command.partition(" ")
        match word:
            case "quit":
                return None
            case "stall":
                self._num_stalled = int(argument)
                for stream in self._stalled():
                    stream.is_readable.clear()
            case "resume":
                for stream in self._stalled():
                    stream.is_readable.set()
            case "report":
                pass
            case _:
                raise ValueError(f"no such command: {command}")
        return msgspec.json.encode(self._report()) + b"\n"

    async def close(self) -> None:
        """Cancel all streams and close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close(None) for channel in self._channels))

    async def _read(self, channel: grpc.aio.Channel, request: bytes, stream: _Stream) -> None:
        call: Any = channel.unary_stream(_METHOD, _as_is, _as_is)(request)
        try:
            async for message in call:
                self._count(message, stream)
                await stream.is_readable.wait()
            stream.status = "0"
        except grpc.aio.AioRpcError as error:
            stream.status = str(error.code().value[0])

    async def _read_batch(self, requests: list[bytes]) -> None:
        method: Any = self._channels[0].stream_stream(_BATCH_METHOD, None, _as_is)
        call = method()
        for first in range(0, len(requests), ITEMS_PER_MESSAGE):
            share = enumerate(requests[first : first + ITEMS_PER_MESSAGE], first)
            adding = GenerateBatchRequest(
                add=[
                    BatchItem(item=number, request=GenerateRequest.FromString(request))
                    for number, request in share
                ]
            )
            await call.write(adding.SerializeToString())
        try:
            async for message in call:
                self._counts["messages"] += 1
                for event in GenerateBatchResponse.FromString(message).events:
                    stream = self._streams[event.item]
                    self._count_event(event, stream)
                    if event.HasField("error"):
                        stream.status = str(Status.FromString(event.error).code)
        except grpc.aio.AioRpcError as error:
            for stream in self._streams:
                stream.status = stream.status or str(error.code().value[0])

    def _count(self, message: bytes, stream: _Stream) -> None:
        self._counts["messages"] += 1
        self._count_event(GenerateResponse.FromString(message), stream)

    def _count_event(self, response: GenerateResponse | BatchEvent, stream: _Stream) -> None:
        counts = self._counts
        match response.WhichOneof("event"):
            case "delta":
                delta = response.delta
                num_tokens = len(delta.token_ids)
                counts["deltas"] += 1
                counts["tokens"] += num_tokens
                counts["text_bytes"] += len(delta.text.encode())
                if not stream.is_next(delta.choice, delta.first_token_offset, num_tokens):
                    counts["bad_offsets"] += 1
            case "done":
                counts["done"] += 1
                counts["done_tokens"] += response.done.usage.output_tokens
            case "started" | "finished" as name:
                counts[name] += 1

    def _stalled(self) -> list[_Stream]:
        return self._streams[len(self._streams) - self._num_stalled :]

    def _report(self) -> ReadCounts:
        stalled = self._stalled()
        others = self._streams[: len(self._streams) - self._num_stalled]
        return ReadCounts(
            time_s=time.monotonic(),
            cpu_s=time.process_time(),
            streams=len(self._streams),
            stalled=self._num_stalled,
            stalled_tokens=sum(stream.tokens for stream in stalled),
            statuses=_statuses(others),
            stalled_statuses=_statuses(stalled),
            **self._counts,
        )


def _as_is(message: bytes) -> bytes:
    return message


def _statuses(streams: list[_Stream]) -> dict[str, int]:
    return dict(Counter(one.status for one in streams if one.status is not None))


def _read_requests(source: BinaryIO) -> list[bytes]:
    def number() -> int:
        found: int = struct.unpack("<I", source.read(4))[0]
        return found

    return [source.read(number()) for _ in range(number())]


async def _serve(address: str, num_connections: int, *, as_batch: bool, ca: Path | None) -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    requests = await asyncio.to_thread(_read_requests, source)
    reader = ReaderProcess(address, num_connections, requests, as_batch=as_batch, ca=ca)
    while line := await asyncio.to_thread(source.readline):
        answer = reader.obey(line.decode().strip())
        if answer is None:
            break
        sink.write(answer)
        sink.flush()
    await reader.close()


def main(arguments: list[str]) -> int:
    """Read until the command to quit or the end of the input; return the exit code."""
    further = arguments[2:]
    as_batch = further[:1] == ["batch"]
    files = further[as_batch:]
    are_right = len(files) <= 1 and all(one.startswith(_CA) for one in files)
    if not are_right or not arguments[1:2] or not arguments[1].isdecimal() or not int(arguments[1]):
        sys.stderr.write("usage: reader_process ADDRESS CONNECTIONS [batch] [ca=FILE]\n")
        return 2
    ca = Path(files[0].removeprefix(_CA)) if files else None
    asyncio.run(_serve(arguments[0], int(arguments[1]), as_batch=as_batch, ca=ca))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
