"""Waiting on the main thread, which is where signals are handled."""

from __future__ import annotations

import queue
from typing import TypeVar

_LOOK_S = 0.2

_T = TypeVar("_T")


def wait_for_news(news: queue.SimpleQueue[_T]) -> _T:
    """
    Take the next entry, which a signal handler may be the one to put.

    A signal that comes just before a wait without end begins is handled when the wait ends: never.
    So this looks up a few times per second.
    """
    while True:
        try:
            return news.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
