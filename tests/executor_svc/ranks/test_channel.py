"""Frames between ranks over a real socket."""

from __future__ import annotations

import socket
import threading

import pytest

from executor_svc.ranks.channel import Channel, ChannelClosed, Frame, FrameReader, Kind
from tandem.errors import InternalError

LIMIT_S = 60.0


@pytest.fixture
def ends():
    """Return both ends of a connection."""
    here, there = socket.socketpair()
    channels = Channel(here, 1), Channel(there, 0)
    yield channels
    for channel in channels:
        channel.close()


def received(channel: Channel, count: int) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < count:
        frames += channel.receive()
    return frames


class RecordingSocket:
    """A socket that keeps what is sent."""

    family = socket.AF_UNIX

    def __init__(self) -> None:
        self.sent = b""

    def setblocking(self, flag: bool) -> None:
        """Do nothing."""

    def sendall(self, piece: bytes) -> None:
        self.sent += piece


def encoded(*frames: Frame) -> bytes:
    recording = RecordingSocket()
    channel = Channel(recording, 1)
    for frame in frames:
        channel.send(frame)
    return recording.sent


class TestFrames:
    def test_frames_arrive_whole_and_in_order(self, ends):
        """
        Frames of any kind, with payloads or without, arrive as they were sent.
        """
        sent = [Frame(Kind.STEP, seq, bytes([seq]) * seq) for seq in range(1, 40)]
        sent += [Frame(Kind.RESET, seq=40), Frame(Kind.SHUTDOWN)]
        for frame in sent:
            ends[0].send(frame)
        assert sent == received(ends[1], len(sent))

    def test_bytes_in_pieces_make_the_same_frames(self):
        """
        However the bytes are cut on their way, each frame comes out once, when it is complete.
        """
        sent = [Frame(Kind.STEP, 2, b"abc"), Frame(Kind.BEAT), Frame(Kind.STEP, 3, b"")]
        raw = encoded(*sent)
        for size in (1, 5, len(raw)):
            reader, got = FrameReader(), []
            for start in range(0, len(raw), size):
                got += reader.feed(raw[start : start + size])
            assert sent == got

    def test_large_payload_arrives_whole(self, ends):
        """
        A payload larger than any buffer of the system arrives; beats meanwhile wait for nothing and
        cut into nothing.
        """
        frame = Frame(Kind.STEP, 1, bytes(range(256)) * 40_000)
        sender = threading.Thread(target=ends[0].send, args=(frame,), daemon=True)
        sender.start()
        beats = threading.Thread(target=lambda: [ends[0].beat() for _ in range(1000)], daemon=True)
        beats.start()
        beats.join(LIMIT_S)
        assert not beats.is_alive()
        assert frame in received(ends[1], 1)
        sender.join(LIMIT_S)
        assert not sender.is_alive()

    def test_beats_wait_for_no_silent_reader(self, ends):
        """
        Where the other end reads nothing, beats are dropped once buffers are full.
        """

        def beat() -> None:
            for _ in range(100_000):
                ends[0].beat()

        beats = threading.Thread(target=beat, daemon=True)
        beats.start()
        beats.join(LIMIT_S)
        assert not beats.is_alive()

    def test_other_bytes_are_refused(self):
        """
        A kind that does not exist, or a length that no step has, is an error.
        """
        with pytest.raises(InternalError, match="frame of kind 71"):
            FrameReader().feed(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")


class TestEnd:
    def test_closed_end_is_noticed(self, ends):
        """
        Frames sent before the other end closed still arrive; then receiving and sending fail.
        """
        ends[0].send(Frame(Kind.BEAT))
        ends[0].close()
        assert [Frame(Kind.BEAT)] == ends[1].receive()
        with pytest.raises(ChannelClosed):
            ends[1].receive()
        with pytest.raises(ChannelClosed):
            ends[1].send(Frame(Kind.BEAT))
