"""Record of a simulation as columns: one entry per completion, token gap or step."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.events import CoreEvents, Ended
from scheduler_svc.core.request.request import FinishReason
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats
from tandem.errors import InternalError
from tandem.link.batch import Admission, Int32Column
from tandem_simulator.executor.executor_model import ModelledWork
from tandem_simulator.workload.ask import Ask

PENDING, FAILED, REFUSED = 0, -1, -2
"""Values of `Recorder.end` that are no FinishReason."""


@dataclass(frozen=True, slots=True)
class Sample:
    """State of the core at one time."""

    time_s: float
    used_blocks: int
    cached_blocks: int
    running: int
    waiting: int


class Recorder:
    """
    Columns of everything that happened.

    Columns of completions are indexed by handle and used up to `num_sent`. A request with several
    choices has as many handles, one per completion. All times are seconds on the virtual clock.

    Attributes:
        num_sent: Completions asked for so far; handles are below this.
        arrival_s: Time of arrival of each.
        first_token_s: Time of its first token; NaN before.
        last_token_s: Time of its latest token; NaN before the first.
        end_s: Time of its end; NaN before.
        queue_s: Seconds from its arrival to its first slot; NaN before its end.
        prompt_len: Tokens of its prompt.
        num_outputs: Tokens that it has produced.
        cached_tokens: Prompt tokens that were in the cache at its first admission; -1 before.
        executor: Number of the executor of its first admission; -1 before.
        num_preemptions: Times that it was preempted; 0 before its end.
        end: FinishReason, PENDING, FAILED or REFUSED.
    """

    def __init__(self, max_handles: int) -> None:
        self.num_sent = 0
        self.arrival_s = np.full(max_handles, np.nan)
        self.first_token_s = np.full(max_handles, np.nan)
        self.last_token_s = np.full(max_handles, np.nan)
        self.end_s = np.full(max_handles, np.nan)
        self.queue_s = np.full(max_handles, np.nan)
        self.prompt_len = np.zeros(max_handles, np.int64)
        self.num_outputs = np.zeros(max_handles, np.int64)
        self.cached_tokens = np.full(max_handles, -1, np.int64)
        self.executor = np.full(max_handles, -1, np.int32)
        self.num_preemptions = np.zeros(max_handles, np.int64)
        self.end = np.full(max_handles, PENDING, np.int8)
        self.errors: Counter[str] = Counter()
        """Completions that were refused or failed, by reason."""
        self.recomputed_tokens = 0
        self.samples: list[Sample] = []
        self._computed = np.zeros(max_handles, np.int64)
        self._offset = np.zeros(max_handles, np.int64)
        self._tokens: Int32Column = np.empty(1 << 16, np.int32)
        self._num_reserved = 0
        self._gaps: list[NDArray[np.float64]] = []
        self._work = array("q")
        self._step_start_s = array("d")
        self._step_s = array("d")
        self._step_executor = array("i")

    def send(self, ask: Ask) -> int:
        """Record a request that arrives; return the first of its handles."""
        handle = self.num_sent
        room = min(ask.output_len, ask.max_tokens)
        for one in range(handle, handle + ask.num_choices):
            self.arrival_s[one] = ask.arrival_s
            self.prompt_len[one] = len(ask.prompt)
            self._offset[one] = self._num_reserved
            self._num_reserved += room
        if self._num_reserved > len(self._tokens):
            grown = np.empty(2 * self._num_reserved, np.int32)
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown
        self.num_sent += ask.num_choices
        return handle

    def refuse(self, handle: int, num_choices: int, reason: str, now: float) -> None:
        """Record that a request was refused."""
        self.errors[reason] += num_choices
        for one in range(handle, handle + num_choices):
            self._close(one, REFUSED, now)

    def admit(self, handle: int, admission: Admission, executor: int) -> None:
        """Record that a completion got a slot, and its positions that must be computed again."""
        cached = admission.num_cached_tokens
        if self.cached_tokens[handle] < 0:
            self.cached_tokens[handle] = cached
            self.executor[handle] = executor
        self.recomputed_tokens += max(0, int(self._computed[handle]) - cached)

    def leave(self, handle: int, num_computed: int) -> None:
        """Record how many positions a completion had computed when its slot was released."""
        self._computed[handle] = num_computed

    def step(self, work: ModelledWork, start_s: float, step_s: float, executor: int) -> None:
        """Record a step that an executor has computed."""
        self._work.extend(
            (
                work.num_rows,
                work.num_decodes,
                work.tokens,
                work.copied_blocks,
                work.swapped_out_blocks,
                work.swapped_in_blocks,
            )
        )
        self._step_start_s.append(start_s)
        self._step_s.append(step_s)
        self._step_executor.append(executor)

    def sample(self, stats: Stats, now: float) -> None:
        """Record the core's state."""
        self.samples.append(
            Sample(
                now,
                stats.used_blocks,
                stats.total_blocks - stats.used_blocks - stats.free_blocks,
                stats.running_requests,
                stats.waiting_requests,
            )
        )

    def events(self, events: CoreEvents, now: float) -> None:
        """
        Record tokens and ends.

        Raises:
            InternalError: A completion ended twice, or a token is missing or was sent twice.
        """
        if len(events.token):
            self._take_tokens(events, now)
        for ended in events.ended:
            self._take_end(ended, now)
        for failed in events.failed:
            self.errors[failed.error.reason] += 1
            self._close(failed.handle, FAILED, now)

    def outputs(self, handle: int) -> Int32Column:
        """Return the tokens that a completion has produced, shape ``[num_outputs]``."""
        offset = int(self._offset[handle])
        return self._tokens[offset : offset + int(self.num_outputs[handle])].copy()

    @property
    def num_tokens(self) -> int:
        """Output tokens of all completions."""
        return int(self.num_outputs[: self.num_sent].sum())

    @property
    def inter_token_s(self) -> NDArray[np.float64]:
        """Gaps between successive tokens of a completion, seconds, shape ``[N]``."""
        return np.concatenate(self._gaps) if self._gaps else np.empty(0)

    @property
    def work(self) -> NDArray[np.int64]:
        """Rows, decodes, tokens, copied, swapped out and in blocks of each step, ``[steps, 6]``."""
        return np.frombuffer(self._work, np.int64).reshape(-1, 6)

    @property
    def step_start_s(self) -> NDArray[np.float64]:
        """Time at which its executor began each step, seconds, shape ``[steps]``."""
        return np.frombuffer(self._step_start_s, np.float64)

    @property
    def step_s(self) -> NDArray[np.float64]:
        """Duration of each step, seconds, shape ``[steps]``."""
        return np.frombuffer(self._step_s, np.float64)

    @property
    def step_executor(self) -> Int32Column:
        """Number of the executor of each step, shape ``[steps]``."""
        return np.frombuffer(self._step_executor, np.int32)

    def _take_tokens(self, events: CoreEvents, now: float) -> None:
        handle, offset = events.token_handle, events.token_offset
        if (self.num_outputs[handle] != offset).any():
            raise InternalError("a token of a request is missing, or there twice")
        self._tokens[self._offset[handle] + offset] = events.token
        self.num_outputs[handle] = offset + 1
        gaps = now - self.last_token_s[handle]
        self.last_token_s[handle] = now
        is_first = offset == 0
        if is_first.any():
            self.first_token_s[handle[is_first]] = now
            gaps = gaps[~is_first]
        self._gaps.append(gaps)

    def _take_end(self, ended: Ended, now: float) -> None:
        if ended.num_output_tokens != self.num_outputs[ended.handle]:
            raise InternalError(f"the end of {ended.handle} counts other tokens than it produced")
        self.queue_s[ended.handle] = ended.queue_s
        self.num_preemptions[ended.handle] = ended.num_preemptions
        self._close(ended.handle, FinishReason(ended.reason), now)

    def _close(self, handle: int, end: int, now: float) -> None:
        if self.end[handle] != PENDING or handle >= self.num_sent:
            raise InternalError(f"completion {handle} ends twice, or was never sent")
        self.end[handle] = end
        self.end_s[handle] = now
