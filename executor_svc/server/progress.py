"""Check that steps complete in the time that similar steps took before."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.link.commands import Command
from tandem.link.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class _Running:
    started_s: float
    command: Command


class Progress:
    """
    Learned costs of steps, by which a running step that takes far too long counts as stuck.

    `start`, `was_stopped` and `end` are called under the step link's lock, `learn` by the thread
    that collects results, `is_stuck` by the heartbeat thread. The running step is replaced as one
    object, and an estimate read while it changes is one step behind. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._cost = StepCost()
        self._num_steps = 0
        self._running: _Running | None = None

    def start(self, command: Command, now_s: float) -> None:
        """Note that a step begins."""
        self._running = _Running(now_s, command)

    def was_stopped(self, seconds: float) -> None:
        """Note that the whole process, the running step included, was stopped for so long."""
        if (running := self._running) is not None:
            self._running = _Running(running.started_s + seconds, running.command)

    def end(self) -> None:
        """Note that the step is over, whether it succeeded or failed."""
        self._running = None

    def learn(self, command: Command, seconds: float) -> None:
        """Learn the time that a successful step took."""
        self._num_steps += 1
        self._cost.learn_some(self._num_steps, command, seconds)

    def is_stuck(self, now_s: float) -> bool:
        """Tell whether the running step takes longer than it may."""
        running = self._running
        if running is None:
            return False
        return now_s - running.started_s > self._cost.allowed_s(running.command)
