"""Attacks on a port that speaks HTTP/2: recorded calls that are changed, and abuse of frames."""

from __future__ import annotations

import dataclasses
import random
import ssl
from collections.abc import Callable, Mapping, Sequence

from tests.faults.fuzz.messages import changed
from tests.faults.fuzz.tcp import frames
from tests.faults.fuzz.tcp.frames import PREFACE, Frame, call_headers, encode, header_block, number

HIGHEST = 2**31 - 1
HELLO = PREFACE + encode([frames.setting(())])
"""Beginning of a connection, as short as it can be."""


def times(draw: random.Random, most: int) -> int:
    """Return a number of repetitions up to `most`: few as a rule, so that floods stay rare."""
    return max(1, int(most ** draw.random()))


def attack(recorded: Sequence[bytes], path: bytes, draw: random.Random) -> tuple[str, bytes]:
    """
    Return the name of an attack and its bytes.

    Args:
        recorded: What clients have sent on whole connections to this port.
        path: A method of the port.
        draw: Source of what is random.
    """
    if draw.random() < CHANGED_SHARE:
        name = draw.choice(tuple(_CHANGES))
        return name, _CHANGES[name](draw.choice(recorded), draw)
    name = draw.choice(tuple(_ABUSES))
    return name, _ABUSES[name](path, draw)


CHANGED_SHARE = 0.5


def _garbage(_: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(300))


def _preface_changed(raw: bytes, draw: random.Random) -> bytes:
    return changed(PREFACE, draw) + raw[len(PREFACE) :]


def _truncated(raw: bytes, draw: random.Random) -> bytes:
    return raw[: draw.randrange(len(raw))]


def _bytes_changed(raw: bytes, draw: random.Random) -> bytes:
    begin = len(HELLO) + 40
    return raw[:begin] + changed(raw[begin:], draw)


def _frames_changed(raw: bytes, draw: random.Random) -> bytes:
    found = frames.parse(raw[len(PREFACE) :])
    for _ in range(draw.choice((1, 1, 2, 4)) if found else 0):
        at = draw.randrange(len(found))
        one = found[at]
        match draw.randrange(7):
            case 0 if len(found) > 1:
                del found[at]
            case 1:
                found.insert(draw.randrange(len(found) + 1), one)
            case 2:
                found[at] = dataclasses.replace(one, kind=draw.choice((*range(12), 255)))
            case 3:
                found[at] = dataclasses.replace(one, flags=draw.randrange(256))
            case 4:
                stream = draw.choice((0, 1, 2, 3, 5, HIGHEST, 2**32 - 1))
                found[at] = dataclasses.replace(one, stream=stream)
            case 5:
                length = max(0, len(one.payload) + draw.choice((-1, 1, 9, 2**14, 2**23)))
                found[at] = dataclasses.replace(one, length=length)
            case _:
                found[at] = dataclasses.replace(one, payload=changed(one.payload, draw))
    return PREFACE + encode(found)


def _replayed(raw: bytes, _: random.Random) -> bytes:
    return raw


_CHANGES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "garbage": _garbage,
    "preface changed": _preface_changed,
    "truncated": _truncated,
    "bytes changed": _bytes_changed,
    "bytes changed twice": lambda raw, draw: _bytes_changed(_bytes_changed(raw, draw), draw),
    "frames changed": _frames_changed,
    "frames changed more": lambda raw, draw: _frames_changed(_frames_changed(raw, draw), draw),
    "replayed": _replayed,
}


def _settings_flood(_: bytes, draw: random.Random) -> bytes:
    frame = frames.setting(((draw.randrange(1, 7), draw.randrange(2**14, 2**16)),)).encode()
    return HELLO + frame * times(draw, 2_000)


def _settings_values(_: bytes, draw: random.Random) -> bytes:
    values = [
        (draw.randrange(10), draw.choice((0, 1, 2**14, 2**24, HIGHEST, 2**32 - 1)))
        for _ in range(draw.randrange(8))
    ]
    return PREFACE + encode([frames.setting(values), frames.setting((), frames.ACK)])


def _pings(_: bytes, draw: random.Random) -> bytes:
    return HELLO + Frame(frames.PING, 0, 0, draw.randbytes(8)).encode() * times(draw, 2_000)


def _opened(path: bytes, stream: int, flags: int = frames.END_HEADERS) -> Frame:
    return Frame(frames.HEADERS, flags, stream, header_block(call_headers(path)))


def _headers_oversized(path: bytes, draw: random.Random) -> bytes:
    size = draw.choice((100, 8_000, 16_000, 100_000, 300_000))
    many = {b"x-%d" % at: b"v" * 1000 for at in range(size // 1000)}
    block = header_block(call_headers(path) | {b"x": b"v" * (size % 1000)} | many)
    pieces = [block[at : at + 2**14] for at in range(0, len(block), 2**14)]
    sent = [Frame(frames.HEADERS, 0, 1, pieces[0])]
    sent += [Frame(frames.CONTINUATION, 0, 1, piece) for piece in pieces[1:]]
    sent[-1] = dataclasses.replace(sent[-1], flags=frames.END_HEADERS)
    return HELLO + encode(sent)


def _continuations(path: bytes, draw: random.Random) -> bytes:
    payload = draw.choice((b"", header_block({b"x": b"y"}), header_block({b"x": b"y" * 4000})))
    flood = Frame(frames.CONTINUATION, 0, 1, payload).encode() * times(draw, 3_000)
    return HELLO + _opened(path, 1, flags=0).encode() + flood[: 2**20]


def _rapid_resets(path: bytes, draw: random.Random) -> bytes:
    reset = number(draw.choice((0, 8, 99)))
    return HELLO + encode(
        frame
        for stream in range(1, 2 * times(draw, 500), 2)
        for frame in (_opened(path, stream), Frame(frames.RST_STREAM, 0, stream, reset))
    )


def _streams(path: bytes, draw: random.Random) -> bytes:
    flags = draw.choice((frames.END_HEADERS, frames.END_HEADERS | frames.END_STREAM))
    return HELLO + encode(
        _opened(path, stream, flags) for stream in range(1, 2 * times(draw, 500), 2)
    )


def _windows(path: bytes, draw: random.Random) -> bytes:
    stream = draw.choice((0, 0, 1, 3))
    update = Frame(frames.WINDOW_UPDATE, 0, stream, number(draw.choice((0, 1, HIGHEST, 2**32 - 1))))
    return HELLO + _opened(path, 1).encode() + update.encode() * times(draw, 1_000)


def _goaways(path: bytes, draw: random.Random) -> bytes:
    away = Frame(frames.GOAWAY, 0, 0, number(draw.choice((0, 1, HIGHEST))) + number(11) + b"bye")
    return HELLO + encode([_opened(path, 1), *[away] * times(draw, 50), _opened(path, 3)])


def _priorities(path: bytes, draw: random.Random) -> bytes:
    stream = draw.choice((1, 3))
    payload = number(draw.choice((0, 1, 3, 2**31 + 1))) + b"\xff"
    frame = Frame(frames.PRIORITY, 0, stream, payload).encode()
    return HELLO + _opened(path, 1).encode() + frame * times(draw, 1_000)


def _promises(path: bytes, draw: random.Random) -> bytes:
    payload = number(2) + header_block(call_headers(path))
    kind = draw.choice((frames.PUSH_PROMISE, 10, 200))
    return HELLO + Frame(kind, frames.END_HEADERS, 1, payload).encode()


def _data(path: bytes, draw: random.Random) -> bytes:
    head = draw.choice((b"\x00", b"\x01", b"\x7f")) + number(
        draw.choice((0, 1, 5, 2**20, HIGHEST, 2**32 - 1))
    )
    flags = draw.choice((0, frames.END_STREAM, frames.PADDED, frames.PADDED | frames.END_STREAM))
    payload = head + draw.randbytes(draw.randrange(100))
    data = Frame(frames.DATA, flags, draw.choice((1, 1, 1, 3, 2, 0)), payload)
    return HELLO + encode([_opened(path, 1), *[data] * times(draw, 100)])


def _headers_wrong(path: bytes, draw: random.Random) -> bytes:
    headers = call_headers(path)
    for _ in range(draw.choice((1, 1, 3))):
        name = draw.choice((*headers, b"Upper", b"", b":new", b"grpc-timeout", b"grpc-encoding"))
        if draw.random() < 0.3:
            headers.pop(name, None)
        else:
            headers[name] = draw.choice((b"", b"x", b"\x00\n", b"gzip", b"1S", b"-1m", b"9" * 99))
    flags = frames.END_HEADERS | draw.choice((0, frames.END_STREAM))
    return HELLO + Frame(frames.HEADERS, flags, 1, header_block(headers)).encode()


def _block_wrong(path: bytes, draw: random.Random) -> bytes:
    block = header_block(call_headers(path))
    wrong = draw.choice(
        (
            frames.prefixed(draw.choice((0, 62, 2**20, 2**40)), 7, 0x80),  # index
            frames.prefixed(draw.choice((0, 4096, 2**31, 2**63)), 5, 0x20),  # size of the table
            b"\x40" + b"\x01a" + frames.prefixed(2**31, 7),  # text that is longer than the block
            b"\x00\x01a\x84" + b"\xff" * 4,  # Huffman code of no text
            (b"\x40\x01a" + frames.prefixed(200, 7) + b"v" * 200) + b"\xbe" * times(draw, 16_000),
        )
    )
    return HELLO + Frame(frames.HEADERS, frames.END_HEADERS, 1, block + wrong).encode()


def _tls_hello(_: bytes, draw: random.Random) -> bytes:
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context()
    hello = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    try:
        hello.do_handshake()
    except ssl.SSLWantReadError:
        raw = outgoing.read()
    return raw if draw.random() < 0.5 else changed(raw, draw)


def _http1(path: bytes, _: random.Random) -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello"


_ABUSES: Mapping[str, Callable[[bytes, random.Random], bytes]] = {
    "SETTINGS flood": _settings_flood,
    "SETTINGS values": _settings_values,
    "PING flood": _pings,
    "HEADERS oversized": _headers_oversized,
    "CONTINUATION flood": _continuations,
    "rapid reset": _rapid_resets,
    "many streams": _streams,
    "WINDOW_UPDATE overflow": _windows,
    "GOAWAY": _goaways,
    "PRIORITY": _priorities,
    "PUSH_PROMISE": _promises,
    "DATA": _data,
    "headers wrong": _headers_wrong,
    "header block wrong": _block_wrong,
    "TLS hello": _tls_hello,
    "HTTP/1": _http1,
}
