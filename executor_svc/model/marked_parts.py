"""Temporary wrapping of chosen methods of one object, such as with spans of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

Part: TypeAlias = Callable[..., Any]

Mark: TypeAlias = Callable[[str, Part], Part]
"""Function that takes a part's name and the part, and returns what to call instead."""


def mark_parts(owner: object, names: Iterable[str], mark: Mark) -> None:
    """
    Let calls of these methods on an object go through `mark`, until `unmark_parts`.

    The methods are shadowed by attributes of the object, not looked up through a hook: calls that
    are not marked cost nothing extra. `mark` gets the name without a leading underscore.
    """
    for name in names:
        setattr(owner, name, mark(name.lstrip("_"), getattr(owner, name)))


def unmark_parts(owner: object, names: Iterable[str]) -> None:
    """Undo `mark_parts`."""
    for name in names:
        vars(owner).pop(name, None)
