"""Waiting on the main thread, which is where signals are handled."""

from __future__ import annotations

import queue
from typing import TypeVar

_LOOK_S = 0.2

_T = TypeVar("_T")


def wait_for_news(news: queue.SimpleQueue[_T]) -> _T:
    """
    Take the next entry; a signal handler may be the one to put it.

    A signal that comes just before an endless wait begins would be handled only when that wait
    ends, which is never. So this wakes up a few times per second.
    """
    while True:
        try:
            return news.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
