"""Free blocks: the blocks of a sequence are adjacent where they can be."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.kv_cache import free_blocks
from scheduler_svc.core.kv_cache.free_blocks import EXTENT_SIZES, MAX_PENDING, FreeBlocks
from tandem.errors import InternalError
from tests.scheduler_svc.core.harness import Rig, small_config


def blocks(*ids: int):
    return np.array(ids, np.intp)


def num_runs(table) -> int:
    """Return the number of runs of adjacent blocks in a table."""
    return 1 + int(np.count_nonzero(np.diff(table) != 1))


class TestTaking:
    def test_a_new_sequence_gets_adjacent_blocks(self):
        """
        Blocks taken together are adjacent while there are as many free ones in a row.
        """
        free = FreeBlocks(1000)
        for count in (1, 7, 8, 9, 64, 65, 128):
            assert 1 == num_runs(free.take(count))

    def test_new_sequences_begin_far_apart(self):
        """
        Each of the first sequences has a whole extent of room behind its first block.
        """
        free = FreeBlocks(16 * EXTENT_SIZES[0])
        firsts = np.sort(np.concatenate([free.take(1) for _ in range(16)]))
        assert EXTENT_SIZES[0] <= np.diff(firsts).min()

    def test_a_sequence_goes_on_behind_what_it_shares(self):
        """
        The first blocks taken are those behind a given one, as far as these are free.
        """
        free = FreeBlocks(1000)
        first = free.take(20)
        free.add(first[12:])
        assert first[12:].tolist() == free.take(8, after=int(first[11])).tolist()
        free.add(first[12:15])
        taken = free.take(5, after=int(first[11])).tolist()
        assert first[12:15].tolist() == taken[:3]
        assert not set(taken) & set(first[15:].tolist())

    def test_the_last_blocks_come_in_order(self):
        """
        A caller that takes all that is left gets it in order of ids, so that adjacent blocks stay
        so.
        """
        free = FreeBlocks(100)
        free.take(100)
        free.add(blocks(40, 7, 39, 90, 8, 41))
        assert [7, 8, 39, 40, 41, 90] == free.take(6).tolist()

    def test_an_extent_that_is_free_again_is_taken_again(self):
        """
        Blocks given back one by one and in any order make up an extent when the last has come.
        """
        size = EXTENT_SIZES[0]
        free = FreeBlocks(3 * size)
        everything = free.take(3 * size)
        back = everything[size : 2 * size]
        for block in random.Random(0).sample(back.tolist(), size):
            free.add(blocks(block))
        free.add(everything[:1])
        assert back.tolist() == free.take(size).tolist()


class TestGrowing:
    def test_a_sequence_grows_into_the_block_behind_its_last(self):
        """
        Sequences that grow in turns stay in one run each while others do not stand in the way.
        """
        free = FreeBlocks(1024)
        tables = [free.take(3) for _ in range(16)]
        for _ in range(EXTENT_SIZES[0] - 3):
            grown = free.take_next(np.array([table[-1] for table in tables]) + 1)
            tables = [np.append(table, block) for table, block in zip(tables, grown, strict=True)]
        assert [1] * 16 == [num_runs(table) for table in tables]

    def test_who_cannot_go_on_gets_an_extent_of_its_own(self):
        """
        A sequence goes on at the beginning of free room where the block behind its last is taken.
        """
        free = FreeBlocks(1024)
        table = free.take(10)
        (block,) = free.take_next(table[4:5] + 1)
        assert block % EXTENT_SIZES[-1] == 1
        assert [block + 1] == free.take_next(blocks(block) + 1).tolist()

    def test_the_last_block_of_all_has_none_behind_it(self):
        """
        A sequence that ends with the highest block goes on elsewhere.
        """
        free = FreeBlocks(10)
        table = free.take(10)
        free.add(table[:1])
        assert [1] == free.take_next(blocks(11)).tolist()


class _Shuffled:
    """Free blocks of a pool in which ids mean nothing: any of them is taken, at random."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(1, num_blocks + 1))
        self._chance = random.Random(5)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int):
        self._chance.shuffle(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        return blocks(*taken)

    def take_next(self, last):
        return self.take(len(last))

    def add(self, given_back):
        self._free += given_back.tolist()


def mean_runs(free, seed: int, *, most_live: int = 24, num_turns: int = 1500) -> float:
    """
    Return the runs per sequence at the end of a random history in which sequences begin with 1 to
    32 blocks, grow by up to as many, each in its own turn of 16, and end.
    """
    chance = random.Random(seed)
    live: list[tuple[list[int], int, int]] = []
    for turn in range(num_turns):
        begins = chance.randint(1, 32)
        if len(live) < most_live and free.num_free >= begins + most_live:
            stops = begins + chance.randint(0, 32)
            live.append((free.take(begins).tolist(), stops, chance.randrange(16)))
        due = [table for table, stops, phase in live if turn % 16 == phase and len(table) < stops]
        due = due[: free.num_free]
        grown = free.take_next(blocks(*[table[-1] + 1 for table in due])) if due else []
        for table, block in zip(due, grown, strict=True):
            table.append(int(block))
        for ended in [entry for entry in live if len(entry[0]) == entry[1]]:
            free.add(blocks(*ended[0]))
            live.remove(ended)
    return float(np.mean([num_runs(table) for table, _, _ in live]))


class TestHistories:
    def test_sequences_consist_of_few_runs(self):
        """
        Sequences have on average at most two runs after random histories that use two thirds of a
        pool, and more than ten times as many with blocks taken at random.
        """
        runs = [mean_runs(FreeBlocks(1024), seed) for seed in range(3)]
        by_chance = mean_runs(_Shuffled(1024), 0, num_turns=300)
        assert max(runs) <= 2.0
        assert max(runs) <= by_chance / 10

    def test_small_extents_save_runs_in_a_full_pool(self, monkeypatch):
        """
        Sequences that fill a pool have more runs where the smallest extents are left out.
        """
        with_all = mean_runs(FreeBlocks(1024), 0, most_live=36)
        monkeypatch.setattr(free_blocks, "EXTENT_SIZES", free_blocks.EXTENT_SIZES[:-1])
        assert mean_runs(FreeBlocks(1024), 0, most_live=36) > 1.3 * with_all

    def test_histories_repeat(self):
        """
        The same history gives the same blocks, with integrity checks in between or without.
        """
        first, second = ([], [])
        for taken in (first, second):
            free, chance, held = FreeBlocks(300), random.Random(3), []
            for _ in range(200):
                if free.num_free > 20 and chance.random() < 0.6:
                    held.append(free.take(chance.randint(1, 20)))
                    taken.append(held[-1].tolist())
                elif held:
                    free.add(held.pop(chance.randrange(len(held))))
                if taken is second:
                    free.check_integrity(np.flatnonzero(free.is_free))
        assert first == second

    @settings(max_examples=60, deadline=None)
    @given(
        num_blocks=st.integers(1, 150),
        changes=st.lists(
            st.tuples(st.sampled_from(["take", "next", "add"]), st.integers(1, 70)), max_size=60
        ),
    )
    def test_any_history_agrees_with_a_set(self, num_blocks, changes):
        """
        No block is handed out twice or lost, and all are found, whatever is taken and given back.
        """
        free, held = FreeBlocks(num_blocks), []
        for change, count in changes:
            if change == "add":
                free.add(blocks(*held[:count]))
                held = held[count:]
            elif change == "take":
                taken = free.take(min(count, free.num_free), after=held[-1] if held else 0)
                held += taken.tolist()
            else:
                held += free.take_next(blocks(*held[: min(count, free.num_free)]) + 1).tolist()
            assert len(set(held)) == len(held) == num_blocks - free.num_free
            expected = np.setdiff1d(np.arange(1, num_blocks + 1), held)
            free.check_integrity(expected)

    def test_what_is_not_free_is_passed_over_however_long_it_is_listed(self):
        """
        Blocks that were listed as free and taken since are not handed out, and nothing piles up.
        """
        free = FreeBlocks(200)
        table = free.take(100)
        for _ in range(3 * MAX_PENDING):
            free.add(table[50:])
            assert table[50:].tolist() == free.take(50, after=int(table[49])).tolist()
        free.check_integrity(np.setdiff1d(np.arange(1, 201), table))


class TestIntegrity:
    def test_blocks_that_are_not_expected_are_found(self):
        """
        A free block that ought to be held and a held one that ought to be free are both noticed.
        """
        free = FreeBlocks(20)
        free.take(5)
        for expected in (range(5, 21), range(7, 21)):
            with pytest.raises(InternalError):
                free.check_integrity(np.array(expected))

    def test_a_free_block_that_cannot_be_found_is_noticed(self):
        """
        A block or an extent that is free and on no list is an error.
        """
        for sabotage in (lambda free: free._is_listed.fill(False), lose_an_extent):
            free = FreeBlocks(20)
            sabotage(free)
            with pytest.raises(InternalError):
                free.check_integrity(np.arange(1, 21))


def lose_an_extent(free):
    """Take an extent off its list while it stays free."""
    free._extents[1].pop(free.is_free)


class TestSequences:
    def test_sequences_that_decode_together_stay_in_one_run_each(self):
        """
        Prompts of any length that are admitted together and decode side by side are one run each to
        the end, whether a step's rows are new or those of the step before.
        """
        rig = Rig(small_config(max_num_blocks=1024, max_model_len=256))
        for prompt_len in (3, 4, 9, 21):
            rig.submit(prompt_len=prompt_len, max_tokens=200)
        slots = rig.core._replica.slots
        for _ in range(190):
            rig.step()
            for slot in np.flatnonzero(slots.live):
                assert 1 == num_runs(slots.blocks.table[slot, : slots.blocks.num_blocks[slot]])
        assert slots.blocks.num_blocks.min() >= 40
        rig.run()
