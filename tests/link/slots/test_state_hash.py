"""The state hash: it depends on everything it covers, and not on the order of changes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.link.slots.state_hash import (
    BlockKeys,
    StateHash,
    block_terms,
    generation_term,
    length_key,
    slot_term,
)

NUMBER = st.integers(0, 2**31 - 1)
TERMS = st.lists(st.integers(0, 2**64 - 1), max_size=8)


def hash_of(terms: list[int]) -> int:
    total = StateHash()
    for term in terms:
        total.add(term)
    return total.value


def table_terms(slot: int, blocks: list[int]) -> int:
    return int(block_terms(slot, np.arange(len(blocks)), np.array(blocks)).sum())


class TestStateHash:
    @settings(max_examples=50, deadline=None)
    @given(TERMS, st.randoms(use_true_random=False))
    def test_order_of_changes_is_irrelevant(self, terms, shuffler):
        """
        The same terms in another order have the same hash.
        """
        shuffled = list(terms)
        shuffler.shuffle(shuffled)
        assert hash_of(terms) == hash_of(shuffled)

    @settings(max_examples=50, deadline=None)
    @given(TERMS, TERMS)
    def test_removing_undoes_adding(self, kept, gone):
        """
        Removing terms gives the hash of what is left.
        """
        total = StateHash()
        for term in [*kept, *gone]:
            total.add(term)
        for term in gone:
            total.remove(term)
        assert hash_of(kept) == total.value

    def test_empty_state_is_zero(self):
        """
        A state without live slots hashes to 0, so a reset needs no agreement.
        """
        assert 0 == StateHash().value

    def test_terms_of_small_numbers_all_differ(self):
        """
        Terms of small slots, generations, lengths, indexes and blocks all differ.
        """
        pairs = [(slot, number) for slot in range(40) for number in range(40)]
        triple = [grid.ravel() for grid in np.meshgrid(range(20), range(20), range(40))]
        terms = [
            *(generation_term(slot, number) for slot, number in pairs),
            *(length_key(slot, number) for slot, number in pairs),
            *block_terms(*triple).tolist(),
        ]
        assert len(terms) == len(set(terms))

    @settings(max_examples=50, deadline=None)
    @given(NUMBER, NUMBER, NUMBER, NUMBER)
    def test_lengths_count_linearly_and_no_two_alike(self, slot, generation, length, more):
        """
        Each token planned adds the slot's length key, which is odd: two lengths never hash alike.
        """
        key = length_key(slot, generation)
        shorter, longer = (slot_term(slot, generation, n) for n in (length, length + more))
        assert longer - shorter == key * more
        assert 1 == key % 2

    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.integers(1, 30), min_size=2, max_size=6, unique=True),
        st.lists(st.integers(1, 30), min_size=1, max_size=6, unique=True),
        st.data(),
    )
    def test_tables_that_differ_hash_differently(self, one, other, data):
        """
        The hash changes when two blocks change places, within a table or between tables, or when
        one block replaces another, shared blocks included.
        """
        before = table_terms(3, one) + table_terms(4, other)
        place = data.draw(st.integers(1, len(one) - 1))
        swapped = [one[place], *one[1:place], one[0], *one[place + 1 :]]
        assert table_terms(3, swapped) + table_terms(4, other) != before
        if one != other:
            assert (table_terms(3, other) + table_terms(4, one) - before) % 2**64
        assert (table_terms(3, [31, *one[1:]]) + table_terms(4, other) - before) % 2**64


class TestBlockKeys:
    @settings(max_examples=50, deadline=None)
    @given(st.integers(0, 7), st.lists(st.integers(1, 50), max_size=12))
    def test_a_table_sums_like_its_entries(self, slot, blocks):
        """
        Keys of a geometry give the sums that the definition gives, for tables and for entries.
        """
        keys = BlockKeys(num_slots=8, max_blocks_per_slot=12, num_blocks=50)
        column = np.array(blocks, np.int32)
        expected = table_terms(slot, blocks) % 2**64
        index = np.arange(len(blocks), dtype=np.int32)
        entries = keys.sum_of_entries(np.full(len(blocks), slot), index, column)

        assert expected == keys.sum_of_table(slot, column) % 2**64
        assert expected == entries % 2**64

    def test_entries_of_several_slots_add_up(self):
        """
        Appends to several slots at once sum like one append to each.
        """
        keys = BlockKeys(num_slots=8, max_blocks_per_slot=3, num_blocks=9)
        slot, index, block = (np.array(c, np.int32) for c in ([0, 3, 7], [1, 0, 2], [5, 9, 2]))

        together = keys.sum_of_entries(slot, index, block)

        assert int(block_terms(slot, index, block).sum()) == together % 2**64


class TestDefinition:
    def test_known_state_has_a_known_hash(self):
        """
        The hash is part of the protocol: its value for a given state never changes.
        """
        total = StateHash()
        total.add(slot_term(3, 2, 17))
        total.add(table_terms(3, [12, 4]))
        assert KNOWN == total.value


def _mix(word: int) -> int:
    word %= 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


SLOT, INDEX, BLOCK = 0x8CB92BA72F3D8DD7, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB
KNOWN = (
    _mix(_mix(3 + 0x9E3779B97F4A7C15) + 2)
    + (_mix(_mix(3 + 0xD1B54A32D192ED03) + 2) | 1) * 17
    + (_mix(3 + SLOT) | 1) * (_mix(0 + INDEX) | 1) * (_mix(12 + BLOCK) | 1)
    + (_mix(3 + SLOT) | 1) * (_mix(1 + INDEX) | 1) * (_mix(4 + BLOCK) | 1)
) % 2**64
"""Hash of the known state, computed in plain integers."""
