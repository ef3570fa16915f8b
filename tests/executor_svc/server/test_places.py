"""Threads of the server's calls: watchers and idle streams cannot shut a scheduler out."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from executor_svc.server.call_places import MAX_LASTING
from executor_svc.server.server import _SERVER_OPTIONS
from executor_svc.server.step_stream import MAX_UNATTACHED
from tandem.errors import QueueFull, SessionLost
from tandem.status import from_rpc_error
from tests.executor_svc.server.harness import DEADLINE_S, StepClient, Stream, refusal, wait_until

NUM_WATCHERS = 40
"""More calls than the server had threads and places when all calls shared them."""


@contextlib.contextmanager
def watchers(running, count):
    """Open health watchers on a connection of their own, and wait until each is served or refused."""
    with grpc.insecure_channel(running.server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="tandem.ready")
        calls = [stub.Watch(request, timeout=DEADLINE_S) for _ in range(count)]
        yield [first_answer(call) for call in calls]


def first_answer(call):
    """Return the first message of a call, or the error that it ends with."""
    try:
        return next(call)
    except grpc.RpcError as error:
        return from_rpc_error(error)


def test_calls_that_left_take_no_stream_of_their_connection():
    """
    A server that is behind with the ends of cancelled calls serves the next one of the same
    connection: gRPC does not refuse it without a reason.
    """
    most = dict(_SERVER_OPTIONS)["grpc.max_concurrent_streams"]
    begun, may_end = queue.SimpleQueue(), threading.Event()

    def linger(request, _context):
        begun.put(request)
        assert may_end.wait(DEADLINE_S)
        return request

    server = grpc.server(ThreadPoolExecutor(2 * most + 1), options=_SERVER_OPTIONS)
    handler = grpc.unary_unary_rpc_method_handler(linger)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("S", {"M": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            method = channel.unary_unary("/S/M")
            for _ in range(2 * most):
                gone = method.future(b"gone")
                assert b"gone" == begun.get(timeout=DEADLINE_S)
                gone.cancel()
            last = method.future(b"last")
            assert b"last" == begun.get(timeout=DEADLINE_S)
            may_end.set()
            assert b"last" == last.result(DEADLINE_S)
    finally:
        may_end.set()
        server.stop(None).wait()


class TestPlaces:
    def test_scheduler_is_served_beside_many_watchers(self, executor):
        """
        While more watchers are open than a server has threads, a scheduler opens a session,
        attaches and steps, and a probe is answered.
        """
        with watchers(executor, NUM_WATCHERS) as answers:
            refused = [answer for answer in answers if isinstance(answer, QueueFull)]
            assert (MAX_LASTING, NUM_WATCHERS - MAX_LASTING) == (
                len(answers) - len(refused),
                len(refused),
            )
            assert {"lasting_calls"} == {error.metadata["limit"] for error in refused}
            client = StepClient(executor)
            assert client.step(client.attach()) is not None
            stub = health_pb2_grpc.HealthStub(executor.channel)
            stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=DEADLINE_S)

    def test_place_of_a_watcher_that_left_is_free_again(self, executor):
        """
        Watchers that leave make room for others.
        """
        for _ in range(2):
            with watchers(executor, 1) as (answer,):
                assert not isinstance(answer, QueueFull)

        def fits() -> bool:
            with watchers(executor, MAX_LASTING) as answers:
                return not any(isinstance(answer, QueueFull) for answer in answers)

        wait_until(fits)

    def test_reflection_streams_share_these_places(self, executor):
        """
        A reflection stream that is left open counts as a watcher does.
        """
        stub = reflection_pb2_grpc.ServerReflectionStub(executor.channel)

        def requests():
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            yield from iter(done.get, None)

        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        streams = [stub.ServerReflectionInfo(requests(), timeout=DEADLINE_S) for _ in range(20)]
        answers = [first_answer(stream) for stream in streams]
        for _ in streams:
            done.put(None)
        assert 20 - MAX_LASTING == sum(isinstance(answer, QueueFull) for answer in answers)

    def test_streams_without_attach_make_room_for_newer_ones(self, executor):
        """
        Of streams that never attach the oldest end at once, so that a scheduler always gets one.
        """
        idle = [Stream(executor.channel) for _ in range(NUM_WATCHERS)]
        wait_until(
            lambda: NUM_WATCHERS - MAX_UNATTACHED <= sum(one.has_ended.is_set() for one in idle)
        )
        client = StepClient(executor)
        assert client.step(client.attach()) is not None
        ended = [one for one in idle if one.has_ended.is_set()]
        assert {SessionLost} == {type(one.error) for one in ended}
        for one in idle:
            one.cut()


class TestHealthNames:
    @pytest.mark.parametrize("name", ["nothing", "x" * 4096])
    def test_unknown_name_is_unknown_and_costs_nothing(self, executor, name):
        """
        Check of an unknown name is NOT_FOUND, Watch says SERVICE_UNKNOWN, and no state is kept.
        """
        stub = health_pb2_grpc.HealthStub(executor.channel)
        request = health_pb2.HealthCheckRequest(service=name)
        with pytest.raises(grpc.RpcError) as error:
            stub.Check(request, timeout=DEADLINE_S)
        assert grpc.StatusCode.NOT_FOUND == error.value.code()
        watch = stub.Watch(request, timeout=DEADLINE_S)
        assert health_pb2.HealthCheckResponse.SERVICE_UNKNOWN == next(watch).status
        watch.cancel()
        assert ["", "tandem.progress", "tandem.ready"] == sorted(executor.server._health._serving)

    def test_refusal_of_a_wrong_name_is_typed(self, executor):
        """
        The name in a refusal is cut, so that the status fits into trailers.
        """
        stub = health_pb2_grpc.HealthStub(executor.channel)
        request = health_pb2.HealthCheckRequest(service="x" * 100_000)
        refused = refusal(lambda: stub.Check(request, timeout=DEADLINE_S))
        assert 200 > len(refused.message)
