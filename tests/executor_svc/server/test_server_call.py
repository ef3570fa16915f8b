"""The executor's side of one call's messages, on a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from executor_svc.server.server_call import ServerCall
from tests.executor_svc.server.harness import DEADLINE_S, wait_until
from tests.one_method_server import OneMethodServer

METHOD = "/test/Execute"


class Service:
    """Holds one call open until it has ended or `may_return` is set."""

    def __init__(self) -> None:
        self.received: list[bytes | None] = []
        self.call: ServerCall | None = None
        self.takes: object = lambda _: True
        self.has_ended = threading.Event()
        self.may_return = threading.Event()
        serving = OneMethodServer(METHOD, self._execute)
        self.server, self.address = serving.server, serving.address

    def _execute(self, _requests: Iterator[bytes], context) -> Iterator[bytes]:
        self.call = ServerCall(context)
        assert context.add_callback(self.has_ended.set)
        context.send_initial_metadata(())
        self.call.receive(self._take)
        assert self.may_return.wait(DEADLINE_S)
        yield from ()

    def _take(self, raw: bytes | None) -> bool:
        self.received.append(raw)
        return self.takes(raw)


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.may_return.set()
    service.server.stop(None).wait()


@pytest.fixture
def open_call(service):
    """Begin a call with these messages; gives it and a function that ends the caller's side."""
    channel = grpc.insecure_channel(service.address)
    half_close = threading.Event()
    calls: list[grpc.Call] = []  # a call without a reference is cancelled

    def begin(*messages: bytes) -> tuple[grpc.Call, threading.Event]:
        def outgoing() -> Iterator[bytes]:
            yield from messages
            half_close.wait(DEADLINE_S)

        calls.append(channel.stream_stream(METHOD)(outgoing()))
        return calls[-1], half_close

    yield begin
    half_close.set()
    channel.close()


class TestReceiving:
    def test_messages_come_in_order_and_then_none(self, service, open_call):
        """
        Each message is handed over once, and None when the caller has ended its side.
        """
        sent = [b"", b"x" * 3_000_000, *(b"%d" % number for number in range(50))]
        _, half_close = open_call(*sent)
        wait_until(lambda: len(service.received) == len(sent))
        half_close.set()
        wait_until(lambda: None in service.received)
        assert [*sent, None] == service.received

    def test_caller_that_cancels_ends_it_with_none(self, service, open_call):
        """
        A call that breaks looks like one that the caller has ended.
        """
        call, _ = open_call(b"1")
        wait_until(lambda: service.received == [b"1"])
        call.cancel()
        wait_until(lambda: service.received == [b"1", None])

    def test_who_wants_no_more_gets_no_more(self, service, open_call):
        """
        No message is taken after one that was the last one wanted.
        """
        service.takes = lambda raw: raw != b"2"
        call, _ = open_call(b"1", b"2", b"3")
        wait_until(lambda: len(service.received) >= 2)
        for _ in range(3):
            has_left = threading.Event()
            service.call.send(b"sign", has_left.set)
            assert next(call) == b"sign"
            assert has_left.wait(DEADLINE_S)
        assert [b"1", b"2"] == service.received

    def test_handler_that_raises_harms_no_other_call(self, service, open_call):
        """
        An error of the function that takes messages is logged, and the server goes on polling.
        """
        has_raised = threading.Event()

        def fail(_raw: bytes | None) -> bool:
            has_raised.set()
            raise ValueError("not this one")

        service.takes = fail
        open_call(b"1")
        assert has_raised.wait(DEADLINE_S)
        service.takes = lambda _: True
        open_call(b"2")
        wait_until(lambda: b"2" in service.received)


class TestSending:
    def test_messages_arrive_in_order_and_each_is_told(self, service, open_call):
        """
        The sender is told when its message has left and may send the next one.
        """
        call, _ = open_call(b"1")
        wait_until(lambda: service.received == [b"1"])
        sent = [b"a", b"", b"x" * 3_000_000, b"b"]
        for message in sent:
            has_left = threading.Event()
            service.call.send(message, has_left.set)
            assert next(call) == message
            assert has_left.wait(DEADLINE_S)

    @pytest.mark.parametrize("how", ["cancelled", "returned"])
    def test_message_after_the_end_is_told_as_if_it_had_left(self, service, open_call, how):
        """
        A message sent after the call has ended is told as if it had left: no sender waits for ever.
        """
        call, half_close = open_call(b"1")
        wait_until(lambda: service.received == [b"1"])
        if how == "cancelled":
            call.cancel()
        else:
            half_close.set()
            service.may_return.set()
        assert service.has_ended.wait(DEADLINE_S)
        for _ in range(3):
            has_left = threading.Event()
            service.call.send(b"late", has_left.set)
            assert has_left.wait(DEADLINE_S)
