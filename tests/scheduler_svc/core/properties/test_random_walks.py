"""Long random histories, each fixed by its seed."""

from __future__ import annotations

from collections import Counter

import pytest

from scheduler_svc.core.request.request import FinishReason
from tests.scheduler_svc.core.properties.core_world import CoreWorld
from tests.scheduler_svc.core.properties.random_walk import walk, walk_all, walk_full_lanes

MET = {
    *(reason.name for reason in FinishReason),
    "INVALID_LOGITS", "NEVER_FITS", "max_model_len", "max_num_seqs", "max_queued_requests",
    "max_queued_tokens", "max_tenant_requests", "max_tenant_queued_tokens",
    "tenant_tokens_per_minute", "QUEUE_FULL", "RETRACT out of memory", "RETRACT executor lost",
    "RETRACT shared KV was wrong", "RETRACT suspended", "EVICT out of memory", "copied_blocks",
    "POISON_REQUEST", "executor_deaths", "OUT_OF_MEMORY", "out_of_memory_steps", "RETRACT waits while others are tried",
    "retractions", "swapped_out_blocks", "swapped_in_blocks", "swap_fallbacks", "prefix_cache_hit_tokens",
}  # fmt: skip
"""Events that fourteen long histories must come across, or they would prove little."""


def what_happened(world: CoreWorld) -> Counter[str]:
    """Return how often a history met each event."""
    rig = world.rig
    counters = rig.core._cell.telemetry.counters.by_field()
    seen = counters.pop("refused_by_limit") + Counter(counters)
    seen["copied_blocks"] = sum(len(batch.copy_source) for batch in rig.batches)
    seen.update(ended.reason.name for ended in rig.ended.values())
    seen.update(failed.error.reason for failed in rig.failed.values())
    if rig.core._cell.telemetry.recorder is not None:
        for request_id in {new.request_id for new in rig.submitted.values()}:
            for event in rig.core.request_events(request_id):
                seen[f"{event.kind.name} {event.detail}"] += 1
    return seen


class TestRandomWalks:
    @pytest.mark.parametrize("first_seed", range(0, 60, 10))
    def test_short_walks_keep_every_promise(self, first_seed):
        """
        Limits hold, nothing leaks or starves, and tokens are exact under any options and history.
        """
        walk_all(range(first_seed, first_seed + 10), num_events=25)

    @pytest.mark.parametrize(
        "first_seed", [100, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (110, 120))]
    )
    @pytest.mark.parametrize("num_stages", [2, 4])
    def test_walks_over_stages_keep_every_promise(self, num_stages, first_seed):
        """
        The same holds on an executor with stages, whose lanes differ by a row at most; no row moves
        to another lane while a result of it is under way.
        """
        walk_all(range(first_seed, first_seed + 10), num_events=25, num_stages=num_stages)

    @pytest.mark.parametrize(
        "first_seed",
        [200, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(205, 230, 5))],
    )
    @pytest.mark.parametrize("num_stages", [2, 4])
    def test_full_lanes_keep_every_promise(self, num_stages, first_seed):
        """
        The same holds where lanes have many decodes, which come and go: each lane has its turns.
        """
        seeds = range(first_seed, first_seed + 5)
        walk_full_lanes(seeds, num_events=25, num_stages=num_stages)

    @pytest.mark.parametrize(("seed", "num_stages"), [(113, 2), (69, 3), (57, 4)])
    def test_a_decode_that_its_lane_gets_back_has_its_turns(self, seed, num_stages):
        """
        The same holds where a lane gives a decode away with results under way and gets it back.
        """
        walk_full_lanes([seed], num_events=40, num_stages=num_stages)

    @pytest.mark.slow
    def test_long_walks_keep_every_promise(self):
        """
        The same holds over histories of many requests, which meet every kind of preemption and end.
        """
        seen = Counter[str]()
        for seed in range(10_022, 10_036):
            seen += what_happened(walk(seed, num_events=400))
        assert not MET.difference(seen)

    @pytest.mark.slow
    @pytest.mark.parametrize("num_stages", [2, 4])
    def test_long_walks_over_stages_keep_every_promise(self, num_stages):
        """
        The same holds on an executor with stages.
        """
        seen = Counter[str]()
        for seed in range(20_018, 20_034):
            seen += what_happened(walk(seed, num_events=400, num_stages=num_stages))
        assert not MET.difference(seen)

    @pytest.mark.slow
    @pytest.mark.parametrize("num_stages", [2, 4, 7])
    def test_long_walks_over_full_lanes_keep_every_promise(self, num_stages):
        """
        The same holds where lanes have many decodes, over many requests.
        """
        walk_full_lanes(range(30_000, 30_004), num_events=200, num_stages=num_stages)
