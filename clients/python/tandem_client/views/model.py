"""The view model: all that a screen or a page draws of a server, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem_client.admin import Stats
from tandem_client.admin.activity import Activity, FaultKind
from tandem_client.admin.executors import ExecutorSummary
from tandem_client.admin.requests import RequestState, RequestSummary
from tandem_client.views.history import Point, SnapshotHistory
from tandem_client.views.rates import Rates, rates_between
from tandem_client.views.unready import why_unready

_FAULTS = {
    FaultKind.UNSPECIFIED: "a fault that this version does not know",
    FaultKind.EXECUTOR_LOST: "executor lost",
    FaultKind.REQUESTS_FAILED: "requests failed",
    FaultKind.FRONTEND_GONE: "frontend process ended",
    FaultKind.BOOKKEEPING: "bookkeeping error, a bug",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorView:
    """
    One executor.

    Attributes:
        summary: What the server tells of it.
        steps_per_s: Steps per second; None where there is nothing to compare.
    """

    summary: ExecutorSummary
    steps_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step: its number, executor, time on the executor, and size."""

    number: int
    executor: str
    compute_ms: float
    tokens: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultView:
    """One fault in words, its age in seconds, and how often it happened of late."""

    what: str
    where: str
    why: str
    age_s: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewModel:
    """
    A server at its newest snapshot.

    Attributes:
        stats: Newest snapshot.
        state: "serving", "draining", "suspended" or "not serving".
        why: Reason in words where it does not serve; else empty.
        rates: Rates and means of the last seconds.
        points: Intervals between snapshots, for plots, oldest first.
        requests: Requests, those that run before those that wait, oldest first.
        num_requests: All of them, listed or not.
        executors: Executors, in the order in which they were named.
        steps: Newest steps, oldest first.
        faults: Newest faults, newest first.
        tells_activity: False of a server that tells no steps, faults and percentiles.
    """

    stats: Stats
    state: str
    why: str
    rates: Rates
    points: tuple[Point, ...]
    requests: tuple[RequestSummary, ...]
    num_requests: int
    executors: tuple[ExecutorView, ...]
    steps: tuple[StepView, ...]
    faults: tuple[FaultView, ...]
    tells_activity: bool


def view_of(history: SnapshotHistory) -> ViewModel:
    """Return the view of a server at its newest snapshot."""
    newest, oldest = history.newest, history.oldest
    stats, activity, listed = newest.stats, newest.activity, newest.requests
    rates = rates_between(stats, history.before)
    before = () if oldest is None else oldest.executors
    state, why = state_of(stats)
    return ViewModel(
        stats=stats,
        state=state,
        why=why,
        rates=rates,
        points=history.points,
        requests=() if listed is None else _in_order(listed.requests),
        num_requests=stats.running_requests + stats.waiting_requests
        if listed is None
        else listed.total,
        executors=_executors(newest.executors, before, rates.window_s),
        steps=_steps(activity),
        faults=_faults(activity),
        tells_activity=activity is not None,
    )


def state_of(stats: Stats) -> tuple[str, str]:
    """Return the state of a server in a word, and why it does not serve; empty if it does."""
    if stats.executor_attached and not stats.draining and not stats.suspended:
        return "serving", ""
    state = "draining" if stats.draining else "suspended" if stats.suspended else "not serving"
    return state, why_unready(stats)


def stats_by_name(stats: Stats) -> dict[str, Any]:
    """Return every field, with numbers as numbers, which protobuf's own JSON would quote."""
    values = {field.name: getattr(stats, field.name) for field in stats.DESCRIPTOR.fields}
    return values | {"refused_by_limit": dict(stats.refused_by_limit)}


def as_plain(view: ViewModel) -> dict[str, Any]:
    """Return a view for JSON: enums by their names, and the statistics by the names of fields."""
    return {
        "stats": stats_by_name(view.stats),
        "state": view.state,
        "why": view.why,
        "rates": dataclasses.asdict(view.rates),
        "points": [dataclasses.asdict(one) for one in view.points],
        "requests": [dataclasses.asdict(one) | {"state": one.state.name} for one in view.requests],
        "num_requests": view.num_requests,
        "executors": [
            dataclasses.asdict(one.summary)
            | {"state": one.summary.state.name, "steps_per_s": one.steps_per_s}
            for one in view.executors
        ],
        "last_steps": [dataclasses.asdict(one) for one in view.steps],
        "faults": [dataclasses.asdict(one) for one in view.faults],
        "tells_activity": view.tells_activity,
    }


def steps_per_s(
    now: Sequence[ExecutorSummary], before: Sequence[ExecutorSummary], window_s: float
) -> dict[str, float]:
    """
    Return the steps per second of each executor, by its address; none where nothing is to compare.

    Args:
        now: The executors now.
        before: The executors `window_s` seconds ago.
        window_s: Seconds between both; 0 = there was no earlier snapshot.
    """
    known = {one.address: one.steps for one in before}
    return {
        one.address: (one.steps - known[one.address]) / window_s
        for one in now
        # One that was removed and added in between counts from 0 again.
        if window_s > 0 and known.get(one.address, one.steps + 1) <= one.steps
    }


def _in_order(requests: Sequence[RequestSummary]) -> tuple[RequestSummary, ...]:
    """Return the requests that run before those that wait; each keeps its place among its own."""
    return tuple(sorted(requests, key=lambda one: one.state is RequestState.WAITING))


def _executors(
    now: Sequence[ExecutorSummary], before: Sequence[ExecutorSummary], window_s: float
) -> tuple[ExecutorView, ...]:
    rates = steps_per_s(now, before, window_s)
    return tuple(ExecutorView(summary=one, steps_per_s=rates.get(one.address)) for one in now)


def _steps(activity: Activity | None) -> tuple[StepView, ...]:
    return tuple(
        StepView(
            number=one.number,
            executor=one.executor,
            compute_ms=1000 * one.compute_s,
            tokens=one.tokens,
            requests=one.requests,
        )
        for one in (() if activity is None else activity.steps)
    )


def _faults(activity: Activity | None) -> tuple[FaultView, ...]:
    if activity is None:
        return ()
    return tuple(
        FaultView(
            what=_FAULTS[one.kind],
            where=one.where,
            why=": ".join(filter(None, (one.reason, " ".join(one.message.split())))),
            age_s=max(0.0, activity.uptime_s - one.at_s),
            count=one.count,
        )
        for one in reversed(activity.faults)
    )
