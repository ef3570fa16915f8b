"""
Program that is interrupted in the middle of streams, and asks again each time.

Usage: python -m tests.clients.python.failures.interrupted_streams ADDRESS NUM
"""

from __future__ import annotations

import random
import signal
import sys
from typing import Any

from tandem_client import Client, Delta

AGAIN_S = 3.0
"""Python drops an interrupt that comes while it frees an object; a user presses Ctrl-C again."""


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(address: str, num: int) -> None:
    """Print the text of the call that follows each interrupt."""
    signal.signal(signal.SIGALRM, _interrupt)
    draws = random.Random(1)
    with Client(address) as client:
        for _ in range(num):
            try:
                with client.generate("one") as stream:
                    for event in stream:
                        if isinstance(event, Delta):
                            soon_s = draws.uniform(0.00001, 0.002)
                            signal.setitimer(signal.ITIMER_REAL, soon_s, AGAIN_S)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            sys.stdout.write(f"{client.complete('two').text}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
