"""One executor that serves requests, or is to: its link, its session, and the core's port to it."""

from __future__ import annotations

from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.executor_client.description import ExecutorDescription
from scheduler_svc.executor_client.link import ExecutorLink
from scheduler_svc.executor_client.session import ExecutorSession
from tandem.engine_config import EngineConfig
from tandem.link.results import StepResult


class Member:
    """
    One of the executors that serve together. Owned by the core loop.

    Attributes:
        address: Address that it was named with, by which operators know it.
        link: Link that talks to it, or to one that stands by in its place.
        session: Session with it.
        port: The core's port to it; None before its first session, and once it was away for longer
            than requests wait.
        description: Description of the newest session's executor; None before the first.
        limits: Engine limits in force with that executor.
        is_serving: True from the opening of a session that can be used to the loss of it.
        command_step: Step id of a suspension or resumption in flight; None without any.
        device_memory_bytes: Device memory in use at the latest step.
        num_steps: Number of steps with an applied result since the start.
        look_at_s: Time from which its silence is judged again.
        drain_until_s: Time by which its requests must have ended or move; None while it is not to
            be given back.
        num_moved: Number of requests that moved when it was given back.
        is_drained: True once it was given back.
        is_wanted: False once the name by which it was found does not mean it any more.
    """

    __slots__ = (
        "address",
        "command_step",
        "description",
        "device_memory_bytes",
        "drain_until_s",
        "is_drained",
        "is_serving",
        "is_wanted",
        "limits",
        "link",
        "look_at_s",
        "num_moved",
        "num_steps",
        "port",
        "session",
    )

    def __init__(self, address: str, link: ExecutorLink, session: ExecutorSession) -> None:
        self.address = address
        self.link = link
        self.session = session
        self.port: ExecutorPort | None = None
        self.description: ExecutorDescription | None = None
        self.limits: EngineConfig | None = None
        self.is_serving = False
        self.command_step: int | None = None
        self.device_memory_bytes = 0
        self.num_steps = 0
        self.look_at_s = 0.0
        self.drain_until_s: float | None = None
        self.num_moved = 0
        self.is_drained = False
        self.is_wanted = True

    def note_result(self, result: StepResult) -> None:
        """Note that the result of a step was applied."""
        self.num_steps += 1
        self.device_memory_bytes = result.device_memory_bytes

    @property
    def is_suspended(self) -> bool:
        """True from a suspension until its resumption was taken to be sent."""
        return self.port is not None and self.port.is_suspended

    @property
    def has_obeyed(self) -> bool:
        """True once the executor has done the last suspension or resumption."""
        return self.command_step is None and (self.port is None or not self.port.is_command_due)

    def is_computing(self, grace_s: float) -> bool:
        """Return True if it was heard within `grace_s` seconds and its steps get done."""
        session = self.session
        return (
            not self.is_drained
            and session.is_alive(grace_s)
            and session.is_progressing()
            and not self.is_suspended
            and not session.refusals.is_fenced
        )
