"""Attacks on a port that speaks HTTP/1.1: valid requests that are changed, and abuse of framing."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from tests.faults.fuzz.messages import changed
from tests.faults.fuzz.tcp.frames import PREFACE
from tests.faults.fuzz.tcp.http2 import times

COMPLETION = b'{"prompt": "hello", "max_tokens": 1}'
HOST = b"Host: localhost\r\n"


def request(line: bytes, body: bytes = b"", headers: bytes = b"") -> bytes:
    """Return a request; one with a body says its length and type."""
    if body:
        headers += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    return line + b" HTTP/1.1\r\n" + HOST + headers + b"\r\n" + body


GATEWAY = (
    request(b"POST /v1/completions", COMPLETION),
    request(b"POST /v1/completions", COMPLETION[:-1] + b', "stream": true}'),
    request(b"POST /v1/chat/completions", b'{"messages": [], "max_tokens": 1}'),
    request(b"POST /tokenize", b'{"prompt": "hello"}'),
    request(b"GET /v1/models"),
    request(b"GET /health"),
    request(b"GET /metrics"),
)
METRICS = (request(b"GET /metrics"), request(b"GET /metrics?x=1", headers=b"Accept: */*\r\n"))


def attack(valid: Sequence[bytes], draw: random.Random) -> tuple[str, bytes]:
    """
    Return the name of an attack and its bytes.

    Args:
        valid: Requests that the port serves.
        draw: Source of what is random.
    """
    name = draw.choice(tuple(_ATTACKS))
    return name, _ATTACKS[name](draw.choice(valid), draw)


def _garbage(_: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(300)) + draw.choice((b"", b"\r\n\r\n"))


def _truncated(raw: bytes, draw: random.Random) -> bytes:
    return raw[: draw.randrange(len(raw))]


def _head_changed(raw: bytes, draw: random.Random) -> bytes:
    head, blank, body = raw.partition(b"\r\n\r\n")
    return changed(head, draw) + blank + body


def _header_values(raw: bytes, draw: random.Random) -> bytes:
    line, _, rest = raw.partition(b"\r\n")
    value = draw.choice((b"", b"x", b"\xff\xfe", b"\x00", b"y" * times(draw, 60_000)))
    name = draw.choice(_NAMES)
    return line + b"\r\n" + (name + b": " + value + b"\r\n") * times(draw, 50) + rest


_NAMES = (
    b"Authorization",
    b"X-Request-Id",
    b"Idempotency-Key",
    b"Accept-Encoding",
    b"Content-Encoding",
    b"Content-Type",
    b"traceparent",
    b"tracestate",
    b"Cookie",
    b"Range",
    b"Host",
)


def _lengths(raw: bytes, draw: random.Random) -> bytes:
    wrong = draw.choice((b"-1", b"0", b"1", b"+5", b"5 5", b"0x5", b"9" * 30, b"1000000", b"\xb2"))
    line, _, rest = raw.partition(b"\r\n")
    return line + b"\r\nContent-Length: " + wrong + b"\r\n" + rest


def _chunks(raw: bytes, draw: random.Random) -> bytes:
    body = b"".join(
        draw.choice((b"5\r\nhello\r\n", b"0\r\n\r\n", b"g\r\n", b"f" * 20 + b"\r\n", b"-1\r\n\r\n"))
        for _ in range(draw.randrange(1, 5))
    )
    coding = draw.choice((b"chunked", b"chunked, chunked", b"gzip", b"identity", b" chunked"))
    line = raw.partition(b"\r\n")[0]
    both = draw.choice((b"", b"Content-Length: 3\r\n"))
    return line + b"\r\n" + HOST + both + b"Transfer-Encoding: " + coding + b"\r\n\r\n" + body


def _pipelined(raw: bytes, draw: random.Random) -> bytes:
    return raw * times(draw, 30)


def _long_line(raw: bytes, draw: random.Random) -> bytes:
    method, _, rest = raw.partition(b" ")
    path = b"/" + draw.choice((b"a", b"%00", b"../", b"?x=1&", b"\xc3")) * times(draw, 20_000)
    return method + b" " + path + b" " + rest.partition(b" ")[2]


def _many_headers(raw: bytes, draw: random.Random) -> bytes:
    line, _, rest = raw.partition(b"\r\n")
    many = b"".join(b"X-%d: y\r\n" % at for at in range(times(draw, 3_000)))
    return line + b"\r\n" + many + rest


def _wrong_line(raw: bytes, draw: random.Random) -> bytes:
    line = draw.choice(
        (
            b"BREW /v1/models HTTP/1.1",
            b"GET /v1/models HTTP/9.9",
            b"GET /v1/models",
            b"GET  HTTP/1.1",
            b"OPTIONS * HTTP/1.1",
            b"CONNECT localhost:1 HTTP/1.1",
            b"TRACE / HTTP/1.1",
            b"HEAD /metrics HTTP/1.1",
            b"GET http://other/metrics HTTP/1.0",
            b"DELETE /v1/models/%ff%00 HTTP/1.1",
            b"PUT /v1/models/../../etc HTTP/1.1",
        )
    )
    return line + raw[raw.index(b"\r\n") :]


def _upgrades(raw: bytes, draw: random.Random) -> bytes:
    line, _, rest = raw.partition(b"\r\n")
    kind = draw.choice((b"websocket", b"h2c", b"x"))
    extra = b"Connection: Upgrade\r\nUpgrade: " + kind + b"\r\nSec-WebSocket-Key: YQ==\r\n"
    return line + b"\r\n" + extra + b"Sec-WebSocket-Version: 13\r\n" + rest


def _expects(raw: bytes, _: random.Random) -> bytes:
    return raw.replace(HOST, HOST + b"Expect: 100-continue\r\n", 1)


def _line_ends(raw: bytes, draw: random.Random) -> bytes:
    return raw.replace(b"\r\n", draw.choice((b"\n", b"\r", b"\r\n ")), draw.choice((1, 2, -1)))


_ATTACKS: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "garbage": _garbage,
    "truncated": _truncated,
    "head changed": _head_changed,
    "whole changed": changed,
    "header values": _header_values,
    "lengths": _lengths,
    "chunks": _chunks,
    "pipelined": _pipelined,
    "long line": _long_line,
    "many headers": _many_headers,
    "wrong line": _wrong_line,
    "upgrades": _upgrades,
    "expects": _expects,
    "line ends": _line_ends,
    "replayed": lambda raw, _: raw,
    "HTTP/2": lambda raw, _: PREFACE + raw,
}
