"""The core's side towards one executor: steps to send, and results to apply."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from scheduler_svc.core import suspension
from scheduler_svc.core.admission import fail_misfits
from scheduler_svc.core.batch.pausing import num_paused_blocks
from scheduler_svc.core.batch.planner import plan
from scheduler_svc.core.deadlines import end_overdue
from scheduler_svc.core.faults.executor_loss import lose_executor, prove
from scheduler_svc.core.faults.refusals import Refusal, lose_refused
from scheduler_svc.core.listing import slot_columns
from scheduler_svc.core.lookahead import lookahead
from scheduler_svc.core.output.output_processor import apply_result
from scheduler_svc.core.request.geometry import ExecutorGeometry, Limits
from scheduler_svc.core.slots.step_rows import StepRows
from scheduler_svc.core.state.fleet import Fleet
from scheduler_svc.core.state.replica import Replica
from tandem.engine_config import EngineConfig
from tandem.errors import InternalError
from tandem.link.batch import Batch
from tandem.link.commands import KvMode, Resume, Suspend
from tandem.link.results import StepResult


class _Detached:
    """Stand-in for the replica of a detached executor: each use of it raises InternalError."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __getattr__(self, name: str) -> NoReturn:
        raise InternalError(f"executor {self._number} is asked for and was removed")


class ExecutorPort:
    """
    One executor of a `Scheduler`.

    Each batch that `schedule` returns must be sent, and its result given to `apply`, in order; any
    number may be in flight. Every `now` is seconds on one clock that never goes back. Every method
    of a port but `expire` and `name_step` raises InternalError once its executor was detached.

    Attributes:
        number: Number of the executor.
    """

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._fleet = fleet
        self._cell = fleet.cell
        self._replica = fleet[number]
        """Kept here, as a turn asks for it several times."""
        self.number = number

    def note_detached(self) -> None:
        """Note that the executor was detached."""
        self._replica = cast("Replica", _Detached(self.number))

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        return self._replica.limits

    @property
    def state_hash(self) -> int:
        """Hash of the executor's slot state after the latest batch."""
        return self._replica.slots.state_hash()

    @property
    def num_inflight(self) -> int:
        """Number of steps in flight: batches and commands without an applied result."""
        return len(self._replica.steps.in_flight)

    @property
    def most_in_flight(self) -> int:
        """Most steps that may ever be in flight; `lookahead` says how many may be now."""
        return self._replica.steps.most_in_flight

    @property
    def num_slots_in_use(self) -> int:
        """Number of requests with a slot."""
        return self._replica.slots.num_running

    @property
    def num_running(self) -> int:
        """Number of requests that the executor computes, or whose last results are on their way."""
        return self._replica.slots.num_running + len(self._replica.draining)

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that requests hold; shared ones count once."""
        return self._replica.kv.pool.num_used

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks that are kept for prompts to come and that no request holds."""
        return self._replica.kv.pool.num_cached

    def close(self) -> None:
        """
        Admit no request here any more, as the executor is to be given back: those that run go on,
        and the others go elsewhere. `use_geometry` opens it again.
        """
        self._replica.gate.close()
        self._fleet.reroute(self.number)

    @property
    def num_paused_blocks(self) -> int:
        """Number of blocks that paused requests hold; shared ones count once."""
        return num_paused_blocks(self._replica)

    @property
    def paused_budget_blocks(self) -> int:
        """Number of blocks that paused requests may hold; 0 without a budget."""
        return self._cell.options.paused_budget_blocks

    def expire(self, now: float) -> None:
        """End each request past its deadline or queue limit; `schedule` does this too."""
        end_overdue(self._cell, now)

    def schedule(self, now: float) -> Batch | None:
        """
        Plan the next batch; None when there is nothing to send. It may consist of releases alone.
        """
        end_overdue(self._cell, now)
        replica = self._replica
        if replica.gate.is_away:
            replica.gate.note_back()
        if replica.gate.suspension.is_in_force:
            return suspension.plan_suspended(replica)
        batch = plan(replica, now)
        if batch is None:
            self.name_step(None)
        elif self._cell.has_others:
            self._cell.router.note_change()
        return batch

    def name_step(self, step_id: int | None) -> None:
        """Note the id of the step planned last, for lines about it; None if nothing was sent."""
        events = self._cell.events
        if events.has_unnamed:
            events.name_step(step_id)

    def oldest_rows(self) -> StepRows | None:
        """Return what the oldest step in flight computes; None if that is nothing."""
        in_flight = self._replica.steps.in_flight
        return StepRows.of(in_flight[0], self._replica.slots) if in_flight else None

    def lookahead(self, usual_step_s: float) -> int:
        """
        Return how many steps may be in flight now, `take_command`'s included; costs O(1).

        Args:
            usual_step_s: Seconds that a step usually takes; 0 while that is not known.
        """
        return lookahead(self._replica, usual_step_s)

    def apply(self, result: StepResult, now: float) -> None:
        """
        Apply the result of the oldest batch in flight.

        Raises:
            SessionLost: It is not the result of that batch; nothing was changed then.
        """
        self._cell.note_time(now)
        replica = self._replica
        if not self._cell.has_others:
            apply_result(replica, result, now)
            return
        self._cell.router.note_change()
        rows = replica.steps.in_flight[0] if replica.steps.in_flight else None
        apply_result(replica, result, now)
        if rows is not None:
            replica.pace.note_step(rows, result.timings)

    @property
    def is_suspended(self) -> bool:
        """True from `suspend` until `resume` was called and its command was taken."""
        return self._replica.gate.suspension.is_in_force

    @property
    def is_command_due(self) -> bool:
        """True from `suspend` or `resume` until `take_command` has returned their command."""
        return self._replica.gate.suspension.is_command_due

    def suspend(self, mode: KvMode, now: float) -> None:
        """
        Plan no step until `resume` and have the executor give KV memory back as `mode` says.

        New requests are accepted and wait; slots of requests that end are released on resume. After
        PERSIST and OFFLOAD, running requests go on where they were; under RECOMPUTE they wait again
        with their outputs, in arrival order. A second suspension does nothing.
        """
        self.expire(now)
        suspension.suspend(self._replica, mode)

    def resume(self) -> None:
        """End a suspension; without one it does nothing."""
        suspension.resume(self._replica)

    def take_command(self) -> Suspend | Resume | None:
        """
        Return the command that must be sent as the next step, before `schedule` is called; its
        result goes to `apply` like a batch's. None when there is none.
        """
        return suspension.take_command(self._replica)

    def executor_lost(
        self,
        now: float,
        died_in: int | None = None,
        *,
        out_of_memory: bool = False,
        may_live: str = "",
    ) -> None:
        """
        Start over with an empty executor, which is there once `schedule` is called again. Until
        then requests are left to others and checked against what those can do, if there are any.

        Results in flight will not come. Requests that ran wait again with their outputs, in arrival
        order, ahead of those of their own priority that never ran.

        Args:
            now: The time.
            died_in: The step that was running when the executor died or failed, counted from the
                oldest in flight, which is 0: its requests may have caused it. None where no step is
                to blame, as when only the connection or the session was lost; an index past those
                in flight blames no step either.
            out_of_memory: True when that step failed for want of memory. No death is counted then,
                but steps become smaller, and a request fails if steps of it alone have failed so
                too often.
            may_live: The executor's boot id, where it is not known whether it died: no request is
                blamed before `executor_seen` says that it died.
        """
        self.expire(now)
        replica = self._replica
        replica.gate.note_away()
        lose_executor(replica, died_in, now, out_of_memory=out_of_memory, may_live=may_live)
        self._fleet.reroute(self.number)

    def batch_refused(self, refusal: Refusal, now: float) -> None:
        """Start over like `executor_lost`; requests of the refused batch fail by InternalError."""
        self.expire(now)
        replica = self._replica
        replica.gate.note_away()
        lose_refused(replica, refusal)
        self._fleet.reroute(self.number)

    def executor_seen(self, boot_id: str, now: float, *, died: bool) -> None:
        """
        Settle the fate of an executor that was lost and may have lived: its process was seen alive,
        or another one in its place. Nothing may be in flight.
        """
        self.expire(now)
        prove(self._replica, boot_id, now, died=died)

    def use_geometry(self, config: EngineConfig, geometry: ExecutorGeometry, now: float) -> None:
        """
        Go on with another, empty executor, as after `executor_lost`.

        With a shorter max_model_len of the largest executor a request ends there with
        CONTEXT_LIMIT; one that no executor can hold fails.

        Raises:
            InvalidConfig, IncompatibleExecutor: As the constructor; nothing was changed then.
        """
        limits = Limits.of(config, geometry)
        self._cell.options.check_limits(limits.max_total_tokens, limits.max_model_len)
        self.expire(now)
        self._fleet.replace(self.number, limits)
        fail_misfits(self._fleet)

    def row_owner(self, slot: int, generation: int) -> int | None:
        """Return the handle of the live request that has results with this slot and generation."""
        request = self._replica.request_at(slot, generation)
        return None if request is None else request.new.handle

    def slot_columns(self) -> dict[str, list[Any]]:
        """Return the contents of each live slot as sent, for comparison with the executor's."""
        return slot_columns(self._replica)
