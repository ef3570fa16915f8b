"""A failure is what the service did: neither a late answer nor a status of gRPC's client is one."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest

from tandem.errors import InternalError
from tandem.status import to_grpc_status
from tests.faults.fuzz.calls import send_case
from tests.faults.fuzz.cases import Case
from tests.faults.fuzz.judge import HANGS, MAX_SHOWN, OK, End, Verdict, end_of, judge
from tests.one_method_server import OneMethodServer

METHOD = "/fuzz.Fake/Call"
CASE = Case("public", METHOD, b"", is_stream=False)
SHORT_S = 0.2
"""Deadline that is meant to pass."""
LONG_S = 60.0


@pytest.fixture
def judged():
    """Return the outcome of one case at a server whose n-th call is answered by `answer(n, …)`."""
    servers = []

    async def run(answer, *, patient_s=LONG_S, limit_s=LONG_S):
        calls = []

        def execute(requests, context):
            calls.append(list(requests))
            answer(len(calls), context)
            yield b""

        servers.append(OneMethodServer(METHOD, execute))
        async with grpc.aio.insecure_channel(servers[-1].address) as channel:
            outcome = await judge(
                [CASE],
                lambda case, limit: send_case(channel, case, limit),
                limit_s=limit_s,
                patient_s=patient_s,
            )
        return outcome, len(calls)

    yield run
    for server in servers:
        server.server.stop(None).wait()


def hold(context):
    """Return only when the call is over."""
    over = threading.Event()
    if context.add_callback(over.set):
        over.wait()


async def test_late_case_that_is_answered_alone_is_good(judged):
    """A case that misses its deadline beside others is sent again, and counts by that end."""
    outcome, num_calls = await judged(
        lambda nth, context: hold(context) if nth == 1 else None, limit_s=SHORT_S
    )
    assert {"OK": 1} == outcome.ends
    assert (1, 0) == (outcome.num_suspects, outcome.num_bad)
    assert num_calls == 2


async def test_case_that_never_ends_hangs(judged):
    """A case that does not end when it is sent again alone is a hang."""
    outcome, num_calls = await judged(
        lambda _, context: hold(context), limit_s=SHORT_S, patient_s=SHORT_S
    )
    assert {HANGS: 1} == outcome.ends
    assert [(HANGS, CASE)] == outcome.bad
    assert num_calls == 2


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
async def test_failure_without_details_that_the_server_sends_is_bad_at_once(judged, code):
    """INTERNAL and UNKNOWN that arrive are failures, and no second answer can excuse them."""
    outcome, num_calls = await judged(
        lambda nth, context: context.abort(code, "") if nth == 1 else None
    )
    assert 1 == sum(count for end, count in outcome.ends.items() if end.startswith(code.name))
    assert outcome.num_bad == 1
    assert num_calls == 1


async def test_typed_internal_error_is_bad_even_if_it_quotes_grpc(judged):
    """A typed INTERNAL is the service's, whatever its text."""
    status = to_grpc_status(InternalError("Internal error from Core"))
    outcome, num_calls = await judged(lambda _, context: context.abort_with_status(status))
    assert {"INTERNAL INTERNAL": 1} == outcome.ends
    assert outcome.num_bad == 1
    assert num_calls == 1


async def test_exception_of_a_handler_is_bad(judged):
    """A handler that raises ends the call UNKNOWN, which is a failure."""

    def raise_it(*_):
        raise RuntimeError

    outcome, _ = await judged(raise_it)
    assert outcome.num_bad == 1


def internal_of_client():
    """Return the error of gRPC's client where a write fails as the server has ended the call."""
    return grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        details="Internal error from Core",
        debug_error_string="Failed grpc_call_start_batch: 8",
    )


def test_internal_error_that_did_not_arrive_is_a_suspect():
    """A status that gRPC's client made says nothing of the service."""
    assert Verdict.SUSPECT is end_of(internal_of_client()).verdict


async def test_internal_error_that_the_client_makes_twice_is_bad():
    """A suspect that ends so again is a failure: an artefact of the client is not repeated."""
    end = end_of(internal_of_client())

    async def send(*_):
        return end

    outcome = await judge([CASE], send)
    assert [(end.name, CASE)] == outcome.bad


async def test_suspects_are_sent_alone_after_all_others():
    """A suspect is sent again when no other case is in flight."""
    in_flight, together, suspect = 0, [], Case("public", METHOD, b"suspect", is_stream=False)

    async def send(case, limit_s):
        nonlocal in_flight
        in_flight += 1
        await asyncio.sleep(0)
        if case is suspect:
            together.append((limit_s, in_flight))
        in_flight -= 1
        is_first = case is suspect and limit_s == SHORT_S
        return End(HANGS, Verdict.SUSPECT) if is_first else OK

    outcome = await judge(
        [CASE, suspect, *[CASE] * 20], send, at_once=4, limit_s=SHORT_S, patient_s=LONG_S
    )
    assert (LONG_S, 1) == together[1]
    assert {"OK": 22} == outcome.ends


async def test_suspects_after_many_hangs_are_not_waited_for():
    """A service that answers nothing any more costs a bounded number of long deadlines."""
    deadlines = []

    async def send(_, limit_s):
        deadlines.append(limit_s)
        return End(HANGS, Verdict.SUSPECT)

    outcome = await judge([CASE] * 50, send, limit_s=SHORT_S, patient_s=LONG_S)
    assert outcome.num_bad == 50
    assert deadlines.count(LONG_S) == MAX_SHOWN
