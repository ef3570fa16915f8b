"""State of the core process beside the core's own. Owned by the core loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.executor_client.description import ExecutorDescription
from scheduler_svc.ipc.messages import Availability, Model
from scheduler_svc.process.tick_watch import LIVE_WITHIN_S, LONGEST_LOOK_S
from scheduler_svc.service.idempotency import IdempotencyKeys
from scheduler_svc.service.observe.activity import Activity
from scheduler_svc.service.observe.traced_requests import TracedRequests
from scheduler_svc.service.publisher import frontend_of
from tandem.engine_config import EngineConfig


@dataclass(slots=True, eq=False)
class ServiceState:
    """
    State of one scheduler service.

    Attributes:
        started_s: Time at which the service started.
        traced: Live requests whose spans are recorded, to which spans of steps link.
        core: The core, made when the first session with an executor opens, then kept for good.
        description: Description of the newest session's executor.
        limits: Engine limits in force with the executor that takes most.
        model: Model that frontends were last told they serve.
        availability: Availability that frontends were last told.
        handles: Handles of live choices, by frontend; a frontend that said Hello has an entry.
        keys: Idempotency keys of live requests.
        heard_s: Time of each frontend's latest message; each sends one every few seconds.
        looked_s: Time at which `look_at_frontends` was last called.
        frontends_alive: True while every frontend was heard within `LIVE_WITHIN_S`.
        draining: True once no new request is admitted.
        executor_given_up: True once the executor was away for longer than requests wait; reset
            when one is attached.
        unserved_s: Time at which a request was last refused because no executor was there, by the
            core or by a frontend; None for never.
        activity: The newest steps and faults, for operators.
    """

    started_s: float
    traced: TracedRequests
    core: Scheduler | None = None
    description: ExecutorDescription | None = None
    limits: EngineConfig | None = None
    model: Model | None = None
    availability: Availability = field(
        default_factory=lambda: Availability(executor_attached=False, ready=False, draining=False)
    )
    handles: dict[int, set[int]] = field(default_factory=dict)
    keys: IdempotencyKeys = field(default_factory=IdempotencyKeys)
    heard_s: dict[int, float] = field(default_factory=dict)
    looked_s: float = field(init=False)
    frontends_alive: bool = True
    draining: bool = False
    executor_given_up: bool = False
    unserved_s: float | None = None
    activity: Activity = field(init=False)

    def __post_init__(self) -> None:
        self.looked_s = self.started_s
        self.activity = Activity(self.started_s)

    @property
    def num_requests(self) -> int:
        """Number of live choices in the core."""
        return 0 if self.core is None else self.core.num_requests

    def look_at_frontends(self, now: float) -> None:
        """Judge whether every connected frontend's event loop runs, by when it was last heard."""
        # Time in which this process stood still does not count: it could hear no frontend then.
        stood_still_s = now - self.looked_s - LONGEST_LOOK_S
        if stood_still_s > 0:
            for frontend, heard_s in self.heard_s.items():
                self.heard_s[frontend] = min(now, heard_s + stood_still_s)
        self.looked_s = now
        oldest_s = min(self.heard_s.values(), default=now)
        self.frontends_alive = now - oldest_s < LIVE_WITHIN_S

    def forget(self, handle: int) -> None:
        """Drop the handle of a choice that ended."""
        self.keys.forget(handle)
        self.traced.forget(handle)
        handles = self.handles.get(frontend_of(handle))
        if handles is not None:
            handles.discard(handle)
