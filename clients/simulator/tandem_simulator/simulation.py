"""Event loop on a virtual clock: arrivals, plans and results."""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.request.block_hashes import block_digests
from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem.errors import InternalError, TandemError
from tandem.link.batch import Batch
from tandem.link.results import StepResult
from tandem.sampling_params import SamplingParams
from tandem_simulator.audit import Audit
from tandem_simulator.executor.executor_model import ExecutorModel
from tandem_simulator.executor.model_tokens import EOS_ID, unlimited_outputs
from tandem_simulator.executor.step_time import StepTime
from tandem_simulator.recorder import PENDING, Recorder
from tandem_simulator.workload.ask import Ask, Requests

MEASURED = -1.0
"""Value of `core_s` that stands for the time that the core really takes on this machine."""
STEPS_PER_SAMPLE = 16
"""Steps between two samples of the core's state."""
USUAL_STEP_WEIGHT = 0.1
"""Weight of the latest step in the usual duration of a step, as in the service."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """
    Everything a simulation depends on besides its requests.

    Attributes:
        limits: Limits of scheduler and executor alike.
        options: Options of the core.
        step_time: Parameters of the executor's step time.
        num_host_blocks: KV blocks in the executor's host memory, for swapping.
        core_s: Virtual seconds that each `schedule` and each `apply` takes; `MEASURED` for the time
            that they really take, which makes results differ from run to run.
        is_checked: Check every token, KV position and the core's state, see `audit`.
    """

    limits: EngineConfig
    options: CoreOptions
    step_time: StepTime
    num_host_blocks: int = 0
    core_s: float = 0.0
    is_checked: bool = False

    @property
    def geometry(self) -> ExecutorGeometry:
        """Capacity of the executor: that of the limits, with as many slots as a real one has."""
        limits = self.limits
        return ExecutorGeometry(
            num_blocks=limits.max_num_blocks,
            block_size=limits.block_size,
            num_slots=2 * limits.max_batch_size,
            max_batch_size=limits.max_batch_size,
            max_total_tokens=limits.max_total_tokens,
            max_model_len=limits.max_model_len,
            num_host_blocks=self.num_host_blocks,
        )


class Simulation:
    """One run; `run` may be called once."""

    def __init__(self, setup: Setup, requests: Requests) -> None:
        """
        Make core, modelled executor and recorder.

        Raises:
            InvalidConfig: A limit or option is out of range.
        """
        self.setup = setup
        self.core = Scheduler(setup.limits, setup.geometry, setup.options)
        self.executor = ExecutorModel(setup.geometry)
        self.recorder = Recorder(requests.max_handles)
        self.clock = VirtualClock()
        self._requests = requests
        self._audit = Audit(self.core, self.executor) if setup.is_checked else None
        self._future: list[tuple[float, int, Ask]] = []
        self._opening = requests.opening()
        self._num_asked = 0
        self._live: dict[int, tuple[Ask, int]] = {}
        """Request and number of the choice, by handle, of completions that have not ended."""
        self._flights: deque[tuple[float, StepResult]] = deque()
        self._slot_handle = [-1] * setup.geometry.num_slots
        self._device_free_s = 0.0
        self._usual_step_s = 0.0
        self._num_steps = 0
        self._last_news = 0

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

    def _plan(self) -> None:
        self.core.expire(self.clock.now)
        while len(self._flights) < self.core.lookahead(self._usual_step_s):
            began = time.perf_counter()
            batch = self.core.schedule(self.clock.now)
            if batch is None:
                break
            self._spend(began)
            self._send(batch)
        self._take_events()

    def _send(self, batch: Batch) -> None:
        self._note_leaving(batch)
        if self._audit is not None:
            self._audit.before_step(batch)
        result, work = self.executor.execute(batch)
        if self._audit is not None:
            self._audit.after_step(batch, result)
        times = self.setup.step_time
        step_s = times.seconds(
            work.tokens, work.context, work.pairs, work.copied_blocks, work.swapped_blocks
        )
        start_s = max(self.clock.now + times.link_s, self._device_free_s)
        self._device_free_s = start_s + step_s
        if not self._usual_step_s:
            self._usual_step_s = step_s
        self._usual_step_s += USUAL_STEP_WEIGHT * (step_s - self._usual_step_s)
        self._flights.append((self._device_free_s + times.link_s, result))
        self.recorder.step(work, start_s, step_s)
        if self._num_steps % STEPS_PER_SAMPLE == 0:
            self.recorder.sample(self.core.stats(), self.clock.now)
        self._num_steps += 1
        if self._num_steps - self._last_news > STALL_STEPS:
            raise InternalError(
                f"{STALL_STEPS} steps brought no token and no end while "
                f"{self.core.num_requests} requests are in the system"
            )

    def _note_leaving(self, batch: Batch) -> None:
        """Record how much was computed in each slot that a batch releases, and its admissions."""
        for slot in batch.release_slot.tolist():
            handle = self._slot_handle[slot]
            if handle >= 0:
                self.recorder.leave(handle, int(self.executor.planned[slot]))
        for admission in batch.admits:
            owner = self.core.row_owner(admission.slot, admission.generation)
            if owner is None:
                raise InternalError(f"slot {admission.slot} was admitted for nobody")
            self._slot_handle[admission.slot] = owner
            self.recorder.admit(owner, admission)

    def _wait(self) -> bool:
        """Advance to the next event and apply results; return False when there is none."""
        due = [math.inf]
        if self._flights:
            due.append(self._flights[0][0])
        if self._future:
            due.append(self._future[0][0])
        if (deadline_s := self.core.next_deadline_s) is not None:
            due.append(deadline_s)
        then = min(due)
        if then == math.inf:
            return False
        self.clock.advance_to(max(then, self.clock.now))
        while self._flights and self._flights[0][0] <= self.clock.now:
            _, result = self._flights.popleft()
            began = time.perf_counter()
            self.core.apply(result, self.clock.now)
            self._spend(began)
            self._take_events()
        return True

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

    def _take_end(self, handle: int) -> None:
        ask, choice = self._live.pop(handle)
        if self.setup.is_checked:
            self._check_tokens(handle, ask, choice)
        if ask.conversation >= 0 and choice == 0:
            outputs = self.recorder.outputs(handle)
            follower = self._requests.follow(ask, outputs, self.clock.now)
            if follower is not None:
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
        if self._audit is not None:
            self._audit.check_everything()
