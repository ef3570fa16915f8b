"""What the core process knows beside the core's own state. Owned by the core loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.executor_client.description import ExecutorDescription
from scheduler_svc.ipc.messages import Availability, Model
from scheduler_svc.process.tick_watch import LIVE_WITHIN_S, LONGEST_LOOK_S
from scheduler_svc.service.idempotency import IdempotencyKeys
from scheduler_svc.service.publisher import frontend_of
from tandem.engine_config import EngineConfig


@dataclass(slots=True, eq=False, kw_only=True)
class ServiceState:
    """
    One scheduler service.

    Attributes:
        started_s: When it started.
        core: Made when the first executor is attached, then kept for good.
        description: The executor of the newest session.
        limits: The engine limits in force with it.
        model: What frontends were told they serve.
        availability: What frontends were told last.
        handles: Handles of live requests, by frontend; a frontend that said Hello has an entry.
        keys: Idempotency keys of live requests.
        heard_s: When each frontend was last heard; they speak every few seconds.
        looked_s: When that was judged last.
        frontends_alive: Each was heard lately.
        draining: No new request is taken.
        command_step: Step id of a suspension or resumption on its way; None while there is none.
        executor_given_up: The executor was away for longer than requests wait; reset when one is
            attached.
    """

    started_s: float
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
    command_step: int | None = None

    def __post_init__(self) -> None:
        self.looked_s = self.started_s

    @property
    def num_requests(self) -> int:
        """Requests in the system."""
        return 0 if self.core is None else self.core.num_requests

    @property
    def is_suspended(self) -> bool:
        """True between a suspension and a resumption."""
        return self.core is not None and self.core.is_suspended

    @property
    def has_obeyed(self) -> bool:
        """True once the executor has done what the last suspension or resumption asked for."""
        return self.command_step is None and (self.core is None or not self.core.is_command_due)

    def look_at_frontends(self, now: float) -> None:
        """Judge whether all of them turn; one that is gone is not waited for."""
        # While this process stood still it heard nobody, and nobody is to blame for that.
        stood_still_s = now - self.looked_s - LONGEST_LOOK_S
        if stood_still_s > 0:
            for frontend, heard_s in self.heard_s.items():
                self.heard_s[frontend] = min(now, heard_s + stood_still_s)
        self.looked_s = now
        oldest_s = min(self.heard_s.values(), default=now)
        self.frontends_alive = now - oldest_s < LIVE_WITHIN_S

    def forget(self, handle: int) -> None:
        """Note that a request ended."""
        self.keys.forget(handle)
        handles = self.handles.get(frontend_of(handle))
        if handles is not None:
            handles.discard(handle)
