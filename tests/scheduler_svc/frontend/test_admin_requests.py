"""Operators' view of requests and the prefix cache, the core played by the test."""

import json

import grpc
import pytest

from scheduler_svc.core.request.request import RequestState
from scheduler_svc.ipc.snapshot import (
    BlockCounts,
    EventEntry,
    EventList,
    FlushResult,
    RequestList,
    RequestSummary,
    SuspendResult,
    encode_json,
)
from tandem.admin.v1 import admin_service_pb2 as pb
from tandem.admin.v1 import requests_pb2 as requests
from tandem.admin.v1.admin_service_pb2_grpc import AdminServiceStub
from tandem.errors import EventsNotTracked, NoExecutor, RequestNotFound
from tests.scheduler_svc.frontend.calls import error_of
from tests.scheduler_svc.frontend.fake_core import within


@pytest.fixture
async def admin(frontend):
    async with grpc.aio.insecure_channel(frontend.servers.admin_address) as channel:
        yield AdminServiceStub(channel)


def summary(**changes: object) -> dict[str, object]:
    return {
        "request_id": "mine",
        "choice": 1,
        "state": "decode",
        "tenant": "alice",
        "priority": -2,
        "prompt_tokens": 10,
        "output_tokens": 3,
        "cached_tokens": 8,
        "age_s": 1.5,
        "preemptions": 1,
        "time_to_first_token_s": 0.5,
    } | changes


class TestListRequests:
    async def test_every_fact_is_passed_on(self, frontend, admin):
        """
        ListRequests has all that the core says of a choice, and how many choices there are.
        """
        waiting = summary(state="waiting", time_to_first_token_s=None)
        listed = RequestList(
            requests=(RequestSummary(**summary()), RequestSummary(**waiting)), total=7
        )
        frontend.core.answers["requests"] = lambda _: encode_json(listed)
        answer = await within(admin.ListRequests(requests.ListRequestsRequest()))
        expected = [
            requests.RequestSummary(**(fields | {"state": state}))
            for fields, state in (
                (summary(), requests.REQUEST_STATE_DECODE),
                (waiting, requests.REQUEST_STATE_WAITING),
            )
        ]
        assert (expected, 7) == (list(answer.requests), answer.total)
        assert not answer.requests[1].HasField("time_to_first_token_s")

    @pytest.mark.parametrize(
        ("sent", "asked"),
        [
            ({}, {"page_size": 100, "after": -1, "tenant": None, "states": []}),
            (
                {"page_size": 5, "page_token": "7", "tenant": "", "states": [1, 3]},
                {"page_size": 5, "after": 7, "tenant": "", "states": ["waiting", "decode"]},
            ),
        ],
    )
    async def test_choice_reaches_the_core(self, frontend, admin, sent, asked):
        """
        The core is told which requests to list; an empty tenant is one, an unset one means all.
        """
        arguments = []

        def answer(argument: bytes) -> bytes:
            arguments.append(json.loads(argument))
            return encode_json(RequestList(requests=(), total=0))

        frontend.core.answers["requests"] = answer
        await within(admin.ListRequests(requests.ListRequestsRequest(**sent)))
        assert [asked] == arguments

    @pytest.mark.parametrize(
        ("sent", "field"),
        [
            ({"page_size": 0}, "page_size"),
            ({"page_size": 10_001}, "page_size"),
            ({"page_token": "seven"}, "page_token"),
            ({"page_token": "\u0667"}, "page_token"),
            ({"page_token": "9" * 19}, "page_token"),
            ({"tenant": "x" * 129}, "tenant"),
            ({"tenant": "\x1b[2J"}, "tenant"),
            ({"states": [1, 0]}, "states[1]"),
            ({"states": [99]}, "states[0]"),
        ],
    )
    async def test_bad_choice_is_refused(self, admin, sent, field):
        """
        A filter out of range is INVALID_PARAMETER with the field's path.
        """
        error = await error_of(admin.ListRequests(requests.ListRequestsRequest(**sent)))
        assert ("INVALID_PARAMETER", field) == (error.reason, error.field)

    def test_contract_names_every_state_of_a_live_request(self):
        """
        Each state in which the core can list a request has its number in the contract.
        """
        known = {name.removeprefix("REQUEST_STATE_") for name in requests.RequestState.keys()}  # noqa: SIM118  # no dict
        listed = {state.name for state in RequestState if state is not RequestState.ENDED}
        assert listed <= known


class TestGetRequestEvents:
    @pytest.mark.slow
    async def test_events_are_passed_on(self, frontend, admin):
        """
        Events come in the core's order with everything that it kept.
        """
        token = EventEntry(
            kind=3,
            choice=1,
            at_s=0.25,
            token_id=70,
            blocks=BlockCounts(used_blocks=1, cached_blocks=2, free_blocks=3),
            detail="",
            time_to_first_token_s=None,
            dropped_events=4,
        )
        end = EventEntry(
            kind=7,
            choice=1,
            at_s=0.5,
            token_id=None,
            blocks=None,
            detail="EOS",
            time_to_first_token_s=0.25,
            dropped_events=0,
        )
        asked = []

        def answer(argument: bytes) -> bytes:
            asked.append(json.loads(argument))
            return encode_json(EventList((token, end)))

        frontend.core.answers["events"] = answer
        found = await within(
            admin.GetRequestEvents(requests.GetRequestEventsRequest(request_id="mine"))
        )
        assert [{"request_id": "mine", "tenant": None}] == asked
        first, last = found.events
        assert ("REQUEST_EVENT_KIND_GENERATED_TOKEN", 70, 2, 4) == (
            requests.RequestEventKind.Name(first.kind),
            first.token_id,
            first.blocks.cached_blocks,
            first.dropped_events,
        )
        assert ("REQUEST_EVENT_KIND_FINISH", "EOS", 0.25) == (
            requests.RequestEventKind.Name(last.kind),
            last.detail,
            last.time_to_first_token_s,
        )
        assert not last.HasField("token_id")
        assert not first.HasField("time_to_first_token_s")

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (EventsNotTracked("not kept"), "FAILED_PRECONDITION"),
            (RequestNotFound("gone", field="request_id"), "NOT_FOUND"),
        ],
    )
    async def test_core_refusals_are_passed_on(self, frontend, admin, error, code):
        """
        The core's refusals, as of an unknown request or if tracking is off, arrive as typed errors.
        """
        frontend.core.answers["events"] = lambda _: error
        found = await error_of(
            admin.GetRequestEvents(requests.GetRequestEventsRequest(request_id="mine"))
        )
        assert (error.reason, code) == (found.reason, found.code)

    @pytest.mark.parametrize("request_id", ["", "x" * 129])
    async def test_senseless_id_is_refused(self, admin, request_id):
        """
        An id that no request can have is INVALID_PARAMETER.
        """
        found = await error_of(
            admin.GetRequestEvents(requests.GetRequestEventsRequest(request_id=request_id))
        )
        assert ("INVALID_PARAMETER", "request_id") == (found.reason, found.field)


class TestFlushPrefixCache:
    async def test_flush_says_what_it_freed(self, frontend, admin):
        """
        FlushPrefixCache asks the core and returns its count.
        """
        frontend.core.answers["flush"] = lambda _: encode_json(FlushResult(12))
        answer = await within(admin.FlushPrefixCache(pb.FlushPrefixCacheRequest()))
        assert 12 == answer.freed_blocks


class TestSuspend:
    @pytest.mark.parametrize(
        ("sent", "asked"),
        [({}, 1), ({"kv_mode": 0}, 1), ({"kv_mode": 2}, 2), ({"kv_mode": 3}, 3)],
    )
    async def test_mode_reaches_the_core(self, frontend, admin, sent, asked):
        """
        The core is told what happens to the KV cache: it is kept if the call does not say.
        """
        arguments = []

        def answer(argument: bytes) -> bytes:
            arguments.append(json.loads(argument))
            return encode_json(SuspendResult(77))

        frontend.core.answers["suspend"] = answer
        assert 77 == (await within(admin.Suspend(pb.SuspendRequest(**sent)))).device_memory_bytes
        assert [{"kv_mode": asked}] == arguments

    async def test_unknown_mode_is_refused(self, admin):
        """
        A mode that does not exist is INVALID_PARAMETER.
        """
        error = await error_of(admin.Suspend(pb.SuspendRequest(kv_mode=9)))
        assert ("INVALID_PARAMETER", "kv_mode") == (error.reason, error.field)

    async def test_no_executor_is_passed_on(self, frontend, admin):
        """
        Suspend without an executor is UNAVAILABLE with retry advice.
        """
        frontend.core.answers["suspend"] = lambda _: NoExecutor("none")
        error = await error_of(admin.Suspend(pb.SuspendRequest()))
        assert ("NO_EXECUTOR", "UNAVAILABLE", 1.0) == (
            error.reason,
            error.code,
            error.retry_after_s,
        )

    async def test_resume_asks_the_core(self, frontend, admin):
        """
        Resume returns once the core says so.
        """
        frontend.core.answers["resume"] = lambda _: encode_json(SuspendResult(0))
        assert pb.ResumeResponse() == await within(admin.Resume(pb.ResumeRequest()))
