"""Rank 0's end of the channels: every command that it applies goes to all other ranks first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from executor_svc.ranks.channel import Channel, ChannelClosed, Frame, Kind
from executor_svc.ranks.failures import decoded_failure
from executor_svc.ranks.watch import Watch
from executor_svc.server.loaded import Followers
from tandem.errors import InternalError, OutOfMemory, TandemError

REPORT_S = 2.0
"""
Seconds in which a rank whose failure broke a step of ours is found dead, or says what happened.
"""


class FollowingRanks(Followers):
    """
    The other ranks of the model, as rank 0 sees them.

    The runner thread sends; the watch thread takes in what comes back. Once a rank is gone, the
    watch thread ends the process, so that no caller need handle that.
    """

    exist = True

    def __init__(
        self,
        channels: Sequence[Channel],
        on_failure: Callable[[TandemError], None],
        end: Callable[[TandemError], None] | None = None,
    ) -> None:
        """
        Args:
            channels: Connections to all of them.
            on_failure: Called on the watch thread when a rank says why it cannot go on; until
                `on_failure` names another function.
            end: Ends the process for an error; None for `end_process`.
        """
        self._channels = channels
        self._report = on_failure
        self._seq = 0
        self._changed = threading.Condition()
        self._done = {channel.rank: 0 for channel in channels}
        self._ready: set[int] = set()
        self._failure: TandemError | None = None
        self._watch = Watch(channels, self._take, end=end)

    def start(self) -> None:
        """Begin to watch the ranks."""
        self._watch.start()

    def begin(self) -> None:
        """Wait until all ranks are loaded; from then on silence counts as death."""
        self._wait(lambda: len(self._ready) == len(self._channels))
        self._send(Kind.READY)

    def on_failure(self, report: Callable[[TandemError], None]) -> None:
        """Name the function that is told when a rank cannot go on, on the watch thread."""
        self._report = report

    def pass_on(self, raw: bytes) -> None:
        """Send a step to all ranks, as the bytes in which it was received."""
        self._send(Kind.STEP, raw)

    def reset(self) -> None:
        """Let all ranks forget all slots."""
        self._send(Kind.RESET)

    def lose(self) -> None:
        """Tell all ranks that the last step ended the session here; it must have there too."""
        self._send(Kind.LOST)

    def check(self, checksum: int) -> None:
        """Let all ranks compare their device state with ours."""
        self._send(Kind.CHECK, payload=checksum.to_bytes(8, "little"))

    def wait(self) -> None:
        """Wait until all ranks have done the last command, a reset or an errand."""
        self._wait(lambda: all(done >= self._seq for done in self._done.values()))

    def cause_of(self, error: Exception) -> Exception:
        """
        Return the error of the rank that made a step of ours fail with `error`: a collective breaks
        where one is gone. If it is dead, this process ends meanwhile.
        """
        if isinstance(error, OutOfMemory):
            return error
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, REPORT_S)
            return self._failure or error

    def end(self) -> None:
        """Let all ranks end in good order."""
        self._watch.close()
        for channel in self._channels:
            channel.say_last(Frame(Kind.SHUTDOWN))

    def _send(self, kind: Kind, payload: bytes = b"") -> None:
        self._seq += 1
        frame = Frame(kind, self._seq, payload)
        for channel in self._channels:
            try:
                channel.send(frame)
            except ChannelClosed as error:
                raise InternalError(f"rank {channel.rank} of the model is gone") from error

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(condition)

    def _take(self, rank: int, frame: Frame) -> None:
        """Take in a rank's frame, on the watch thread."""
        with self._changed:
            match frame.kind:
                case Kind.READY:
                    self._ready.add(rank)
                case Kind.DONE:
                    self._done[rank] = frame.seq
                case Kind.FAILED:
                    self._failure = decoded_failure(rank, frame.payload)
                case _:
                    raise InternalError(f"rank {rank} of the model sent a {frame.kind.name}")
            self._changed.notify_all()
        if frame.kind is Kind.FAILED and self._failure is not None:
            # It waits for our end, so that no collective of ours breaks before this is reported.
            self._report(self._failure)
