"""Scenarios of clients/conformance/scenarios.json: what is filled in, and what must come of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.clients.conformance.cases import FOLDER

Json = dict[str, Any]
SCENARIOS: list[Json] = json.loads((FOLDER / "scenarios.json").read_text())["scenarios"]

_OF_THE_CALLER = ("tell", "pause_ms", "cancel_after_deltas", "keepalive_ms", "connection")


def filled_in(value: Any, names: Json) -> Any:
    """Return a part of a scenario with the values of texts that begin with `$`."""
    match value:
        case str() if value.startswith("$"):
            return names[value]
        case dict():
            return {key: filled_in(one, names) for key, one in value.items()}
        case list():
            return [filled_in(one, names) for one in value]
    return value


def undisturbed(command: Json) -> Json:
    """Return the command of a caller who only wants the result."""
    left = {key: value for key, value in command.items() if key not in _OF_THE_CALLER}
    return {**left, "retry": "none"}


def num_sequences(command: Json) -> int:
    """Return how many choices a command asks for."""
    if command["do"] != "generate":
        return 0
    number: int = command["request"].get("n", 1)
    return number


def needs_unbroken(wanted: Any) -> bool:
    """Return if any value of a result is that of an unbroken call."""
    if isinstance(wanted, dict):
        return any(map(needs_unbroken, wanted.values()))
    if isinstance(wanted, list):
        return any(map(needs_unbroken, wanted))
    return bool(wanted == "unbroken")


def check(wanted: Any, found: Any, unbroken: Any, where: str) -> None:
    """
    Check that a result is as wanted: of an object only the fields named.

    A value may be `any` for all but null, `unbroken` for what an undisturbed caller gets, or
    `{"one_of": [...]}`.
    """
    match wanted:
        case "any":
            assert found is not None, where
        case "unbroken":
            assert unbroken is not None, where
            assert found == unbroken, f"{where}: {found} instead of {unbroken}"
        case {"one_of": values}:
            assert found in values, f"{where}: {found} is not among {values}"
        case dict():
            assert isinstance(found, dict), f"{where}: {found} instead of {wanted}"
            for key, value in wanted.items():
                check(value, found.get(key), _part(unbroken, key), f"{where}.{key}")
        case list():
            assert isinstance(found, list), f"{where}: {found} instead of {wanted}"
            assert len(wanted) == len(found), f"{where}: {found} instead of {wanted}"
            for at, value in enumerate(wanted):
                check(value, found[at], _part(unbroken, at), f"{where}[{at}]")
        case _:
            assert wanted == found, f"{where}: {found!r} instead of {wanted!r}"


def _part(whole: Any, at: Any) -> Any:
    get: Callable[[Any], Any] | None = getattr(whole, "get", None)
    if get is not None:
        return get(at)
    return whole[at] if isinstance(whole, list) and isinstance(at, int) else None
