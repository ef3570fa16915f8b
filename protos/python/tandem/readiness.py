"""Reason why a server that answers computes no request: one wording for clients and operators."""

from __future__ import annotations


def why_unready(
    *,
    is_draining: bool,
    is_suspended: bool,
    refusal: str,
    is_attached: bool,
    num_sessions: int,
    executor: str = "",
) -> str:
    """
    Say what keeps a server that is not ready from serving, and what to do; the first cause counts.

    Args:
        is_draining: True if it was drained, or is stopping.
        is_suspended: True if an operator suspended it.
        refusal: Reason why executors that answer are not used; empty without one.
        is_attached: True if an executor session is attached.
        num_sessions: Number of sessions that were opened with executors so far.
        executor: Address of the last executor, for readers that may know it; else empty.
    """
    named = f"its executor {executor}" if executor else "its executor"
    causes = (
        (is_draining, "it was drained, or is stopping: stop it and start another"),
        (is_suspended, "an operator suspended it: go on with tandem resume"),
        (bool(refusal), refusal),
        (is_attached, f"{named} is silent or late with a step: see both logs"),
        (num_sessions > 0, f"{named} does not answer: start it, requests wait for it"),
    )
    unknown = "its executor is missing or still loading: see the log"
    return next((why for holds, why in causes if holds), unknown)
