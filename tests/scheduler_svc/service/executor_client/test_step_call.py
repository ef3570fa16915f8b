"""One Execute call of the scheduler, against a real server that does as its messages say."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from scheduler_svc.executor_client.channel import ExecutorAccess
from scheduler_svc.executor_client.step_call import CallEnded, StepCall
from tandem.network.tls import server_credentials
from tandem.network.tls_files import ClientTls, ServerTls
from tests.certificates import Authority
from tests.one_method_server import OneMethodServer
from tests.waiting import wait_until

DEADLINE_S = 60.0
METHOD = "/tandem.executor.v1.ExecutorService/Execute"


class Peer:
    """Server that sends back each message until one tells it how to end."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.has_begun = threading.Event()
        serving = OneMethodServer(METHOD, self._execute)
        self.server, self.address = serving.server, serving.address

    def _execute(self, requests: Iterator[bytes], context) -> Iterator[bytes]:
        self.has_begun.set()
        for raw in requests:
            self.received.append(raw)
            if raw == b"end":
                return
            if raw == b"fail":
                context.set_trailing_metadata((("why-bin", b"\0\1"),))
                context.abort(grpc.StatusCode.ABORTED, "no more")
            yield raw


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.server.stop(None).wait()


@pytest.fixture
def channel(peer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(peer.address) as channel:
        yield channel


class Reader:
    """Reader of a call to its end, on a thread of its own."""

    def __init__(self, call: StepCall) -> None:
        self.messages: list[bytes] = []
        self.ended_with: CallEnded | None = None
        self._call = call
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            self.messages.extend(self._call.messages())
        except CallEnded as ended:
            self.ended_with = ended

    def end(self) -> CallEnded | None:
        """Return how the call ended."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.ended_with


class TestMessages:
    def test_all_come_in_order_and_a_good_end_is_no_error(self, channel):
        """
        Messages put before and after the connection stands are sent one by one, and their answers
        are read to the end.
        """
        call = StepCall(channel)
        sent = [b"", b"x" * 3_000_000, *(b"%d" % number for number in range(300))]
        for message in sent[:5]:
            call.outgoing.put(message)
        reader = Reader(call)
        for message in [*sent[5:], b"end"]:
            call.outgoing.put(message)
        assert reader.end() is None
        assert sent == reader.messages

    def test_any_thread_may_send(self, channel, peer):
        """
        Messages of several threads are all sent, each thread's in its order.
        """
        call = StepCall(channel)
        reader = Reader(call)

        def send(name: int) -> None:
            for number in range(100):
                call.outgoing.put(b"%d-%d" % (name, number))

        senders = [threading.Thread(target=send, args=(name,)) for name in range(4)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join(DEADLINE_S)
        call.outgoing.put(b"end")
        assert reader.end() is None
        assert 400 == len(reader.messages) == len(set(reader.messages))
        for name in range(4):
            own = [raw for raw in peer.received if raw.startswith(b"%d-" % name)]
            assert [b"%d-%d" % (name, number) for number in range(100)] == own


class TestEnds:
    def test_error_comes_with_code_text_and_metadata(self, channel):
        """
        A call that its peer fails ends by an error with the peer's code, text and metadata.
        """
        call = StepCall(channel)
        call.outgoing.put(b"fail")
        reader = Reader(call)
        ended = reader.end()
        assert (grpc.StatusCode.ABORTED, "no more") == (ended.code(), ended.details())
        assert ("why-bin", b"\0\1") in [tuple(entry) for entry in ended.trailing_metadata()]

    def test_cancelling_ends_it_for_the_reader(self, channel, peer):
        """
        A call cancelled by another thread ends at once, by an error that names the canceller.
        """
        call = StepCall(channel)
        reader = Reader(call)
        assert peer.has_begun.wait(DEADLINE_S)
        call.cancel()
        ended = reader.end()
        assert grpc.StatusCode.CANCELLED is ended.code()
        assert "cancelled by the scheduler" == ended.details()

    def test_peer_that_goes_away_ends_it(self, channel, peer):
        """
        A server that stops without a message ends the call by an error.
        """
        reader = Reader(StepCall(channel))
        assert peer.has_begun.wait(DEADLINE_S)
        peer.server.stop(None).wait()
        assert reader.end() is not None

    def test_nobody_there_is_unavailable(self):
        """
        A call to an address without a listener ends UNAVAILABLE, and its messages are dropped.
        """
        with grpc.insecure_channel("127.0.0.1:1") as channel:
            call = StepCall(channel)
            call.outgoing.put(b"lost")
            assert grpc.StatusCode.UNAVAILABLE is Reader(call).end().code()

    @pytest.mark.parametrize("last", [b"end", b"fail"])
    def test_what_is_sent_after_the_end_is_dropped(self, channel, peer, last):
        """
        Messages and cancellations that come too late do nothing.
        """
        call = StepCall(channel)
        call.outgoing.put(last)
        Reader(call).end()
        for _ in range(3):
            call.outgoing.put(b"late")
        call.cancel()
        assert [last] == peer.received
        assert [] == list(call.messages())


class TestSecureCall:
    def test_metadata_crosses_an_encrypted_channel(self, tmp_path):
        """
        Over TLS with client certificates a call carries its metadata, and messages as over plain
        text.
        """
        ca = Authority(tmp_path)
        server, mine = ca.issue("executor"), ca.issue("scheduler")
        seen: list[str] = []

        def execute(requests: Iterator[bytes], context) -> Iterator[bytes]:
            seen.extend(
                value for key, value in context.invocation_metadata() if key == "authorization"
            )
            yield from requests

        files = ServerTls(certificate=server.certificate, key=server.key, client_ca=ca.file)
        serving = OneMethodServer(METHOD, execute, credentials=server_credentials(files))
        token = tmp_path / "token"
        token.write_text("a-token-of-enough-characters\n")
        access = ExecutorAccess(
            ClientTls(ca=ca.file, certificate=mine.certificate, key=mine.key), token
        )
        with access.open(serving.address) as channel:
            call = StepCall(channel, access.metadata())
            reader = Reader(call)
            call.outgoing.put(b"hello")
            wait_until(lambda: reader.messages, "the answer")
            call.cancel()
            reader.end()
        serving.server.stop(None).wait()

        assert [b"hello"] == reader.messages
        assert ["Bearer a-token-of-enough-characters"] == seen
