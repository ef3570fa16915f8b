"""AdminService.Profile, the core and the executor played by the test."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from scheduler_svc.frontend.operators import profile as frontend_profile
from scheduler_svc.ipc.snapshot import ExecutorInUse, encode_json
from tandem.admin.v1 import admin_service_pb2 as pb
from tandem.admin.v1.admin_service_pb2_grpc import AdminServiceStub
from tandem.common.v1.profile_pb2 import ProfileOptions, ProfileProgress, TraceChunk
from tandem.errors import Draining, ExecutorLoading, NoExecutor, ProfileRunning, TandemError
from tandem.executor.v1.executor_service_pb2 import ProfileResponse
from tandem.executor.v1.executor_service_pb2_grpc import (
    ExecutorServiceServicer,
    add_ExecutorServiceServicer_to_server,
)
from tandem.profile import FEATURE
from tandem.status import to_grpc_status
from tests.scheduler_svc.frontend.calls import error_of, rest_of
from tests.scheduler_svc.frontend.fake_core import within

RECORDED = [
    ProfileResponse(progress=ProfileProgress(num_steps=2, elapsed_s=0.5, is_recorded=True)),
    ProfileResponse(trace=TraceChunk(chunk=b"abc")),
    ProfileResponse(trace=TraceChunk(sha256="digest")),
]


class FakeExecutor(ExecutorServiceServicer):
    """
    Executor that answers Profile with these messages; it fails at an error, and at None it waits
    until the caller leaves.
    """

    def __init__(self, *answer: ProfileResponse | TandemError | None) -> None:
        self.asked: list[ProfileOptions] = []
        self.has_left = asyncio.Event()
        self._answer = answer

    async def Profile(self, request, context):  # noqa: N802  # named by the proto
        self.asked.append(request.options)
        try:
            for message in self._answer:
                if isinstance(message, TandemError):
                    await context.abort_with_status(to_grpc_status(message))
                if message is None:
                    await asyncio.Event().wait()
                yield message
        finally:
            self.has_left.set()


@asynccontextmanager
async def serving(frontend, *answer, features=(FEATURE,)):
    """Yield an executor in use that gives this answer, and its server."""
    executor, server = FakeExecutor(*answer), grpc.aio.server()
    add_ExecutorServiceServicer_to_server(executor, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    frontend.core.answers["executor"] = lambda _: encode_json(ExecutorInUse(address, features))
    try:
        yield executor, server
    finally:
        await server.stop(None)


@pytest.fixture
async def admin(frontend):
    async with grpc.aio.insecure_channel(frontend.servers.admin_address) as channel:
        yield AdminServiceStub(channel)


class TestProfile:
    async def test_trace_is_passed_on(self, frontend, admin):
        """
        The executor's messages reach the operator in order, and the options reach the executor.
        """
        options = ProfileOptions(num_steps=7, duration_s=1.5, with_stack=True)
        async with serving(frontend, *RECORDED) as (executor, _):
            got = await rest_of(admin.Profile(pb.ProfileRequest(options=options)))
        assert RECORDED == [ProfileResponse.FromString(one.SerializeToString()) for one in got]
        assert [options] == executor.asked

    async def test_options_out_of_range_ask_nobody(self, frontend, admin):
        """
        A number out of range is refused without a call to the executor.
        """
        async with serving(frontend) as (executor, _):
            options = ProfileOptions(num_steps=0)
            error = await error_of(admin.Profile(pb.ProfileRequest(options=options)))
        assert ("INVALID_PARAMETER", "options.num_steps") == (error.reason, error.field)
        assert [] == executor.asked

    async def test_executor_without_the_ability_is_not_asked(self, frontend, admin):
        """
        An executor that does not offer profiles gives PROFILE_UNSUPPORTED.
        """
        async with serving(frontend, *RECORDED, features=("suspend",)) as (executor, _):
            error = await error_of(admin.Profile(pb.ProfileRequest()))
        assert ("PROFILE_UNSUPPORTED", []) == (error.reason, executor.asked)

    async def test_without_executor_it_is_unavailable(self, frontend, admin):
        """
        A call while no executor is attached is UNAVAILABLE with retry advice.
        """
        frontend.core.answers["executor"] = lambda _: NoExecutor("none")
        error = await error_of(admin.Profile(pb.ProfileRequest()))
        assert ("NO_EXECUTOR", 1.0) == (error.reason, error.retry_after_s)

    async def test_executor_in_the_middle_of_another_one_says_so(self, frontend, admin):
        """
        The executor's own refusal is passed on as it is.
        """
        async with serving(frontend, ProfileRunning("busy")):
            error = await error_of(admin.Profile(pb.ProfileRequest()))
        assert ("PROFILE_RUNNING", "busy") == (error.reason, error.message)

    @pytest.mark.slow
    @pytest.mark.parametrize("why", [Draining("stopping"), ExecutorLoading("loading")])
    async def test_executor_that_stops_is_no_stop_of_the_service(self, frontend, admin, why):
        """
        An executor that stops ends the call with EXECUTOR_LOST, after the messages that came
        before.
        """
        async with serving(frontend, RECORDED[0], why):
            call = admin.Profile(pb.ProfileRequest())
            assert 2 == (await within(call.read())).progress.num_steps
            error = await error_of(call)
        assert ("EXECUTOR_LOST", "UNAVAILABLE") == (error.reason, error.code)

    async def test_executor_that_dies_is_lost(self, frontend, admin):
        """
        A connection that breaks in the middle of a trace ends the call with EXECUTOR_LOST.
        """
        async with serving(frontend, RECORDED[1], None) as (_, server):
            call = admin.Profile(pb.ProfileRequest())
            await within(call.read())
            await server.stop(None)
            error = await error_of(call)
        assert "EXECUTOR_LOST" == error.reason

    async def test_executor_that_never_ends_is_given_up(self, frontend, admin, monkeypatch):
        """
        A call to an executor that hangs ends after a bounded time.
        """
        monkeypatch.setattr(frontend_profile, "AFTER_RECORDING_S", 0.05)
        async with serving(frontend, None) as (executor, _):
            options = ProfileOptions(duration_s=0.01)
            error = await error_of(admin.Profile(pb.ProfileRequest(options=options)))
            if executor.asked:  # false if the time was over before the call
                await within(executor.has_left.wait())
        assert "EXECUTOR_LOST" == error.reason

    async def test_operator_who_leaves_ends_it(self, frontend, admin):
        """
        A call that the operator cancels cancels the executor's.
        """
        async with serving(frontend, RECORDED[0], None) as (executor, _):
            call = admin.Profile(pb.ProfileRequest())
            await within(call.read())
            call.cancel()
            await within(executor.has_left.wait())
