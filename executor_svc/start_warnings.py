"""Warnings of an executor's start: logged as they come, and kept for its description."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import structlog

_kept: ContextVar[list[str] | None] = ContextVar("kept", default=None)

_log = structlog.get_logger(__name__)


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Yield a list that gets the sentence of each warning of this thread, without repeats."""
    sentences: list[str] = []
    token = _kept.set(sentences)
    try:
        yield sentences
    finally:
        _kept.reset(token)


def warn(event: str, sentence: str, **keys: object) -> None:
    """
    Log a warning and keep its sentence.

    Args:
        event: Name of the log event.
        sentence: Text for users: what was found, and what to do about it.
        keys: More keys of the log event.
    """
    _log.warning(event, what=sentence, **keys)
    keep(sentence)


def keep(sentence: str) -> None:
    """Keep the sentence of a warning that was logged elsewhere."""
    sentences = _kept.get()
    if sentences is not None and sentence not in sentences:
        sentences.append(sentence)
