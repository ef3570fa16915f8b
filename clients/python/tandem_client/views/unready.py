"""Reason for which a server that answers is not ready, from its statistics."""

from __future__ import annotations

from tandem import readiness
from tandem_client.admin import Stats


def why_unready(now: Stats) -> str:
    """Return a text on what keeps this server from serving, and on what to do."""
    return readiness.why_unready(
        is_draining=now.draining,
        is_suspended=now.suspended,
        refusal=now.executor_refusal,
        is_attached=now.executor_attached,
        num_sessions=now.executor_sessions,
        executor=now.executor_address,
    )
