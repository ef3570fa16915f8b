"""Single executors in words and as JSON, as commands show them."""

from __future__ import annotations

import dataclasses
from typing import Any

from tandem_client.admin import AdminClient
from tandem_client.admin.executors import ExecutorState, ExecutorSummary
from tandem_client.errors import Unimplemented

_MEANINGS = {
    ExecutorState.UNSPECIFIED: "is in a state that this version does not know",
    ExecutorState.SERVING: "serves",
    ExecutorState.DRAINING: "is drained: it takes no new request, and those that run go on",
    ExecutorState.DRAINED: "was drained, and is free to be stopped",
    ExecutorState.SUSPENDED: "is suspended, as the service is",
    ExecutorState.SILENT: "is silent, or its step takes far longer than steps do",
    ExecutorState.CONNECTING: "is not there",
    ExecutorState.REFUSED: "is not used",
}


def as_plain(one: ExecutorSummary) -> dict[str, Any]:
    """Return the fields of an executor for JSON, with the name of its state."""
    return dataclasses.asdict(one) | {"state": one.state.name}


def executors_of(admin: AdminClient, deadline_s: float | None) -> tuple[ExecutorSummary, ...]:
    """Return a server's executors; none of a server that is older than the call."""
    try:
        return admin.executors(deadline_s=deadline_s)
    except Unimplemented:
        return ()


def meaning_of(one: ExecutorSummary) -> str:
    """Say whether an executor serves, and why not."""
    said = _MEANINGS[one.state]
    if one.state is ExecutorState.CONNECTING:
        known = "was lost and is not back" if one.sessions else "has not been reached"
        said = f"{known} for {one.away_s:.0f} s"
    if one.reached_at not in {"", one.address}:
        said += f" (by {one.reached_at}, which stands by)"
    return f"{said}: {one.why}" if one.why else said
