"""A core joined to several fake executors, each with a pace of its own."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import replace

from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.core.request.events import Ended, Failed
from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem.link.results import StepResult
from tests.scheduler_svc.core.fake_executor import FakeExecutor, expected_outputs
from tests.scheduler_svc.core.harness import geometry_of, new_request, small_config


class Engine:
    """One executor with its port and the results under way."""

    def __init__(self, port: ExecutorPort, geometry: ExecutorGeometry) -> None:
        self.port = port
        self.geometry = geometry
        self.executor = FakeExecutor(geometry)
        self.pending: deque[StepResult] = deque()
        self.num_admitted = 0

    def plan(self, now: float) -> bool:
        """Plan and compute a step; returns False where there was nothing to plan."""
        batch = self.port.schedule(now)
        if batch is None:
            return False
        slots = self.port._replica.slots
        salts = {one.slot: slots.request_of(one.slot).new.cache_salt for one in batch.admits}
        self.num_admitted += len(batch.admits)
        self.pending.append(self.executor.execute(batch, self.port.state_hash, salts))
        return True

    def start_over(self) -> None:
        """Be another, empty process."""
        self.executor = FakeExecutor(self.geometry)
        self.pending.clear()


class FleetRig:
    """Driver of a core with several executors."""

    def __init__(
        self,
        geometries: list[ExecutorGeometry] | int,
        *,
        config: EngineConfig | None = None,
        delay: int = 2,
        options: CoreOptions | None = None,
    ) -> None:
        self.config = config or small_config()
        if isinstance(geometries, int):
            geometries = [geometry_of(self.config)] * geometries
        self.delay = delay
        self.core = Scheduler(self.config, geometries[0], options)
        self.engines = {0: Engine(self.core, geometries[0])}
        self.now = 0.0
        self.submitted: dict[int, NewRequest] = {}
        self.outputs: dict[int, list[int]] = defaultdict(list)
        self.ended: dict[int, Ended] = {}
        self.failed: dict[int, Failed] = {}
        self.num_handles = 0
        for geometry in geometries[1:]:
            self.attach(geometry)

    def attach(self, geometry: ExecutorGeometry | None = None) -> None:
        """Let another executor join."""
        geometry = geometry or geometry_of(self.config)
        port = self.core.attach(self.config, geometry)
        self.engines[port.number] = Engine(port, geometry)

    def detach(self, number: int) -> None:
        """Let an executor leave, with whatever it was computing."""
        self.core.detach(number, self.now)
        del self.engines[number]
        self.collect()

    def lose(self, number: int, died_in: int | None = None) -> None:
        """Let an executor die and an empty one take its place."""
        engine = self.engines[number]
        engine.port.executor_lost(self.now, died_in)
        engine.start_over()
        self.collect()

    def submit(self, prompt_len: int = 5, max_tokens: int = 8, **changes) -> int:
        """Submit a request with a prompt of its own; returns the handle of its first choice."""
        handle = self.num_handles
        new = new_request(handle, prompt_len, max_tokens, self.now, **changes)
        self.num_handles += new.num_choices
        self.core.submit(new, self.now)
        for choice in range(new.num_choices):
            sampling = replace(new.sampling, choice=choice)
            self.submitted[handle + choice] = replace(new, sampling=sampling)
        self.collect()
        return handle

    def end(self, handle: int) -> None:
        """Abort one choice."""
        self.core.end_handle(handle, FinishReason.CANCELLED, self.now)
        self.collect()

    def turn(self, number: int, seconds: float = 0.01) -> bool:
        """Let one executor have a turn: a plan if its window has room, else a result."""
        self.now += seconds
        engine = self.engines[number]
        did = len(engine.pending) < self.delay and engine.plan(self.now)
        if not did and engine.pending:
            engine.port.apply(engine.pending.popleft(), self.now)
            did = True
        self.collect()
        return did

    def run(self, source: random.Random | None = None, limit: int = 20_000) -> None:
        """Give turns to executors, in order or at random, until nothing is left."""
        for at in range(limit):
            if not self.core.has_pending_work():
                break
            numbers = list(self.engines)
            self.turn(numbers[at % len(numbers)] if source is None else source.choice(numbers))
        assert not self.core.has_pending_work(), "work is left: something starves"
        for engine in self.engines.values():
            assert engine.port._replica.kv.pool.num_used == 0, "blocks are lost"

    def collect(self) -> None:
        """Take events; check that tokens come once, in order and before their request's end."""
        self.core.check_integrity()
        events = self.core.take_events()
        columns = zip(events.token_handle, events.token_offset, events.token, strict=True)
        for handle, offset, token in columns:
            assert int(handle) not in self.ended, "a token after the end"
            assert len(self.outputs[int(handle)]) == offset, "a token is missing or twice"
            self.outputs[int(handle)].append(int(token))
        for ended in events.ended:
            assert ended.handle not in self.ended | self.failed, "a request ends twice"
            self.ended[ended.handle] = ended
        for failed in events.failed:
            assert failed.handle not in self.ended | self.failed, "a request ends twice"
            self.failed[failed.handle] = failed

    def expected(self, handle: int) -> list[int]:
        """Return the outputs that a request must have produced."""
        new = self.submitted[handle]
        ends = new.eos_token_ids | new.stop_token_ids
        return expected_outputs(new.prompt, new.max_tokens, ends, choice=new.sampling.choice)

    def check_outputs(self) -> None:
        """Check that each request that was not aborted has its whole output, and no other begins."""
        assert not self.failed
        for handle in self.submitted:
            whole, found = self.expected(handle), self.outputs[handle]
            if self.ended[handle].reason is FinishReason.CANCELLED:
                whole = whole[: len(found)]
            assert whole == found, f"the output of {handle} is wrong"
