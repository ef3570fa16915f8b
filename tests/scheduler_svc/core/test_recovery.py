"""The loss or replacement of the executor, and results that do not fit a step in flight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import LEGAL_MOVES, FinishReason, Request, RequestState
from tandem.errors import IncompatibleExecutor, InternalError, NeverFits, PromptTooLong, SessionLost
from tandem.link.results import RowError, RowErrorKind
from tests.scheduler_svc.core.fake_executor import FakeExecutor
from tests.scheduler_svc.core.harness import Rig, geometry_of, small_config

BOLD = CoreOptions(schedule_conservativeness=0.0)
"""Options that admit whatever fits at present."""


class TestExecutorLost:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    @pytest.mark.parametrize("steps", [1, 2, 5, 9])
    def test_no_token_is_lost_or_repeated(self, delay, steps):
        """
        Each request produces its tokens once, after the loss of the executor at any step.
        """
        rig = Rig(small_config(max_total_tokens=8), delay=delay)
        handles = [rig.submit(prompt_len=9, max_tokens=12) for _ in range(6)]
        for _ in range(steps):
            rig.step()
        rig.lose_executor()
        assert (0, 0, 0) == (
            rig.core.stats().used_blocks,
            rig.core.state_hash,
            rig.core.num_inflight,
        )
        rig.run()
        assert [rig.expected(h) for h in handles] == [rig.outputs[h] for h in handles]

    def test_who_ran_waits_in_arrival_order_in_front(self):
        """
        Running and draining requests stand ahead of those that waited, by arrival.
        """
        rig = Rig(small_config(max_num_blocks=8, max_model_len=32), delay=4, options=BOLD)
        for _ in range(4):
            rig.submit(prompt_len=8, max_tokens=20)
        while not rig.core._replica.draining:
            rig.step()
        rig.lose_executor()
        assert [0, 1, 2, 3] == rig.core.waiting_handles()
        rig.run()

    def test_the_order_of_the_queue_forgets_the_lost_cache(self):
        """
        The cache of the lost executor gives no request a better place, however many changes the new
        cache has seen.
        """
        rig = Rig(small_config(max_batch_size=1))
        cached = np.arange(9, dtype=np.int32)
        rig.submit(prompt=cached, max_tokens=1)
        rig.run()
        rig.submit(prompt_len=1, max_tokens=20)
        for _ in range(5):
            rig.step()
        first, second = rig.submit(prompt_len=9, max_tokens=1), rig.submit(prompt=cached)
        assert [second, first] == rig.core.waiting_handles()
        rig.lose_executor()
        rig.step()
        assert [first, second] == rig.core.waiting_handles()
        rig.run()

    @pytest.mark.parametrize("delay", [1, 3])
    def test_what_is_lost_is_counted(self, delay):
        """
        The tokens sent for every request that ran or drained count as to be recomputed.
        """
        rig = Rig(delay=delay)
        for _ in range(3):
            rig.submit(prompt_len=5)
        rig.plan()
        for _ in range(2):
            rig.plan()
        rig.core.preempt("r1")
        assert 0 == rig.core.stats().recomputed_tokens
        rig.lose_executor()
        assert 3 * (5 + 2) == rig.core.stats().recomputed_tokens
        rig.run()

    def test_an_end_found_before_the_loss_stays_an_end(self):
        """
        A request that had ended is not run again, though its slot was never released.
        """
        rig = Rig()
        handle = rig.submit(max_tokens=1)
        rig.step()
        assert FinishReason.MAX_TOKENS == rig.ended[handle].reason
        rig.lose_executor()
        assert not rig.core.has_pending_work()
        assert rig.core.schedule(rig.now) is None

    def test_losing_again_and_again_ends_at_last(self):
        """
        Progress made between losses is kept.
        """
        rig = Rig()
        handles = [rig.submit(max_tokens=10) for _ in range(3)]
        for _ in range(9):
            rig.step()
            rig.step()
            rig.lose_executor()
        rig.run()
        assert [rig.expected(h) for h in handles] == [rig.outputs[h] for h in handles]


class TestUseGeometry:
    def use(self, rig: Rig, **changes) -> None:
        rig.geometry = replace(rig.geometry, **changes)
        rig.pending.clear()
        rig.sampled.clear()
        rig.core.use_geometry(rig.config, rig.geometry, rig.now)
        rig.executor = FakeExecutor(rig.geometry)
        rig.collect()

    def test_a_smaller_executor_takes_over_what_fits_it(self):
        """
        Requests that fit a smaller pool go on there, others fail with NEVER_FITS.
        """
        rig = Rig()
        small, large = rig.submit(max_tokens=12), rig.submit(prompt_len=30, max_tokens=12)
        for _ in range(4):
            rig.step()
        self.use(rig, num_blocks=10, num_slots=2)
        assert isinstance(rig.failed[large].error, NeverFits)
        rig.run()
        assert rig.expected(small) == rig.outputs[small]

    def test_a_shorter_context_ends_requests_at_its_limit(self):
        """
        A request ends with CONTEXT_LIMIT at a shorter max_model_len; one that is over it already
        fails.
        """
        rig = Rig()
        short, over = rig.submit(prompt_len=5, max_tokens=30), rig.submit(prompt_len=20)
        for _ in range(4):
            rig.step()
        self.use(rig, max_model_len=16)
        assert isinstance(rig.failed[over].error, PromptTooLong)
        rig.run()
        assert FinishReason.CONTEXT_LIMIT == rig.ended[short].reason
        assert rig.expected(short)[:11] == rig.outputs[short]

    def test_another_block_size_is_refused_and_changes_nothing(self):
        """
        An executor with another block size cannot take over.
        """
        rig = Rig()
        rig.submit()
        rig.step()
        with pytest.raises(IncompatibleExecutor):
            rig.core.use_geometry(rig.config, geometry_of(small_config(block_size=8)), rig.now)
        rig.run()

    def test_a_larger_executor_gives_more_room(self):
        """
        More requests run at once after moving to a larger executor.
        """
        rig = Rig(
            small_config(max_batch_size=4),
            geometry=geometry_of(small_config(), num_slots=2),
            options=BOLD,
        )
        for _ in range(4):
            rig.submit(prompt_len=4, max_tokens=20)
        assert 2 == len(rig.plan().admits)
        self.use(rig, num_slots=4)
        assert 4 == len(rig.plan().admits)
        rig.run()


class TestWrongResults:
    def planned(self) -> Rig:
        rig = Rig()
        rig.submit(prompt_len=4)
        rig.submit(prompt_len=4)
        rig.plan()
        return rig

    @pytest.mark.parametrize(
        "change",
        [
            lambda r: replace(r, slot=r.slot[:1], generation=r.generation[:1],
                              position=r.position[:1], token=r.token[:1]),
            lambda r: replace(r, slot=r.slot[::-1].copy()),
            lambda r: replace(r, generation=r.generation + np.uint32(1)),
            lambda r: replace(r, position=r.position + 1),
            lambda r: replace(r, token=r.token[:1]),
            lambda r: replace(r, row_errors=(RowError(
                slot=3, generation=1, kind=RowErrorKind.INVALID_LOGITS, message=""),)),
            lambda r: replace(r, row_errors=(RowError(
                slot=0, generation=1, kind=RowErrorKind.INVALID_LOGITS, message=""),)),
        ],
        ids=["missing", "order", "generation", "position", "lengths", "stranger", "both"],
    )  # fmt: skip
    def test_a_result_that_does_not_fit_its_batch_loses_the_session(self, change):
        """
        A result with other rows than its batch is refused and changes nothing.
        """
        rig = self.planned()
        good = rig.pending[0]
        with pytest.raises(SessionLost):
            rig.core.apply(change(good), rig.now)
        rig.core.check_integrity()
        rig.run()
        assert [rig.expected(0), rig.expected(1)] == [rig.outputs[0], rig.outputs[1]]

    def test_a_result_without_a_batch_loses_the_session(self):
        """
        A result that was not asked for is refused.
        """
        rig = self.planned()
        result = rig.pending[0]
        rig.run()
        with pytest.raises(SessionLost, match="no step in flight"):
            rig.core.apply(result, rig.now)


class TestRequestStates:
    def request(self, state: RequestState) -> Request:
        rig = Rig()
        rig.submit()
        (request,) = rig.core._cell.requests._by_id["", "r0"]
        request.state = state
        return request

    @pytest.mark.parametrize("start", RequestState)
    def test_only_legal_moves_are_possible(self, start):
        """
        A request can make exactly the documented moves; any other is an internal error.
        """
        for target in RequestState:
            request = self.request(start)
            if target in LEGAL_MOVES[start]:
                request.move(target)
                assert target is request.state
            else:
                with pytest.raises(InternalError, match="invalid state transition"):
                    request.move(target)
                assert start is request.state

    def test_an_end_is_final(self):
        """
        ENDED is the last state: no move leads out of it.
        """
        assert frozenset() == LEGAL_MOVES[RequestState.ENDED]
