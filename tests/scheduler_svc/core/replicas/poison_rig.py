"""Several executors of which some requests, or every step, is the death."""

from __future__ import annotations

from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.core.request.options import CoreOptions
from tandem.errors import OutOfMemory, PoisonRequest
from tandem.link.batch import Batch
from tests.scheduler_svc.core.harness import small_config
from tests.scheduler_svc.core.replicas.fleet_rig import Engine, FleetRig

WIDE = small_config(max_num_blocks=128, max_batch_size=8, max_total_tokens=64)
LOST = None
"""Message in place of the result of a step that an executor died in."""


class PoisonRig(FleetRig):
    """
    Driver of a core with executors that die.

    Attributes:
        kills_at: By handle, the position that kills an executor when it is computed.
        broken: Executors that die of every step with rows.
        deaths: Executor and handles of each step that died.
        poisoned_by: By handle, the executors that died of it.
        out_for_s: Seconds for which an executor that died is away.
    """

    def __init__(self, geometries: list[ExecutorGeometry] | int, **changes) -> None:
        changes.setdefault("config", WIDE)
        changes.setdefault("options", CoreOptions(schedule_conservativeness=0.0))
        super().__init__(geometries, **changes)
        self.kills_at: dict[int, int] = {}
        self.broken: set[int] = set()
        self.deaths: list[tuple[int, frozenset[int]]] = []
        self.poisoned_by: dict[int, list[int]] = {}
        self.out_for_s = 0.0
        self._back_at: dict[int, float] = {}
        self._in_flight: dict[int, list[frozenset[int]]] = {}

    def turn(self, number: int, seconds: float = 0.01) -> bool:
        """Let one executor have a turn, unless it is away."""
        self.now += seconds
        if self._back_at.get(number, 0.0) > self.now:
            return False
        engine = self.engines[number]
        did = len(engine.pending) < self.window(number) and self._plan(engine)
        if not did and engine.pending:
            did = True
            if engine.pending[0] is LOST:
                self.die(number)
            else:
                self._in_flight[number].pop(0)
                engine.port.apply(engine.pending.popleft(), self.now)
        self.collect()
        return did

    def window(self, number: int) -> int:
        """Return how many steps may be in flight, as the service has it."""
        return min(self.delay, self.engines[number].port.lookahead(0.02))

    def die(self, number: int, died_in: int = 0) -> None:
        """Let an executor die in a step in flight."""
        handles = self._in_flight[number][died_in]
        self.deaths.append((number, handles))
        for handle in handles & self.kills_at.keys():
            self.poisoned_by.setdefault(handle, []).append(number)
        self.forget_steps(number)
        self._back_at[number] = self.now + self.out_for_s
        self.lose(number, died_in)

    def forget_steps(self, number: int) -> None:
        """Forget the steps of an executor that is lost or leaves."""
        self._in_flight[number] = []

    def marked(self) -> set[int]:
        """Return the handles of all requests with a mark."""
        return {mark.request.new.handle for mark in self.core._cell.suspects.marks()}

    def running(self, number: int) -> set[int]:
        """Return the handles of the requests in slots of an executor."""
        requests = self.engines[number].port._replica.slots.running_requests()
        return {request.new.handle for request in requests}

    def check_only_failed(self, failed: set[int], error: type = PoisonRequest) -> None:
        """Check that these fail, and that all others have every token."""
        assert failed == set(self.failed)
        assert all(isinstance(self.failed[handle].error, error) for handle in failed)
        for handle in self.submitted.keys() - failed:
            assert self.expected(handle) == self.outputs[handle]
        assert not self.core._cell.suspects.has_marks
        assert self.core._cell.suspects.quarantine.number is None

    def check_out_of_memory(self, failed: set[int]) -> None:
        """Check that these fail for want of memory, and that all others have every token."""
        self.check_only_failed(failed, OutOfMemory)

    def _plan(self, engine: Engine) -> bool:
        """Plan a step, and die of it where it is deadly; returns False where there is none."""
        batch = engine.port.schedule(self.now)
        if batch is None:
            return False
        slots = engine.port._replica.slots
        salts = {one.slot: slots.request_of(one.slot).new.cache_salt for one in batch.admits}
        engine.num_admitted += len(batch.admits)
        self._check_rules(engine, batch)
        handles = frozenset(slots.admitted.handle[batch.row_slot].tolist())
        self._in_flight.setdefault(engine.port.number, []).append(handles)
        if LOST in engine.pending or self._is_deadly(engine, batch):
            engine.pending.append(LOST)
        else:
            engine.pending.append(engine.executor.execute(batch, engine.port.state_hash, salts))
        return True

    def _check_rules(self, engine: Engine, batch: Batch) -> None:
        """Check that marked requests run on the quarantined executor, and trials by themselves."""
        suspects, number = self.core._cell.suspects, engine.port.number
        rows = set(engine.port._replica.slots.admitted.number[batch.row_slot].tolist())
        marked = {mark.request.number for mark in suspects.marks()}
        if number != suspects.quarantine.number:
            assert not rows & marked, "a marked request runs on another executor"
        elif suspects.trial:
            assert rows <= suspects.trial.keys(), "a request runs beside those that are tried"
            assert not rows or 1 == engine.port.num_inflight, "a trial of several steps"

    def _is_deadly(self, engine: Engine, batch: Batch) -> bool:
        if engine.port.number in self.broken and len(batch.row_slot):
            return True
        columns = zip(
            engine.port._replica.slots.admitted.handle[batch.row_slot].tolist(),
            batch.row_start.tolist(),
            batch.row_num_tokens.tolist(),
            strict=True,
        )
        return any(
            start <= self.kills_at.get(handle, -1) < start + count
            for handle, start, count in columns
        )
