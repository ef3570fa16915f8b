"""Block tables by sequence, against a model of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_embedded import EngineConfig, EngineMemoryError, KVCacheManager

SMALL = EngineConfig(block_size=4, max_num_blocks=10, max_model_len=40)


@pytest.fixture
def manager():
    return KVCacheManager(SMALL)


class TestKVCacheManager:
    @pytest.mark.parametrize(
        ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (40, 10)]
    )
    def test_a_sequence_gets_the_blocks_of_its_tokens(self, manager, num_tokens, num_blocks):
        """
        A sequence gets as many blocks as hold its tokens, and no block twice.
        """
        manager.allocate_sequence(7, num_tokens)
        table = manager.get_block_table(7)
        assert num_blocks == len(set(table)) == len(table)
        stats = manager.get_memory_stats()
        assert (10, num_blocks, 10 - num_blocks, 1) == (
            stats.total_blocks,
            stats.used_blocks,
            stats.free_blocks,
            stats.num_sequences,
        )

    def test_a_sequence_that_does_not_fit_gets_nothing(self, manager):
        """
        A sequence gets all its blocks or none: a failure changes nothing, and says how many are
        free.
        """
        manager.allocate_sequence(1, 36)
        with pytest.raises(EngineMemoryError, match=r"2 KV blocks are needed and 1 of 10 are free"):
            manager.allocate_sequence(2, 5)
        assert manager.get_block_table(2) is None
        assert 9 == manager.get_memory_stats().used_blocks
        assert (True, False) == (manager.can_allocate(1), manager.can_allocate(2))

    def test_a_sequence_grows_block_by_block_until_none_is_free(self, manager):
        """
        Each further block goes behind the table's last, and the one too many is refused.
        """
        manager.allocate_sequence(1, 4)
        grown = [manager.allocate_block(1) for _ in range(9)]
        assert grown == manager.get_block_table(1)[1:]
        with pytest.raises(EngineMemoryError, match="1 KV blocks are needed and 0 of 10 are free"):
            manager.allocate_block(1)
        assert 10 == len(manager.get_block_table(1))

    def test_freeing_twice_is_harmless(self, manager):
        """
        A sequence's blocks come back once; freeing it again, or an unknown one, changes nothing.
        """
        manager.allocate_sequence(1, 9)
        manager.free_sequence(1)
        manager.free_sequence(1)
        manager.free_sequence(99)
        assert manager.get_block_table(1) is None
        assert 10 == manager.get_memory_stats().free_blocks

    def test_allocating_again_keeps_the_blocks(self, manager):
        """
        A sequence that is allocated again keeps its blocks.
        """
        manager.allocate_sequence(1, 9)
        table = manager.get_block_table(1)
        manager.allocate_sequence(1, 40)
        assert table == manager.get_block_table(1)

    def test_an_unknown_sequence_cannot_grow(self, manager):
        """
        The error says what to call first.
        """
        with pytest.raises(EngineMemoryError, match="call allocate_sequence first"):
            manager.allocate_block(3)

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(["new", "grow", "free"]), st.integers(0, 4), st.integers(0, 20)
            ),
            max_size=60,
        )
    )
    def test_any_history_agrees_with_a_model(self, history):
        """
        After any operations every sequence has the blocks it should, none is shared or lost, and
        what fails changes nothing.
        """
        manager, lengths = KVCacheManager(SMALL), {}
        for what, seq_id, num_tokens in history:
            free = 10 - sum(lengths.values())
            wanted = -(-num_tokens // 4)
            try:
                if what == "new":
                    manager.allocate_sequence(seq_id, num_tokens)
                    lengths.setdefault(seq_id, wanted)
                elif what == "grow":
                    manager.allocate_block(seq_id)
                    lengths[seq_id] += 1
                else:
                    manager.free_sequence(seq_id)
                    lengths.pop(seq_id, None)
            except EngineMemoryError:
                assert what != "free"
                assert (
                    seq_id not in lengths if what == "new" else (seq_id not in lengths or not free)
                )
                assert what != "new" or wanted > free
            manager.check_integrity()
            tables = {one: manager.get_block_table(one) for one in lengths}
            assert lengths == {one: len(table) for one, table in tables.items()}
            held = [block for table in tables.values() for block in table]
            assert len(held) == len(set(held)) == manager.get_memory_stats().used_blocks
