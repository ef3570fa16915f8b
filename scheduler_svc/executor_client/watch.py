"""
Judgement of an executor by its messages: whether it is alive and makes progress.

Pure: time is an argument. Time between two looks counts only up to `LONGEST_GAP_S`: a scheduler
that was stopped, or starved on a busy machine, must not take its own silence for the executor's.
"""

from __future__ import annotations

from tandem.link.batch import Batch
from tandem.link.commands import Command
from tandem.link.session import Heartbeat
from tandem.link.step_cost import ALWAYS_ALLOWED_S, StepCost

LONGEST_GAP_S = 1.0
"""Most time between two looks that counts as silence."""
USUAL_WEIGHT = 0.1
"""Weight of the latest step in the moving average of step times."""
STALLED_AFTER_S = 0.5
"""
Seconds of idle heartbeats, while steps wait for results, after which the stream counts as stalled:
it has lost a message. Time for the bytes in flight is added, as the network may be slow.
"""
SLOW_BYTES_PER_S = 1e6
"""Rate assumed for the bytes in flight; each stalled stream halves it, and a result restores it."""
SLOWEST_BYTES_PER_S = 1e4
"""Lower bound of the assumed rate."""


class ExecutorWatch:
    """
    Watch over one session's executor. Owned by the session.

    Attributes:
        usual_step_s: Seconds that a step usually takes to compute; 0 before the first.
        silent_s: Seconds since the last message of any stream and any session.
        session_silent_s: Seconds since the last message, or since this session was opened.
        stream_silent_s: Seconds since the last message of the newest stream, or since it was
            opened.
        stuck_s: Seconds by which the running step is late; 0 while it is not.
        was_heard: True once any message was heard.
    """

    __slots__ = (
        "_beat",
        "_beat_s",
        "_bytes_per_s",
        "_cost",
        "_idle_since_s",
        "_looked_s",
        "session_silent_s",
        "silent_s",
        "stream_silent_s",
        "stuck_s",
        "usual_step_s",
        "was_heard",
    )

    def __init__(self, now: float) -> None:
        self._cost = StepCost()
        self._looked_s = now
        self._beat: Heartbeat | None = None
        self._beat_s = 0.0
        self._idle_since_s: float | None = None
        self._bytes_per_s = SLOW_BYTES_PER_S
        self.usual_step_s = 0.0
        self.silent_s = 0.0
        self.session_silent_s = 0.0
        self.stream_silent_s = 0.0
        self.stuck_s = 0.0
        self.was_heard = False

    @property
    def running_step_id(self) -> int:
        """Id of the step that was computed at the last heartbeat; 0 for none."""
        return 0 if self._beat is None else self._beat.running_step_id

    def begin_session(self) -> None:
        """Forget the last session's heartbeat and silence; keep the learned cost of steps."""
        self._beat = self._idle_since_s = None
        self.stuck_s = 0.0
        self.session_silent_s = 0.0

    def begin_stream(self) -> None:
        """Start to count the silence of a stream that is being opened."""
        self.stream_silent_s = 0.0
        self._idle_since_s = None

    def heard(self) -> None:
        """End all silences at a message of the newest stream."""
        self.was_heard = True
        self.silent_s = self.session_silent_s = self.stream_silent_s = 0.0

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """Note a heartbeat."""
        self._beat, self._beat_s = heartbeat, now

    def step_done(self, step_id: int, command: Command, seconds: float) -> None:
        """Note that a step took `seconds`, without its time on the network."""
        self._idle_since_s = None
        self._bytes_per_s = SLOW_BYTES_PER_S
        if not isinstance(command, Batch):
            return
        if not self.usual_step_s:
            self.usual_step_s = seconds
        self.usual_step_s += USUAL_WEIGHT * (seconds - self.usual_step_s)
        self._cost.learn_some(step_id, command, seconds)

    def look(self, in_flight: dict[int, Command], now: float) -> None:
        """
        Update the silences and `stuck_s`; to be called after all events were taken.

        Args:
            in_flight: Steps without a result, by their ids.
            now: Seconds.
        """
        gap_s = min(max(0.0, now - self._looked_s), LONGEST_GAP_S)
        self._looked_s = now
        self.silent_s += gap_s
        self.session_silent_s += gap_s
        self.stream_silent_s += gap_s
        self.stuck_s = self._late_by_s(in_flight)

    def is_stalled(
        self, in_flight: dict[int, Command], in_flight_bytes: int, last_applied: int, now: float
    ) -> bool:
        """
        Return True if the stream has lost a message, which attaching a new stream brings.

        The sign is that steps wait for their results while heartbeats say that no step runs, or
        that steps are done of which no result came. To be called once per look; if it returns True,
        `begin_stream` must follow.
        """
        beat = self._beat
        is_idle = beat is not None and (
            not beat.running_step_id or beat.last_completed_step_id > last_applied
        )
        if not in_flight or not is_idle:
            self._idle_since_s = None
            return False
        if self._idle_since_s is None:
            self._idle_since_s = now
        # A heartbeat of before `_idle_since_s` does not count: it may be older than these steps.
        patience_s = STALLED_AFTER_S + in_flight_bytes / self._bytes_per_s
        if self._beat_s - self._idle_since_s <= patience_s:
            return False
        self._bytes_per_s = max(self._bytes_per_s / 2, SLOWEST_BYTES_PER_S)
        return True

    def _late_by_s(self, in_flight: dict[int, Command]) -> float:
        beat = self._beat
        if beat is None or beat.elapsed_ms <= ALWAYS_ALLOWED_S * 1000:
            return 0.0
        command = in_flight.get(beat.running_step_id)
        if command is None:
            return 0.0
        return max(0.0, beat.elapsed_ms / 1000 - self._cost.allowed_s(command))
