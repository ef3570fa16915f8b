"""The state hash: sensitive to everything it covers, blind to the order of changes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.link.state_hash import StateHash, block_terms, generation_terms, length_terms

NUMBER = st.integers(0, 2**31 - 1)
TERMS = st.lists(
    st.one_of(
        st.tuples(st.just(generation_terms), NUMBER, NUMBER),
        st.tuples(st.just(length_terms), NUMBER, NUMBER),
        st.tuples(st.just(block_terms), NUMBER, NUMBER, NUMBER),
    ),
    max_size=8,
)


def hash_of(entries: list[tuple]) -> int:
    total = StateHash()
    for kind, *values in entries:
        total.add(kind(*values))
    return total.value


class TestStateHash:
    @settings(max_examples=50, deadline=None)
    @given(TERMS, st.randoms(use_true_random=False))
    def test_order_of_changes_is_irrelevant(self, entries, shuffler):
        """
        The same terms in another order have the same hash.
        """
        shuffled = list(entries)
        shuffler.shuffle(shuffled)
        assert hash_of(entries) == hash_of(shuffled)

    @settings(max_examples=50, deadline=None)
    @given(TERMS, TERMS)
    def test_removing_undoes_adding(self, kept, gone):
        """
        Removing terms gives the hash of what is left.
        """
        total = StateHash()
        for kind, *values in [*kept, *gone]:
            total.add(kind(*values))
        for kind, *values in gone:
            total.remove(kind(*values))
        assert hash_of(kept) == total.value

    def test_empty_state_is_zero(self):
        """
        No live slot hashes to 0, so a reset needs no agreement.
        """
        assert 0 == StateHash().value

    def test_terms_of_small_numbers_all_differ(self):
        """
        Over small slots, generations, lengths, indexes and blocks no two terms are equal.
        """
        small = np.arange(40)
        slot, number = (grid.ravel() for grid in np.meshgrid(small, small))
        triple = [grid.ravel() for grid in np.meshgrid(small[:20], small[:20], small)]
        terms = np.concatenate(
            [generation_terms(slot, number), length_terms(slot, number), block_terms(*triple)]
        )
        assert len(terms) == len(np.unique(terms))

    def test_columns_hash_like_their_entries(self):
        """
        Terms of columns are the terms of their entries one by one, whatever their integer type.
        """
        slot = np.array([0, 3, 7], np.int32)
        index, block = np.array([1, 0, 2], np.int64), np.array([5, 9, 2], np.uint32)
        together = StateHash()
        together.add(block_terms(slot, index, block))
        singly = [
            (block_terms, int(s), int(i), int(b))
            for s, i, b in zip(slot, index, block, strict=True)
        ]
        assert hash_of(singly) == together.value

    def test_known_state_has_a_known_hash(self):
        """
        The hash is part of the protocol: its value for a given state never changes.
        """
        total = StateHash()
        total.add(generation_terms(3, 2))
        total.add(length_terms(3, 17))
        total.add(block_terms(3, [0, 1], [12, 4]))
        assert KNOWN == total.value


def _mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


KNOWN = (
    _mix((_mix(3 + 0x9E3779B97F4A7C15) + 2) % 2**64)
    + _mix((_mix(3 + 0xD1B54A32D192ED03) + 17) % 2**64)
    + _mix((_mix(3 + 0x8CB92BA72F3D8DD7) + 12) % 2**64)
    + _mix((_mix(3 + 0x8CB92BA72F3D8DD7) + (1 << 32) + 4) % 2**64)
) % 2**64
"""The same definition in plain integers."""
