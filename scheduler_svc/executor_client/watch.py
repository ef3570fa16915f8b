"""
Whether an executor is alive and gets on, judged by what was heard of it.

Pure: time is an argument. Time in which nobody looked does not count: a scheduler that was stopped,
or starved on a busy machine, must not take its own absence for the executor's.
"""

from __future__ import annotations

from tandem.link.batch import Batch, Command
from tandem.link.session import Heartbeat
from tandem.link.step_cost import ALWAYS_ALLOWED_S, StepCost, StepWork

LONGEST_GAP_S = 1.0
"""Most time between two looks that counts as silence."""
LEARN_EVERY = 16
"""One step in so many is learned from,"""
LEARN_OVER_S = 0.05
"""and each that takes longer than this: learning costs microseconds, and quick steps are many."""
USUAL_WEIGHT = 0.1
"""Of the latest step in how long one usually takes."""
STALLED_AFTER_S = 0.5
"""
Idle heartbeats for so long while steps wait for results: a message was lost on the stream. Or it is
large and the network slow: so there is time for its bytes besides,
"""
SLOW_BYTES_PER_S = 1e6
"""at this rate first, and on each next stream at half the rate, until a result comes."""
SLOWEST_BYTES_PER_S = 1e4


class ExecutorWatch:
    """
    What one session's executor was heard to do. Owned by the session.

    Attributes:
        usual_step_s: Seconds that a step usually computes; 0 before the first.
        silent_s: Since the last message of any stream, whatever session it was of.
        session_silent_s: Likewise, or since this session was opened.
        stream_silent_s: Since the last message of the newest stream, or since it was opened.
        stuck_s: Since the running step became late; 0 while none is.
        was_heard: Something was heard since the start.
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
        """The step that computed at the last heartbeat; 0 for none."""
        return 0 if self._beat is None else self._beat.running_step_id

    def begin_session(self) -> None:
        """A new session: what the one before was doing does not count; what steps cost does."""
        self._beat = self._idle_since_s = None
        self.stuck_s = 0.0
        self.session_silent_s = 0.0

    def begin_stream(self) -> None:
        """A stream is being opened."""
        self.stream_silent_s = 0.0
        self._idle_since_s = None

    def heard(self) -> None:
        """Any message of the newest stream came."""
        self.was_heard = True
        self.silent_s = self.session_silent_s = self.stream_silent_s = 0.0

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat came."""
        self._beat, self._beat_s = heartbeat, now

    def step_done(self, step_id: int, command: Command, seconds: float) -> None:
        """A step took so long, without its time on the way."""
        self._idle_since_s = None
        self._bytes_per_s = SLOW_BYTES_PER_S
        if not isinstance(command, Batch):
            return
        if not self.usual_step_s:
            self.usual_step_s = seconds
        self.usual_step_s += USUAL_WEIGHT * (seconds - self.usual_step_s)
        if step_id % LEARN_EVERY == 0 or seconds > LEARN_OVER_S:
            self._cost.learn(StepWork.of(command), seconds)

    def look(self, in_flight: dict[int, Command], now: float) -> None:
        """
        Judge; to be called at every turn, after all messages that came were taken.

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
        Whether heartbeats say that nothing runs, or that results are done that never came, while
        steps wait for their results: the stream lost a message, and attaching again brings it. To
        be asked once per look; after a yes `begin_stream` follows.
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
        # What was said before does not count: it may be older than the steps it knows nothing of.
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
