"""
Process that reads many streams at once with as little work as can be, over HTTP or over gRPC.

    python -m tests.bench.gateway.raw_reader http|grpc ADDRESS NUM_STREAMS NUM_TOKENS

It prints one line of JSON. While time is taken it only keeps the bytes of each socket and looks for
the end of its stream; what was read is decoded afterwards. gRPC is spoken on a plain socket too,
without flow control, as a Python client would cost several times what it reads.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import sys
import time

from tandem.inference.v1.inference_service_pb2 import DESCRIPTOR, GenerateResponse
from tandem_client.request import build_request

PROMPT = "def fibonacci(n):"
READ_BYTES = 1 << 16
SILENCE_S = 120
HTTP_END = b"data: [DONE]\n\n"

METHOD = f"/{DESCRIPTOR.services_by_name['InferenceService'].full_name}/Generate"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
LARGEST_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = (1 << 16) - 1
FRAME_HEAD_BYTES, MESSAGE_HEAD_BYTES = 9, 5


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def literal(index_or_name: int | bytes, value: bytes) -> bytes:
    """Return a header of HTTP/2 without compression; its name by its index or in full."""
    if isinstance(index_or_name, int):
        name = bytes([index_or_name])
    else:
        name = bytes([0, len(index_or_name)]) + index_or_name
    return name + bytes([len(value)]) + value


class HttpStream:
    """Stream of /v1/completions on a connection of its own."""

    def __init__(self, address: str, num_tokens: int, seed: int) -> None:
        options = {"max_tokens": num_tokens, "ignore_eos": True, "seed": seed}
        self._num_tokens = num_tokens
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"prompt": PROMPT, **options, **usage}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body
        self.socket = connected(address)
        self._read = bytearray()

    def takes(self, part: bytes) -> bool:
        """Keep what was read; return True at the end of the stream."""
        self._read += part
        return self._read.endswith(b"0\r\n\r\n")

    def num_messages(self) -> int:
        """Return the number of events with text, after a check of the whole answer."""
        assert HTTP_END in self._read, self._read[-500:]
        assert b'"completion_tokens":%d,' % self._num_tokens in self._read, self._read[-500:]
        return self._read.count(b'"text":')


class GrpcStream:
    """Stream of Generate on a connection of its own."""

    def __init__(self, address: str, num_tokens: int, seed: int) -> None:
        self._num_tokens = num_tokens
        options = {"max_tokens": num_tokens, "ignore_eos": True, "seed": seed}
        message = build_request(PROMPT, options).SerializeToString()  # type: ignore[arg-type]  # GenerateOptions
        post, plain_http, path, authority = 0x83, 0x86, 4, 1
        headers = bytes([post, plain_http]) + literal(path, METHOD.encode())
        headers += literal(authority, b"x") + literal(b"te", b"trailers")
        headers += literal(b"content-type", b"application/grpc")
        setting = struct.pack(">HI", INITIAL_WINDOW_SIZE, LARGEST_WINDOW)
        window = struct.pack(">I", LARGEST_WINDOW - DEFAULT_WINDOW)
        self.request = (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(SETTINGS, 0, 0, setting)
            + frame(WINDOW_UPDATE, 0, 0, window)
            + frame(HEADERS, END_HEADERS, 1, headers)
            + frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, len(message)) + message)
        )
        self.socket = connected(address)
        self._read = bytearray()
        self._next_frame = 0
        self._payloads: list[tuple[int, int]] = []
        """Begin and end of the messages' bytes in what was read."""

    def takes(self, part: bytes) -> bool:
        """Keep what was read and answer the server's questions; return True at the end."""
        self._read += part
        while len(self._read) >= self._next_frame + FRAME_HEAD_BYTES:
            first = self._next_frame + FRAME_HEAD_BYTES
            head = self._read[self._next_frame : first]
            end = first + int.from_bytes(head[:3], "big")
            if len(self._read) < end:
                break
            self._next_frame = end
            kind, flags = head[3], head[4]
            if kind == DATA:
                self._payloads.append((first, end))
            elif kind in (SETTINGS, PING) and not flags & ACK:
                answer = bytes(self._read[first:end]) if kind == PING else b""
                self.socket.sendall(frame(kind, ACK, 0, answer))
            elif kind == HEADERS and flags & END_STREAM:
                return True
        return False

    def num_messages(self) -> int:
        """Return the number of Deltas, after a check of the whole answer."""
        read = b"".join(self._read[first:end] for first, end in self._payloads)
        at, messages = 0, []
        while at < len(read):
            first = at + MESSAGE_HEAD_BYTES
            at = first + int.from_bytes(read[at + 1 : first], "big")
            messages.append(GenerateResponse.FromString(read[first:at]))
        assert messages[-1].done.usage.output_tokens == self._num_tokens, messages[-1]
        return sum(one.HasField("delta") for one in messages)


def connected(address: str) -> socket.socket:
    """Return a connection to host:port."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def read_all(streams: list[HttpStream] | list[GrpcStream]) -> None:
    """Send all requests and read all streams to their ends."""
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            stream.socket.sendall(stream.request)
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(SILENCE_S)
            assert ready, "nothing came for too long"
            for key, _ in ready:
                part = key.data.socket.recv(READ_BYTES)
                if key.data.takes(part):
                    selector.unregister(key.data.socket)
                else:
                    assert part, "a stream ended too early"


def main() -> None:
    """Read the streams, and print the time that they took, the CPU time and the messages."""
    kind, address, num_streams, num_tokens = sys.argv[1:]
    make = {"http": HttpStream, "grpc": GrpcStream}[kind]
    streams = [make(address, int(num_tokens), seed) for seed in range(int(num_streams))]
    started_s, before_s = time.monotonic(), time.process_time()
    read_all(streams)
    took_s, cpu_s = time.monotonic() - started_s, time.process_time() - before_s
    num_messages = sum(stream.num_messages() for stream in streams)
    print(json.dumps({"took_s": took_s, "cpu_s": cpu_s, "messages": num_messages}))


if __name__ == "__main__":
    main()
