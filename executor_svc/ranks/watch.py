"""
The thread of a rank that hears from the other ranks, whatever its model computes meanwhile, and
ends the process when one of them is gone.
"""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from executor_svc.ranks.channel import Channel, ChannelClosed, Frame, Kind
from tandem.errors import InternalError, TandemError
from tandem.process.exit_codes import EXIT_FAILED
from tandem.process.process_start import refuse

BEAT_INTERVAL_S = 0.2
SILENCE_S = 2.0
"""Seconds without a sign of life after which a loaded rank counts as dead."""
LOADING_SILENCE_S = 120.0
"""
The same for a rank that still loads: what it calls may keep Python's lock for a while, a minute of
compiling or of reading from a slow disk among it. So a rank that was stopped at the start does not
keep the others waiting for ever.
"""

_log = structlog.get_logger(__name__)


class Silence:
    """
    The time since one rank was heard, counted in our own beats: while this process is stopped
    itself, as a frozen machine is, no time passes.

    Attributes:
        limit_s: Seconds of silence after which the rank counts as dead.
    """

    def __init__(self) -> None:
        self.limit_s = LOADING_SILENCE_S
        self._beats = 0

    def loaded(self) -> None:
        """Allow less from now on: nothing may keep a loaded rank from beating."""
        self.limit_s = SILENCE_S
        self._beats = 0

    def heard(self) -> None:
        """Note a sign of life."""
        self._beats = 0

    def count_beat(self) -> None:
        """Note that we have beaten once more."""
        self._beats += 1

    @property
    def is_too_long(self) -> bool:
        """True where the rank is taken for dead."""
        return self._beats * BEAT_INTERVAL_S >= self.limit_s


class Watch(threading.Thread):
    """
    Receives the frames of all channels of this process, and beats on them.

    It never tears collectives down first: a process whose collective waits for a rank that is gone
    could hang in there.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        on_frame: Callable[[int, Frame], None],
        *,
        on_silent: Callable[[TandemError], None] = lambda _: None,
        end: Callable[[TandemError], None] | None = None,
    ) -> None:
        """
        Args:
            channels: Connections to other ranks.
            on_frame: Called on this thread with a rank and its next frame, other than beats.
            on_silent: Called with the error before the process ends because a rank is silent, which
                may be stopped and not dead.
            end: Ends the process for an error; None for `end_process`.
        """
        super().__init__(name="ranks", daemon=True)
        self._channels = channels
        self._on_frame = on_frame
        self._on_silent = on_silent
        self._end = end or end_process
        self._silences = {channel.rank: Silence() for channel in channels}
        self._is_closing = False

    def close(self) -> None:
        """Take it as no failure from now on that ranks end."""
        self._is_closing = True

    def run(self) -> None:
        """Watch until a rank is gone."""
        try:
            self._watch()
        except ChannelClosed as gone:
            self._ended(InternalError(str(gone)))
        except TandemError as error:
            self._ended(error)
        except Exception as error:  # noqa: BLE001  # outermost frame of the thread: the process ends
            _log.error("rank_watch_broken", exc_info=error)
            self._ended(InternalError("the thread that watches the other ranks broke: see the log"))

    def _ended(self, error: TandemError) -> None:
        if not self._is_closing:
            self._end(error)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for channel in self._channels:
                selector.register(channel, selectors.EVENT_READ, channel)
            next_beat_s = time.monotonic()
            while not self._is_closing:
                left_s = next_beat_s - time.monotonic()
                if left_s <= 0:
                    self._beat()
                    next_beat_s = time.monotonic() + BEAT_INTERVAL_S
                    left_s = BEAT_INTERVAL_S
                for key, _ in selector.select(left_s):
                    self._hear(key.data)

    def _hear(self, channel: Channel) -> None:
        rank = channel.rank
        try:
            frames = channel.receive()
        except ChannelClosed as error:
            raise ChannelClosed(f"rank {rank} of the model is gone") from error
        silence = self._silences[rank]
        silence.heard()
        for frame in frames:
            if frame.kind is Kind.READY:
                silence.loaded()
            if frame.kind is not Kind.BEAT:
                self._on_frame(rank, frame)

    def _beat(self) -> None:
        for channel in self._channels:
            try:
                channel.beat()
            except ChannelClosed as error:
                raise ChannelClosed(f"rank {channel.rank} of the model is gone") from error
        # A stop of this whole process counts as one beat: its peers may have been stopped with it.
        for silence in self._silences.values():
            silence.count_beat()
        for rank, silence in self._silences.items():
            if silence.is_too_long:
                lost = InternalError(
                    f"rank {rank} of the model has not been heard for {silence.limit_s:g} s"
                )
                self._on_silent(lost)
                raise lost


def end_process(error: TandemError) -> None:
    """End this process at once, with the line that says why."""
    refuse(error)
    sys.stderr.flush()
    os._exit(EXIT_FAILED)
