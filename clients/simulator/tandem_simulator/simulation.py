"""Event loop on a virtual clock: arrivals, plans and results."""

from __future__ import annotations

import heapq
import math
import time

import numpy as np

from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.core.request.block_hashes import block_digests
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.scheduler import Scheduler
from tandem.errors import InternalError, TandemError
from tandem.link.batch import Batch
from tandem.sampling_params import SamplingParams
from tandem_simulator.audit import Audit
from tandem_simulator.executor.engine import Engine
from tandem_simulator.executor.model_tokens import EOS_ID, unlimited_outputs
from tandem_simulator.executor.setup import MEASURED, Setup
from tandem_simulator.recorder import PENDING, Recorder
from tandem_simulator.workload.ask import Ask, Requests

STEPS_PER_SAMPLE = 16
"""Steps between two samples of the core's state."""
STALL_STEPS = 20_000
"""Steps in a row without any token or end after which the simulation counts as stuck."""


class VirtualClock:
    """Clock in seconds that only moves when told to, and never backwards."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def advance_to(self, then: float) -> None:
        """
        Move the clock to `then`.

        Raises:
            InternalError: `then` is in the past, or NaN.
        """
        if not then >= self.now:
            raise InternalError(f"the clock is at {self.now} and cannot go back to {then}")
        self.now = then


class Simulation:
    """
    One run; `run` may be called once.

    An executor's next step is planned when it has a result, when requests come or go otherwise,
    and, while requests wait, whenever it has nothing to do.
    """

    def __init__(self, setup: Setup, requests: Requests) -> None:
        """
        Make core, modelled executors and recorder.

        Raises:
            InvalidConfig: A limit or option is out of range.
        """
        self.setup = setup
        self.core = Scheduler(setup.limits_of(0), setup.geometry_of(0), setup.options)
        self.engines = [self._engine(number) for number in range(setup.num_executors)]
        self.recorder = Recorder(requests.max_handles)
        self.clock = VirtualClock()
        self._requests = requests
        self._audits = [self._audit(engine) for engine in self.engines]
        self._future: list[tuple[float, int, Ask]] = []
        self._opening = requests.opening()
        self._num_asked = 0
        self._live: dict[int, tuple[Ask, int]] = {}
        """Request and number of the choice, by handle, of completions that have not ended."""
        self._places: dict[int, tuple[Engine, int]] = {}
        """Executor and slot of each completion whose slot is not released yet."""
        self._waiting: set[int] = set()
        """Live completions without a slot."""
        self._outage = setup.outage
        self._num_steps = 0
        self._last_news = 0

    def _engine(self, number: int) -> Engine:
        setup = self.setup
        geometry = setup.geometry_of(number)
        port: ExecutorPort = self.core
        if number:
            port = self.core.attach(setup.limits_of(number), geometry)
        return Engine(port, geometry, setup.step_time, setup.num_stages)

    def _audit(self, engine: Engine) -> Audit | None:
        if not self.setup.is_checked:
            return None
        return Audit(self.core, engine.port, engine.model)

    def run(self) -> Recorder:
        """
        Run until every request has ended.

        Raises:
            InternalError: Requests are left but nothing more can happen, or a check failed.
        """
        self._draw_opening()
        while True:
            self._submit_due()
            self._plan()
            if self._wait():
                continue
            # Releases may be left that no result of their executor is to be waited for.
            self._let_all_plan()
            self._plan()
            if not self._wait():
                break
        self._finish()
        return self.recorder

    def _draw_opening(self) -> None:
        ask = next(self._opening, None)
        if ask is not None:
            self._push(ask)

    def _push(self, ask: Ask) -> None:
        heapq.heappush(self._future, (ask.arrival_s, self._num_asked, ask))
        self._num_asked += 1

    def _submit_due(self) -> None:
        while self._future and self._future[0][0] <= self.clock.now:
            ask = heapq.heappop(self._future)[2]
            if ask.turn == 0:
                self._draw_opening()
            self._submit(ask)
            self._let_all_plan()

    def _submit(self, ask: Ask) -> None:
        handle = self.recorder.send(ask)
        is_hashed = self.setup.options.prefix_caching
        size = self.setup.limits.block_size
        new = NewRequest(
            request_id=str(handle),
            handle=handle,
            prompt=ask.prompt,
            # The seed tells the modelled executor after how many tokens EOS comes.
            sampling=SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=ask.output_len),
            max_tokens=ask.max_tokens,
            arrival_s=ask.arrival_s,
            eos_token_ids=frozenset({EOS_ID}),
            deadline_s=None if ask.timeout_s is None else ask.arrival_s + ask.timeout_s,
            num_choices=ask.num_choices,
            priority=ask.priority,
            tenant=ask.tenant,
            cache_salt=ask.cache_salt,
            block_digests=block_digests(ask.prompt, size, ask.cache_salt) if is_hashed else b"",
        )
        try:
            self.core.submit(new, self.clock.now)
        except TandemError as error:
            self.recorder.refuse(handle, ask.num_choices, error.reason, self.clock.now)
        else:
            for choice in range(ask.num_choices):
                self._live[handle + choice] = ask, choice
                self._waiting.add(handle + choice)

    def _let_all_plan(self) -> None:
        for engine in self.engines:
            engine.may_plan = True

    def _plan(self) -> None:
        self.core.expire(self.clock.now)
        for engine in self.engines:
            is_idle = not engine.flights and bool(self._waiting)
            if engine.back_s is None and (engine.may_plan or is_idle):
                self._plan_steps(engine)
                engine.may_plan = False
        self._take_events()

    def _plan_steps(self, engine: Engine) -> None:
        port = engine.port
        while len(engine.flights) < port.lookahead(engine.usual_step_s):
            began = time.perf_counter()
            batch = port.schedule(self.clock.now)
            if batch is None:
                break
            self._spend(began)
            self._send(engine, batch)

    def _send(self, engine: Engine, batch: Batch) -> None:
        self._note_moves(engine, batch)
        audit = self._audits[engine.number]
        if audit is not None:
            audit.before_step(batch)
        flight = engine.send(batch, self.clock.now)
        if audit is not None:
            audit.after_step(batch, flight.result)
        if self._num_steps % STEPS_PER_SAMPLE == 0:
            self.recorder.sample(self.core.stats(), self.clock.now)
        self._num_steps += 1
        if self._num_steps - self._last_news > STALL_STEPS:
            raise InternalError(
                f"{STALL_STEPS} steps brought no token and no end while "
                f"{self.core.num_requests} requests are in the system"
            )

    def _note_moves(self, engine: Engine, batch: Batch) -> None:
        """Record what left the slots that a batch releases, and its admissions."""
        for slot in batch.release_slot.tolist():
            handle = engine.handles[slot]
            if handle >= 0:
                self._leave(handle, int(engine.model.planned[slot]))
        for admission in batch.admits:
            owner = engine.port.row_owner(admission.slot, admission.generation)
            if owner is None:
                raise InternalError(f"slot {admission.slot} was admitted for nobody")
            if owner in self._places:
                # It moves from another executor, whose slot is released with its next batch.
                former, slot = self._places[owner]
                self._leave(owner, int(former.model.planned[slot]))
            engine.handles[admission.slot] = owner
            self._places[owner] = engine, admission.slot
            self._waiting.discard(owner)
            self.recorder.admit(owner, admission, engine.number)

    def _leave(self, handle: int, num_computed: int) -> None:
        engine, slot = self._places.pop(handle)
        engine.handles[slot] = -1
        self.recorder.leave(handle, num_computed)
        if handle in self._live:
            self._waiting.add(handle)

    def _wait(self) -> bool:
        """Advance to the next event and take it; return False when there is none."""
        first = min(self.engines, key=_due_s)
        others = self._other_events()
        then = min(first.due_s, *others)
        if then == math.inf:
            return False
        self.clock.advance_to(max(then, self.clock.now))
        if min(others) <= self.clock.now:
            self._take_outage()
            self._let_all_plan()
        while first.due_s <= self.clock.now:
            self._apply(first)
            first = min(self.engines, key=_due_s)
        return True

    def _other_events(self) -> list[float]:
        """Return the times of the next events that are no results."""
        due = [one.back_s for one in self.engines if one.back_s is not None]
        if self._future:
            due.append(self._future[0][0])
        if (deadline_s := self.core.next_deadline_s) is not None:
            due.append(deadline_s)
        if self._outage is not None and (self._live or self._future):
            due.append(self._outage.at_s)
        return due or [math.inf]

    def _take_outage(self) -> None:
        """Lose the executor that is to be lost by now, and let one come back that is due."""
        now = self.clock.now
        for engine in self.engines:
            if engine.back_s is not None and engine.back_s <= now:
                engine.come_back()
        if self._outage is None or self._outage.at_s > now:
            return
        outage, self._outage = self._outage, None
        engine = self.engines[outage.executor]
        died_in = engine.step_at(now)
        for handle, num_computed in engine.lose(now + outage.back_after_s).items():
            self._leave(handle, num_computed)
        self._audits[engine.number] = self._audit(engine)
        engine.port.executor_lost(now, died_in)
        self._take_events()

    def _apply(self, engine: Engine) -> None:
        flight = engine.flights.popleft()
        began = time.perf_counter()
        engine.port.apply(flight.result, self.clock.now)
        self._spend(began)
        self.recorder.step(flight.work, flight.start_s, flight.step_s, engine.number)
        engine.may_plan = True
        self._take_events()

    def _spend(self, began: float) -> None:
        core_s = self.setup.core_s
        if core_s:
            spent_s = time.perf_counter() - began if core_s == MEASURED else core_s
            self.clock.advance_to(self.clock.now + spent_s)

    def _take_events(self) -> None:
        events = self.core.take_events()
        if not events:
            return
        if len(events.token) or events.ended or events.failed:
            self._last_news = self._num_steps
        self.recorder.events(events, self.clock.now)
        for ended in events.ended:
            self._take_end(ended.handle)
        for failed in events.failed:
            del self._live[failed.handle]
            self._waiting.discard(failed.handle)

    def _take_end(self, handle: int) -> None:
        ask, choice = self._live.pop(handle)
        self._waiting.discard(handle)
        if self.setup.is_checked:
            self._check_tokens(handle, ask, choice)
        if ask.conversation >= 0 and choice == 0:
            outputs = self.recorder.outputs(handle)
            for follower in self._requests.follow(ask, outputs, self.clock.now):
                self._push(follower)

    def _check_tokens(self, handle: int, ask: Ask, choice: int) -> None:
        found = self.recorder.outputs(handle)
        expected = unlimited_outputs(ask.prompt, ask.output_len, ask.max_tokens, choice)
        is_whole = self.recorder.end[handle] in {FinishReason.EOS, FinishReason.MAX_TOKENS}
        if is_whole and len(found) != len(expected):
            message = f"completion {handle} has {len(found)} tokens, expected {len(expected)}"
            raise InternalError(message)
        if (found != expected[: len(found)]).any():
            first = int(np.flatnonzero(found != expected[: len(found)])[0])
            message = (
                f"token {first} of completion {handle} is {found[first]}; with unlimited memory "
                f"it is {expected[first]}"
            )
            raise InternalError(message)

    def _finish(self) -> None:
        if self.core.has_pending_work():
            message = (
                f"{self.core.num_requests} requests are in the system, nothing is in flight and "
                "the core plans nothing"
            )
            raise InternalError(message)
        self.recorder.sample(self.core.stats(), self.clock.now)
        num_open = int(np.count_nonzero(self.recorder.end[: self.recorder.num_sent] == PENDING))
        if num_open or self._live:
            raise InternalError(f"{num_open} completions never ended")
        for audit in self._audits:
            if audit is not None:
                audit.check_everything()


def _due_s(engine: Engine) -> float:
    return engine.due_s
