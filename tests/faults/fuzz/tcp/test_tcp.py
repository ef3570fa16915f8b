"""Attacks over TCP are what they say, and a server that does not bear them is found."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import asynccontextmanager

import pytest

from tests.faults.fuzz.judge import judge
from tests.faults.fuzz.tcp import frames
from tests.faults.fuzz.tcp.case import Manner, TcpCase
from tests.faults.fuzz.tcp.frames import PREFACE, Frame, encode, is_answered, parse, setting
from tests.faults.fuzz.tcp.http1 import GATEWAY
from tests.faults.fuzz.tcp.recording import CALLS
from tests.faults.fuzz.tcp.run import draw_cases, find_broken, send_case

CALL = PREFACE + encode(
    [
        setting(()),
        Frame(
            frames.HEADERS,
            frames.END_HEADERS,
            1,
            frames.header_block(frames.call_headers(b"/fuzz.Fake/Call")),
        ),
        Frame(frames.DATA, frames.END_STREAM, 1, b"\x00" * 5),
    ]
)
SHORT_S = 0.2
"""Deadline that is meant to pass."""


@asynccontextmanager
async def serving(connected):
    """Give the address of a server that hands its connections to `connected`."""
    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_frames_that_are_encoded_parse_to_themselves():
    """Whole frames are found again, and one that is cut short is left out."""
    found = [setting([(4, 65_535)]), Frame(frames.PING, 0, 0, b"12345678"), Frame(99, 7, 5)]
    assert found == parse(encode(found))
    assert found[:2] == parse(encode(found)[:-1])


@pytest.mark.parametrize(
    ("sent", "expected"),
    [([], False), ([setting(())], False), ([setting(()), setting((), frames.ACK)], True)],
    ids=["nothing", "own-settings", "acknowledgement"],
)
def test_only_an_answer_shows_that_the_preface_was_decoded(sent, expected):
    """Settings that each connection gets prove nothing; the acknowledgement of ours does."""
    assert expected is is_answered(encode(sent))


@pytest.mark.parametrize(("value", "expected"), [(10, b"\x0a"), (1337, b"\x1f\x9a\x0a")])
def test_integers_are_those_of_the_standard(value, expected):
    """RFC 7541, C.1: 10 and 1337 in five bits."""
    assert expected == frames.prefixed(value, 5)


@pytest.mark.slow
def test_every_port_gets_attacks_and_the_same_seed_draws_the_same():
    """All ports and manners occur, and a failure can be drawn again."""
    ports, recorded = [*CALLS, "http", "metrics"], {port: [CALL] for port in CALLS}
    drawn = [
        list(itertools.islice(draw_cases(ports, recorded, random.Random(3)), 1_000))
        for _ in range(2)
    ]
    assert set(ports) == {case.port for case in drawn[0]}
    assert set(Manner) == {case.manner for case in drawn[0]}
    # A client hello of TLS has random bytes of its own.
    first, again = ([case for case in cases if case.method != "TLS hello"] for cases in drawn)
    assert [case.method for case in first][:100] == [case.method for case in again][:100]


@pytest.mark.slow
async def test_server_that_never_closes_a_finished_connection_hangs():
    """A connection whose other side has ended has to be closed."""
    judged = asyncio.Event()

    async def connected(reader, writer):
        await reader.read()
        await judged.wait()
        writer.close()  # since Python 3.12 a server waits for its connections when it closes

    async with serving(connected) as address:
        case = TcpCase("http", "replayed", GATEWAY[0], is_stream=False)
        outcome = await judge(
            [case],
            lambda one, limit_s: send_case(address, one, limit_s),
            limit_s=SHORT_S,
            patient_s=SHORT_S,
        )
        judged.set()
    assert [("not closed", case)] == outcome.bad


async def test_port_where_nothing_listens_is_broken():
    """A refused connection is a failure of a case, and of the real request in between."""
    async with serving(lambda *_: None) as address:
        pass
    case = TcpCase("metrics", "replayed", GATEWAY[-1], is_stream=False)
    outcome = await judge([case], lambda one, limit_s: send_case(address, one, limit_s))
    assert [("ConnectionRefusedError", case)] == outcome.bad
    assert ["metrics"] == [line.split(":")[0] for line in await find_broken({"metrics": address})]


async def test_server_that_answers_another_page_is_broken():
    """A port has to serve its real request, not only to accept connections."""

    async def connected(_, writer):
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with serving(connected) as address:
        assert ["metrics: 503"] == await find_broken({"metrics": address})
