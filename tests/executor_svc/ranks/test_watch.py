"""How long a rank may be silent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from executor_svc.ranks.channel import Channel, Frame, Kind
from executor_svc.ranks.watch import (
    BEAT_INTERVAL_S,
    LOADING_SILENCE_S,
    SILENCE_S,
    Silence,
    Watch,
)

ALLOWED_BEATS = int(SILENCE_S / BEAT_INTERVAL_S) - 1
LIMIT_S = 60.0


def after_beats(silence: Silence, count: int) -> Iterator[bool]:
    """Yield after each of so many beats whether the silence is too long."""
    for _ in range(count):
        silence.count_beat()
        yield silence.is_too_long


class TestSilence:
    def test_rank_that_loads_may_be_silent_for_two_minutes(self):
        """
        A rank that has not said yet that it is loaded may keep Python's lock for long, not for ever.
        """
        silence = Silence()
        assert not any(after_beats(silence, round(LOADING_SILENCE_S / BEAT_INTERVAL_S) - 1))
        assert all(after_beats(silence, 1))

    def test_loaded_rank_may_be_silent_for_two_seconds(self):
        """
        From then on, silence counts in beats of our own, and each sign of life begins it anew.
        """
        silence = Silence()
        silence.loaded()
        for _ in range(3):
            assert not any(after_beats(silence, ALLOWED_BEATS))
            silence.heard()
        assert not any(after_beats(silence, ALLOWED_BEATS))
        assert all(after_beats(silence, 1))


class TestWatch:
    @pytest.mark.slow
    def test_silent_rank_ends_the_process_and_is_told_of_first(self):
        """
        A loaded rank that sends nothing more is named in the error that ends this process.
        """
        here, there = socket.socketpair()
        mine, other = Channel(here, 3), Channel(there, 0)
        events: list[object] = []
        has_ended = threading.Event()

        def end(error):
            events.append(error.message)
            has_ended.set()

        watch = Watch([mine], lambda *_: None, on_silent=lambda _: events.append("silent"), end=end)
        watch.start()
        other.send(Frame(Kind.READY))
        assert has_ended.wait(LIMIT_S)
        assert ["silent", "rank 3 of the model has not been heard for 2 s"] == events
        mine.close()
        other.close()
