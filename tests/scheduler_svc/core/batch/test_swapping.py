"""Preempted requests with their KV kept in host memory."""

from __future__ import annotations

import pytest

from scheduler_svc.core.kv_cache.host_blocks import HostBlocks
from scheduler_svc.core.request.options import CoreOptions, PreemptionMode, VictimRule
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import InternalError
from tests.scheduler_svc.core.harness import Rig, geometry_of, small_config


def swapping(
    num_requests: int,
    *,
    num_blocks: int = 16,
    num_host_blocks: int = 64,
    delay: int = 1,
    caching: bool = False,
    rule: VictimRule = VictimRule.FEWEST_GENERATED,
    block_size: int = 4,
) -> Rig:
    """Return a rig with requests that outgrow the pool together, with host memory to swap to."""
    config = small_config(
        block_size=block_size, max_num_blocks=num_blocks, max_batch_size=8, max_total_tokens=64
    )
    options = CoreOptions(
        schedule_conservativeness=0.0, preemption_mode=PreemptionMode.SWAP, victim_rule=rule,
        prefix_caching=caching,
    )  # fmt: skip
    geometry = geometry_of(config, num_host_blocks=num_host_blocks)
    rig = Rig(config, options=options, geometry=geometry, delay=delay)
    for _ in range(num_requests):
        rig.submit(prompt_len=8, max_tokens=min(40, num_blocks * block_size - 8))
    return rig


def step_until_swapped_out(rig: Rig):
    for _ in range(200):
        batch = rig.step()
        if batch is not None and len(batch.swap_out_block):
            return batch
    raise AssertionError("nothing was swapped out")


class TestSwapping:
    @pytest.mark.parametrize("delay", [1, 2, 4])
    @pytest.mark.parametrize("num_host_blocks", [3, 64])
    @pytest.mark.parametrize(
        ("rule", "caching"),
        [
            (VictimRule.FEWEST_GENERATED, True),
            (VictimRule.LAST_ADMITTED, False),
            (VictimRule.PAUSED_BUDGET, True),
        ],
    )
    def test_tokens_are_those_of_unlimited_memory(self, rule, caching, num_host_blocks, delay):
        """
        Each request produces what it produces alone, with host blocks for all victims or for some.
        """
        rig = swapping(
            5, num_host_blocks=num_host_blocks, delay=delay, caching=caching, rule=rule
        )  # fmt: skip
        rig.run()
        for handle in range(5):
            assert rig.expected(handle) == rig.outputs[handle]
        assert num_host_blocks == rig.core._replica.kv.host.num_free

    def test_what_is_swapped_in_is_not_called_cached(self):
        """
        The line of a prompt batch counts what the prefix cache held, not what was swapped in.
        """
        rig = swapping(4)
        rig.run()
        assert rig.core._cell.telemetry.counters.preemption.swapped_in_blocks
        lines = [line.text for line in rig.log_lines if line.text.startswith("Prefill batch")]
        assert lines
        assert all("#cached-token: 0," in line for line in lines)

    @pytest.mark.parametrize("block_size", [1, 4, 7])
    def test_nothing_is_computed_twice(self, block_size):
        """
        Each position is computed once, whatever is preempted, with host memory for every victim.
        """
        rig = swapping(4, num_blocks=64 // block_size, num_host_blocks=256, block_size=block_size)
        rig.run()
        assert rig.core.stats().retractions >= 1
        computed = sum(batch.num_tokens for batch in rig.batches)
        positions = sum(len(n.prompt) + n.max_tokens - 1 for n in rig.submitted.values())
        assert positions == computed

    def test_blocks_go_out_in_the_batch_that_releases_their_slot(self):
        """
        The KV that the victim has computed is copied, in whole blocks, from the blocks it held.
        """
        rig = swapping(3)
        tables = {}
        while not rig.core.stats().swapped_out_blocks:
            slots = rig.core._replica.slots
            tables = {
                slot: slots.blocks.table[slot, : -(-int(slots.planned[slot]) // 4)].tolist()
                for slot in slots.running.nonzero()[0].tolist()
            }
            batch = rig.step()
        expected = [block for slot in batch.release_slot.tolist() for block in tables[slot]]
        assert expected == batch.swap_out_block.tolist()
        assert len(set(batch.swap_out_host.tolist())) == len(expected)

    def test_a_victim_comes_back_with_its_positions_computed(self):
        """
        A victim is admitted with its KV swapped in from the host blocks it was swapped out to, and
        computes only the token that has none.
        """
        rig = swapping(2, num_blocks=14)
        out = step_until_swapped_out(rig)
        while not len((back := rig.step()).swap_in_host):
            pass
        (admission,) = back.admits
        assert out.swap_out_host.tolist() == back.swap_in_host.tolist()
        count = len(back.swap_in_block)
        assert admission.block_ids[:count].tolist() == back.swap_in_block.tolist()
        assert len(admission.token_ids) - 1 == admission.num_cached_tokens
        row = back.row_slot.tolist().index(admission.slot)
        assert 1 == back.row_num_tokens[row]

    def test_a_prompt_half_computed_goes_on_where_it_was(self):
        """
        A victim that had not finished its prompt computes only the rest of it.
        """
        rig = swapping(0)
        rig.submit(prompt_len=40, max_tokens=4)
        rig.core._cell.options = rig.core._cell.options.__class__(
            preemption_mode=PreemptionMode.SWAP, prefix_caching=False, chunked_prefill_size=16
        )
        rig.step()
        rig.core.preempt("r0")
        rig.run()
        assert rig.expected(0) == rig.outputs[0]
        assert 40 + 3 == sum(batch.num_tokens for batch in rig.batches)

    def test_only_what_the_prefix_cache_lacks_is_copied_back(self):
        """
        Blocks of the victim that are still cached are shared again instead of copied.
        """
        rig = swapping(1, num_blocks=32, caching=True)
        for _ in range(12):
            rig.step()
        rig.core.preempt("r0")
        out = rig.step()
        back = rig.step()
        assert len(out.swap_out_block) == len(back.admits[0].block_ids) == 5
        # Four full blocks are cached; the fifth is partly filled.
        assert 1 == len(back.swap_in_block)
        assert out.swap_out_block[:4].tolist() == back.admits[0].block_ids[:4].tolist()
        rig.run()
        assert rig.expected(0) == rig.outputs[0]

    @pytest.mark.parametrize(("flushed", "num_cached"), [("never", 7), ("before", 0), ("after", 0)])
    def test_what_was_computed_before_a_flush_is_not_found_after_it(self, flushed, num_cached):
        """
        A request that is swapped out before or after a flush comes back with what it had computed,
        and no other request gets that KV.
        """
        rig = swapping(2, num_blocks=14, caching=True)
        for _ in range(3):
            rig.step()
        if flushed == "before":
            rig.core.flush_prefix_cache()
        step_until_swapped_out(rig)
        (swapped,) = rig.core._replica.kv.host._copies
        if flushed == "after":
            rig.core.flush_prefix_cache()
        rig.run()
        assert all(rig.expected(handle) == rig.outputs[handle] for handle in range(2))
        late = rig.submit(prompt=rig.submitted[swapped].prompt, max_tokens=1)
        rig.run()
        assert num_cached == rig.ended[late].num_cached_tokens

    def test_a_batch_never_reads_host_blocks_it_writes(self):
        """
        A request preempted between two plans is back one batch after its blocks went out.
        """
        rig = swapping(1, num_blocks=32)
        for _ in range(3):
            rig.step()
        rig.core.preempt("r0")
        out, back = rig.step(), rig.step()
        assert len(out.swap_out_host)
        assert not out.admits
        assert out.swap_out_host.tolist() == back.swap_in_host.tolist()
        rig.run()

    def test_what_comes_back_is_not_copied_by_the_same_batch(self):
        """
        A choice that shares the prompt of one that is swapped in joins it a batch later, since a
        batch copies blocks before it swaps any in.
        """
        rig = swapping(0, num_blocks=32, num_host_blocks=3, delay=4)
        rig.submit(prompt_len=6, max_tokens=12, num_choices=2)
        for _ in range(4):
            rig.step()
        # Host blocks do for one of them; both wait until their results are back.
        rig.core.preempt("r0")
        while (back := rig.step()) is None or not back.admits:
            pass
        after = rig.step()
        assert [3, 0] == [len(back.swap_in_host), len(back.copy_source)]
        assert [0, 1] == [len(after.swap_in_host), len(after.copy_source)]
        rig.run()
        for handle in range(2):
            assert rig.expected(handle) == rig.outputs[handle]


class TestHostMemoryRunsOut:
    def test_who_finds_no_host_blocks_is_recomputed_and_counted(self):
        """
        A victim too large for the host blocks left recomputes; the counter says how many did.
        """
        rig = swapping(5, num_host_blocks=3)
        rig.run()
        stats = rig.core.stats()
        assert stats.swap_fallbacks >= 1
        assert stats.swapped_out_blocks <= 3 * stats.retractions

    def test_the_warning_names_what_happened(self):
        """
        Preemption by recompute for want of host blocks is not called a swap.
        """
        for num_host_blocks, mode in ((64, "swap"), (0, "recompute")):
            rig = swapping(4, num_host_blocks=num_host_blocks)
            rig.run()
            warned = [line.text for line in rig.log_lines if "not enough KV" in line.text]
            assert f"(by {mode})" in warned[0]

    def test_blocks_out_and_in_are_counted(self):
        """
        Every block that is swapped out comes back while no request is aborted.
        """
        rig = swapping(5)
        rig.run()
        stats = rig.core.stats()
        assert 0 < stats.swapped_out_blocks == stats.swapped_in_blocks
        assert 0 == stats.swap_fallbacks


class TestEnds:
    def test_cancelling_a_swapped_request_frees_its_host_blocks(self):
        """
        A cancelled request holds no host memory.
        """
        rig = swapping(3)
        step_until_swapped_out(rig)
        assert rig.core._replica.kv.host.num_free < 64
        for handle in range(3):
            rig.core.end_request(f"r{handle}", FinishReason.CANCELLED, rig.now)
        assert 64 == rig.core._replica.kv.host.num_free
        rig.run()

    def test_cancelling_before_the_copy_was_planned_copies_nothing(self):
        """
        A request that ends between losing its slot and the next plan has no blocks copied.
        """
        rig = swapping(1)
        for _ in range(3):
            rig.step()
        rig.core.preempt("r0")
        rig.core.end_request("r0", FinishReason.CANCELLED, rig.now)
        batch = rig.step()
        assert 1 == len(batch.release_slot)
        assert 0 == len(batch.swap_out_block)

    def test_a_lost_executor_takes_its_host_blocks_along(self):
        """
        KV that was swapped out is computed again after an executor loss, and all host blocks are
        free.
        """
        rig = swapping(3)
        step_until_swapped_out(rig)
        rig.lose_executor()
        assert 64 == rig.core._replica.kv.host.num_free
        rig.run()
        for handle in range(3):
            assert rig.expected(handle) == rig.outputs[handle]


class TestHostBlocks:
    def test_all_or_nothing(self):
        """
        A reservation that does not fit changes nothing.
        """
        host = HostBlocks(3)
        assert host.try_reserve(1, 9, 4)
        assert not host.try_reserve(2, 1, 4)
        assert 0 == host.num_free
        host.check_integrity({1})

    def test_what_a_batch_reads_is_written_by_a_later_one(self):
        """
        Blocks taken out are free only once the batch that reads them is planned.
        """
        host = HostBlocks(2)
        host.try_reserve(1, 8, 4)
        host.take_out(1)
        assert not host.try_reserve(2, 4, 4)
        host.check_integrity(set())
        host.settle()
        assert host.try_reserve(2, 4, 4)

    def test_who_has_nothing_frees_nothing(self):
        """
        Discarding the copy of a request without one is harmless.
        """
        host = HostBlocks(2)
        host.discard(7)
        assert 2 == host.num_free

    def test_a_copy_of_who_runs_is_an_inconsistency(self):
        """
        Only requests that own no slot have copies.
        """
        host = HostBlocks(2)
        host.try_reserve(1, 8, 4)
        with pytest.raises(InternalError, match="a copy in host memory"):
            host.check_integrity({2})
