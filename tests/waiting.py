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


def wait_until(condition: Callable[[], Found], what: str, limit_s: float = LIMIT_S) -> Found:
    """Poll a condition until it is true; returns its value. It is asked once more when time is up."""
    end_s = time.monotonic() + limit_s
    is_late = False
    while not (found := condition()):
        assert not is_late, f"not within {limit_s} s: {what}"
        time.sleep(0.01)
        is_late = time.monotonic() >= end_s
    return found
