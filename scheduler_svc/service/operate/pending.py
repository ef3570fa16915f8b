"""A command whose answer takes until its effect is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pending:
    """
    Answer of a command that waits for its effect.

    Attributes:
        until_s: Time at which it is answered at the latest.
        is_done: Returns True once the effect is there.
        result: Returns the answer; called once `is_done` returns True, or at `until_s`.
    """

    until_s: float
    is_done: Callable[[], bool]
    result: Callable[[], msgspec.Struct]
