"""KV cache of one executor: swaps planned for slots to be released, and what its options select."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_svc.core.kv_cache.kv_cache import KvCache
from scheduler_svc.core.request.geometry import Limits
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.options import CoreOptions, Eviction, PreemptionMode
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.request.request_parts import Terms
from scheduler_svc.core.slots.slots import SlotTable
from tandem.errors import InternalError
from tests.scheduler_svc.core.harness import GREEDY, geometry_of, small_config

SWAP = PreemptionMode.SWAP
NUM_HOST_BLOCKS = 8


class Caches:
    """A KV cache and its slot table, with four tokens per block."""

    def __init__(self, **options) -> None:
        config = small_config()
        limits = Limits.of(config, geometry_of(config, num_host_blocks=NUM_HOST_BLOCKS))
        self.slots = SlotTable(limits)
        self.kv = KvCache(limits, CoreOptions(**options), self.slots)

    def preempted(self, number: int = 7, planned: int = 9) -> tuple[int, Request]:
        """Return a slot to be released, and its request, for which so many tokens were sent."""
        new = NewRequest(
            request_id=f"r{number}", handle=number, prompt=np.arange(20, dtype=np.int32),
            sampling=GREEDY, max_tokens=4, arrival_s=0.0,
        )  # fmt: skip
        request = Request(new=new, number=number, terms=Terms(stop_len=24))
        blocks = self.kv.pool.try_take(5)
        slot = self.slots.occupy(request, blocks, max_blocks=6)
        self.slots.advance(np.array([slot]), np.array([planned], np.int32))
        self.slots.vacate(slot)
        return slot, request


class TestPlannedSwaps:
    def test_a_planned_swap_is_taken_once(self):
        """
        A slot with a planned swap is copied out once, for its request, to the blocks reserved.
        """
        caches = Caches(preemption_mode=SWAP)
        slot, request = caches.preempted()
        assert caches.kv.try_plan_swap(slot, request)
        assert NUM_HOST_BLOCKS - 3 == caches.kv.host.num_free
        number, copy = caches.kv.take_planned_swap(slot)
        assert (7, 9, 3) == (number, copy.num_tokens, len(copy.blocks))
        assert caches.kv.take_planned_swap(slot) is None

    def test_swaps_are_planned_until_they_are_taken(self):
        """
        There are planned swaps from the first that is planned to the last that is taken.
        """
        caches = Caches(preemption_mode=SWAP)
        assert not caches.kv.has_planned_swaps
        slot, request = caches.preempted()
        caches.kv.try_plan_swap(slot, request)
        assert caches.kv.has_planned_swaps
        caches.kv.take_planned_swap(slot)
        assert not caches.kv.has_planned_swaps

    def test_a_request_that_ended_is_not_copied_out(self):
        """
        A slot is not copied out when the request it lost has ended since and freed its host blocks.
        """
        caches = Caches(preemption_mode=SWAP)
        slot, request = caches.preempted()
        caches.kv.try_plan_swap(slot, request)
        caches.kv.host.discard(request.number)
        assert caches.kv.take_planned_swap(slot) is None
        assert not caches.kv.has_planned_swaps

    def test_host_blocks_that_are_too_few_stay_free(self):
        """
        A request with more computed tokens than host memory has room for is not swapped out.
        """
        caches = Caches(preemption_mode=SWAP)
        caches.kv.host.try_reserve(1, 4 * (NUM_HOST_BLOCKS - 2), 4)
        slot, request = caches.preempted(planned=9)
        assert not caches.kv.try_plan_swap(slot, request)
        assert 2 == caches.kv.host.num_free
        assert caches.kv.take_planned_swap(slot) is None

    @pytest.mark.parametrize(
        ("mode", "planned"),
        [(SWAP, 0), (PreemptionMode.RECOMPUTE, 9)],
        ids=["nothing", "recompute"],
    )
    def test_nothing_to_copy_is_no_fallback(self, mode, planned):
        """
        Preemption needs no host blocks for a request with nothing computed, nor where it recomputes.
        """
        caches = Caches(preemption_mode=mode)
        assert caches.kv.try_plan_swap(*caches.preempted(planned=planned))
        assert not caches.kv.has_planned_swaps
        assert NUM_HOST_BLOCKS == caches.kv.host.num_free

    @pytest.mark.parametrize("may_index", [True, False], ids=["trusted", "distrusted"])
    def test_a_copy_of_kv_that_is_distrusted_is_not_indexed_later(self, may_index):
        """
        A copy may be indexed after it was swapped in if, and only if, its slot's KV might be.
        """
        caches = Caches(preemption_mode=SWAP)
        slot, request = caches.preempted()
        caches.kv.prefix_cache._may_index[slot] = may_index
        caches.kv.try_plan_swap(slot, request)
        assert may_index == caches.kv.host.copy_of(request.number).may_index

    def test_a_flush_forbids_indexing_of_copies(self):
        """
        A flush of the prefix cache reaches KV in host memory too.
        """
        caches = Caches(preemption_mode=SWAP)
        slot, request = caches.preempted()
        caches.kv.prefix_cache._may_index[slot] = True
        caches.kv.try_plan_swap(slot, request)
        assert 0 == caches.kv.flush()
        assert not caches.kv.host.copy_of(request.number).may_index

    def test_a_swap_of_a_slot_that_is_not_released_is_noticed(self):
        """
        A planned swap of a slot that no request has lost fails the check.
        """
        caches = Caches(preemption_mode=SWAP)
        slot, request = caches.preempted()
        caches.kv.try_plan_swap(slot, request)
        caches.kv.check_integrity(caches.slots, {request.number})
        caches.slots._vacated.clear()
        with pytest.raises(InternalError, match="swapped out and not released"):
            caches.kv.check_integrity(caches.slots, {request.number})


class TestOptions:
    def test_without_prefix_caching_there_is_no_cache_to_order_by(self):
        """
        The queue's order has a prefix cache to ask exactly where prefix caching is on.
        """
        on, off = Caches(prefix_caching=True).kv, Caches(prefix_caching=False).kv
        assert on.prefix_cache is on.prefixes
        assert off.prefixes is None
        assert off.pool.index is None

    @pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.REF_ZERO])
    def test_only_lru_keeps_blocks_without_a_holder(self, eviction):
        """
        Blocks that no table holds stay indexed under lru alone.
        """
        index = Caches(eviction=eviction).kv.pool.index
        assert (eviction is Eviction.LRU) == index.keeps_unheld
