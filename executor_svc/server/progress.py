"""Whether steps complete in the time that steps like them took before."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.link.batch import Batch, Command
from tandem.link.step_cost import StepCost, StepWork

LEARN_EVERY = 16
"""One step in so many is learned from,"""
LEARN_OVER_S = 0.05
"""and each that takes longer than this: learning costs microseconds, and quick steps are many."""


@dataclass(frozen=True, slots=True)
class _Running:
    started_s: float
    command: Command


class Progress:
    """
    Learns what steps cost and says whether the running one is older than it should ever get.

    `start`, `was_stopped` and `end` are called under the step link's lock, `learn` by one thread
    that sees results, `is_stuck` by the heartbeat thread: the running step is replaced whole, and
    an estimate read while it is changed is one step off. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._cost = StepCost()
        self._num_steps = 0
        self._running: _Running | None = None

    def start(self, command: Command, now_s: float) -> None:
        """Note that a step begins."""
        self._running = _Running(now_s, command)

    def was_stopped(self, seconds: float) -> None:
        """Note that nothing of this process ran for so long, the running step neither."""
        if (running := self._running) is not None:
            self._running = _Running(running.started_s + seconds, running.command)

    def end(self) -> None:
        """Note that the step is over, however it ended."""
        self._running = None

    def learn(self, command: Command, seconds: float) -> None:
        """Take in how long a step took that went well."""
        self._num_steps += 1
        if self._num_steps % LEARN_EVERY and seconds <= LEARN_OVER_S:
            return
        if isinstance(command, Batch):
            self._cost.learn(StepWork.of(command), seconds)

    def is_stuck(self, now_s: float) -> bool:
        """Tell whether a step is running for longer than it may."""
        running = self._running
        if running is None:
            return False
        return now_s - running.started_s > self._cost.allowed_s(running.command)
