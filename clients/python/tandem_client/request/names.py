"""Refusal of misspelt keyword arguments, with the name that was meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from tandem.wording import nearest

Class = TypeVar("Class", bound=type)

_ELSEWHERE = {
    "base_url": "address",
    "host": "address",
    "target": "address",
    "url": "address",
    "headers": "metadata",
    "max_retries": "retry",
    "retries": "retry",
    "retry_policy": "retry",
    "timeout": "deadline_s",
    "timeout_s": "deadline_s",
    "token": "api_key",
    "max_workers": "concurrency",
}
"""Names in other libraries, and our names for the same."""


def suggests_names(cls: Class) -> Class:
    """
    Make the constructor and the public methods of a class name what a misspelt keyword argument
    was meant to be. Methods that take options of a request do so themselves.
    """
    for name, function in list(vars(cls).items()):
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            known = _keywords(function)
            if known is not None:
                setattr(cls, name, _checked(function, known))
    return cls


def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names that may be given to a function; None if it checks them itself."""
    signature = inspect.signature(function, eval_str=True)
    known: set[str] = set()
    for one in signature.parameters.values():
        if one.kind is not one.VAR_KEYWORD:
            known.add(one.name)
        elif function.__name__ != "__init__":
            return None
        else:
            known.update(*(packed.__annotations__ for packed in get_args(one.annotation)))
    return frozenset(known)


def _checked(function: Callable[..., Any], known: frozenset[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                raise TypeError(_refusal(name, known, function.__qualname__))
        return function(*args, **kwargs)

    return checked


def _refusal(name: str, known: frozenset[str], where: str) -> str:
    meant = _ELSEWHERE.get(name)
    meant = meant if meant in known else nearest(name, known)
    hint = f". Did you mean {meant!r}?" if meant else ""
    return f"{where}() got an unexpected keyword argument {name!r}{hint}"
