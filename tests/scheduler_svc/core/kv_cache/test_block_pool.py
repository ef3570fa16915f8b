"""The block pool: the KV blocks that are free, and the holders of the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.kv_cache.block_pool import BlockPool
from tandem.errors import InternalError


def blocks(*ids: int):
    return np.array(ids, np.int32)


class TestBlockPool:
    def test_ids_count_from_one(self):
        """
        A pool of N hands out the ids 1 to N and never block 0.
        """
        assert [1, 2, 3, 4] == sorted(BlockPool(4).try_take(4).tolist())

    def test_taking_is_all_or_nothing(self):
        """
        Asking for one block more than is free takes nothing.
        """
        pool = BlockPool(4)
        pool.try_take(1)
        assert pool.try_take(4) is None
        assert 3 == pool.num_free
        assert 3 == len(pool.try_take(3))

    def test_returned_blocks_are_free_again(self):
        """
        Blocks given back can be taken again.
        """
        pool = BlockPool(4)
        first = pool.try_take(4)
        pool.give_back(first[:2])
        assert sorted(first[:2].tolist()) == sorted(pool.try_take(2).tolist())

    @pytest.mark.parametrize(
        "wrong",
        [(1, 1), (4,), (0,), (5,), (-1,)],
        ids=["twice", "free", "dummy", "high", "negative"],
    )
    def test_giving_back_what_is_not_in_use_is_an_error(self, wrong):
        """
        A block that is free, named twice or not of the pool is refused and changes nothing.
        """
        pool = BlockPool(4)
        taken = pool.try_take(3)
        assert [1, 2, 3] == sorted(taken.tolist())
        with pytest.raises(InternalError):
            pool.give_back(blocks(*wrong))
        pool.check_integrity(taken)

    def test_usage_is_the_share_of_used_blocks(self):
        """
        Usage is the share of used blocks, and free and used ones make up the pool.
        """
        pool = BlockPool(4)
        pool.try_take(3)
        assert 0.75 == pool.usage
        assert (1, 3) == (pool.num_free, pool.num_used)

    @pytest.mark.parametrize(
        "owned", [(), (1, 2), (2, 2), (1, 2, 4)], ids=["lost", "extra", "twice", "free"]
    )
    def test_integrity_bites_on_wrong_owners(self, owned):
        """
        A lost block, one owned twice and one both free and owned are found.
        """
        pool = BlockPool(4)
        assert [1] == pool.try_take(1).tolist()
        with pytest.raises(InternalError):
            pool.check_integrity(blocks(*owned))

    def test_a_shared_block_is_free_when_its_last_holder_lets_go(self):
        """
        Each holder lets go once; the block is used until the last one has.
        """
        pool = BlockPool(4)
        (block,) = pool.try_take(1)
        pool.share(blocks(block))
        pool.give_back(blocks(block))
        assert (1, 1) == (pool.num_used, pool.num_holders(block))
        pool.give_back(blocks(block))
        assert (0, 4) == (pool.num_used, pool.num_free)

    def test_a_block_listed_twice_is_let_go_twice(self):
        """
        Two holders may let go in one call, and the block is free once.
        """
        pool = BlockPool(4)
        (block,) = pool.try_take(1)
        pool.share(blocks(block))
        pool.give_back(blocks(block, block))
        pool.check_integrity(blocks())

    def test_a_free_block_cannot_be_shared(self):
        """
        Sharing a block that has no holder and is not indexed is an error that changes nothing.
        """
        pool = BlockPool(4)
        taken = pool.try_take(1)
        with pytest.raises(InternalError):
            pool.share(blocks(1, 2))
        pool.check_integrity(taken)

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.integers(min_value=-6, max_value=6), max_size=40))
    def test_random_use_agrees_with_a_set(self, changes):
        """
        The pool hands out each block to one owner, whatever is taken and given back.
        """
        pool, held = BlockPool(12), []
        for change in changes:
            if change >= 0:
                taken = pool.try_take(change)
                assert (taken is None) == (change > 12 - len(held))
                held += [] if taken is None else taken.tolist()
            else:
                given_back, held = held[:-change], held[-change:]
                pool.give_back(blocks(*given_back))
            assert len(held) == len(set(held)) == pool.num_used
            pool.check_integrity(blocks(*held))
