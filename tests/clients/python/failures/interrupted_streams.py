"""
Program that is interrupted in streams, and asks again each time.

Usage: python -m tests.clients.python.failures.interrupted_streams ADDRESS NUM WHEN
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
from types import FrameType

from tandem_client import Client, Delta

AGAIN_S = 3.0
"""Python drops an interrupt that comes while it frees an object; a user presses Ctrl-C again."""
NUM_INTERRUPTS = 2
"""Most interrupts of one stream."""


class Interrupts:
    """Interrupts of the main thread, as Ctrl-C raises them, while it is in `while_reading`."""

    def __init__(self) -> None:
        self._draws = random.Random(1)
        self._num_left = 0
        signal.signal(signal.SIGALRM, self._interrupt)

    def come_within(self, longest_s: float, again_s: float) -> None:
        """Let interrupts come, the first at a random time, and the next one `again_s` later."""
        self._num_left = NUM_INTERRUPTS
        signal.setitimer(signal.ITIMER_REAL, self._draws.uniform(1e-5, longest_s), again_s)

    def come_soon(self) -> None:
        """Let one come at any moment of a short answer, and another right behind it."""
        self.come_within(0.003, self._draws.uniform(5e-5, 5e-4))

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not while_reading.__code__:
            frame = frame.f_back
        if frame is not None and self._num_left:
            self._num_left -= 1
            raise KeyboardInterrupt


def while_reading(client: Client, interrupts: Interrupts, when: str) -> None:
    """Read an answer that is interrupted from its `start`, or in the `middle` of its output."""
    if when == "start":
        interrupts.come_soon()
    with client.generate("one") as stream:
        for event in stream:
            if when == "middle" and isinstance(event, Delta):
                interrupts.come_within(0.002, AGAIN_S)


def main(address: str, num: int, when: str) -> None:
    """Print the text of the call that follows each interrupted stream."""
    interrupts = Interrupts()
    with Client(address) as client:
        for _ in range(num):
            with contextlib.suppress(KeyboardInterrupt):
                while_reading(client, interrupts, when)
            sys.stdout.write(f"{client.complete('two').text}\n")
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
