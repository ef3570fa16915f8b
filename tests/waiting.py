"""Waiting for what other threads and processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


LIMIT_S = 200.0
"""
Seconds: longer than anything takes on a busy machine, and shorter than pytest lets a test take.
"""


class TooLate(AssertionError):
    """A condition that did not become true within its limit; the message names it."""


def wait_until(
    condition: Callable[[], Found], what: str, limit_s: float = LIMIT_S, every_s: float = 0.01
) -> Found:
    """
    Poll a condition until it is true; returns its value. It is asked once more when time is up.

    Args:
        condition: The condition.
        what: The condition in words.
        limit_s: Longest time, in seconds.
        every_s: Seconds between two looks.

    Raises:
        TooLate: It is not true within the limit.
    """
    end_s = time.monotonic() + limit_s
    is_late = False
    while not (found := condition()):
        if is_late:
            raise TooLate(f"not within {limit_s:g} s: {what}")
        time.sleep(every_s)
        is_late = time.monotonic() >= end_s
    return found
