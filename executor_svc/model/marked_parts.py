"""Something put around chosen methods of one object for a while, such as spans of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Part: TypeAlias = Callable[..., Any]

Mark: TypeAlias = Callable[[str, Part], Part]
"""Gives what to call instead of a part; its name comes with it."""


def mark_parts(owner: object, names: Iterable[str], mark: Mark) -> None:
    """
    Have an object's own calls of these methods go through `mark`, until `unmark_parts`.

    The methods are shadowed in the object, not looked up through a hook: where nothing is marked
    calls cost what they always do. A leading underscore is no part of the name told to `mark`.
    """
    for name in names:
        setattr(owner, name, mark(name.lstrip("_"), getattr(owner, name)))


def unmark_parts(owner: object, names: Iterable[str]) -> None:
    """Call the methods as they are again."""
    for name in names:
        vars(owner).pop(name, None)
