"""Why a server that answers is not ready, in words for whoever has to do something about it."""

from __future__ import annotations

from tandem_client.admin import Stats


def why_unready(now: Stats) -> str:
    """What keeps this server from serving, and what to do: the first cause in its figures."""
    causes = (
        (now.draining, "it was drained, or is stopping: stop it and start another"),
        (now.suspended, "an operator suspended it: go on with tandem resume"),
        (bool(now.executor_refusal), now.executor_refusal),
        (
            now.executor_attached,
            f"its executor {now.executor_address} is silent or late with a step: see both logs",
        ),
        (
            now.executor_sessions > 0,
            f"its executor {now.executor_address} does not answer: start it, requests wait for it",
        ),
    )
    unknown = "its executor is missing or still loading: see the log"
    return next((why for holds, why in causes if holds), unknown)
