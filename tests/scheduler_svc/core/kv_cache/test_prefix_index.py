"""The index of full blocks: chains, leaf-first eviction, and exact counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler_svc.core.kv_cache.block_pool import BlockPool
from scheduler_svc.core.kv_cache.prefix_index import NO_BLOCK, PrefixIndex
from tandem.errors import InternalError

WRITER = 7


def digests_of(names: str) -> list[bytes]:
    """Return one digest per prefix of a string: "ABC" -> A, AB, ABC."""
    return [names[: end + 1].encode() for end in range(len(names))]


class Cache:
    """A pool with an index and requests named by the letters of their blocks."""

    def __init__(self, num_blocks: int = 8, *, keeps_unheld: bool = True) -> None:
        self.index = PrefixIndex(num_blocks, keeps_unheld=keeps_unheld)
        self.pool = BlockPool(num_blocks, self.index)

    def admit(self, names: str, num_partial: int = 0):
        """
        Match, hold, take the rest and index it; returns the table, which ends with unindexed
        blocks, or None where there is no room.
        """
        digests = digests_of(names)
        matched = np.array(self.index.match(digests), np.int32)
        self.pool.share(matched)
        fresh = self.pool.try_take(len(names) - len(matched) + num_partial)
        if fresh is None:
            self.pool.give_back(matched)
            return None
        table = np.concatenate([matched, fresh])
        if len(matched) < len(names):
            parent = int(matched[-1]) if len(matched) else NO_BLOCK
            self.index.add_chain(
                table[len(matched) : len(names)], digests[len(matched) :], parent, WRITER
            )
        return table

    def use(self, names: str):
        """Admit and let go at once; returns the table."""
        table = self.admit(names)
        self.pool.give_back(table)
        return table

    def findable(self) -> set[str]:
        return {digest.decode() for digest in self.index._block_of}


class TestEviction:
    def test_leaves_go_first_and_oldest_first(self):
        """
        Evicting three blocks of A-B-{C, F} and A-D-E, with F used before C and C before E, takes F,
        C, B.
        """
        cache = Cache(6)
        for path in ("ABF", "ABC", "ADE"):
            cache.use(path)
        assert 6 == cache.pool.num_cached
        evicted = []
        for count in (1, 1, 1):
            before = cache.findable()
            cache.pool.try_take(count)
            evicted += before - cache.findable()
        assert ["ABF", "ABC", "AB"] == evicted

    def test_a_parent_never_goes_before_its_child(self):
        """
        A chain is evicted from its end, however it came to be used.
        """
        cache = Cache(4)
        cache.use("ABCD")
        cache.use("AB")
        for left in ({"A", "AB", "ABC"}, {"A", "AB"}, {"A"}, set()):
            cache.pool.try_take(1)
            assert left == cache.findable()

    def test_partial_blocks_are_free_at_once(self):
        """
        A block that is not full goes to the free list, whatever becomes of the full ones.
        """
        cache = Cache(4)
        cache.pool.give_back(cache.admit("AB", num_partial=1))
        assert (2, 2) == (cache.pool.num_free, cache.pool.num_cached)

    def test_what_is_held_is_not_evicted(self):
        """
        Matched blocks are no part of what can be taken, so taking more fails and changes nothing.
        """
        cache = Cache(4)
        cache.use("AB")
        cache.use("CD")
        table = cache.admit("AB")
        assert 2 == cache.pool.num_available
        assert cache.pool.try_take(3) is None
        assert {"A", "AB", "C", "CD"} == cache.findable()
        cache.pool.check_integrity(table)

    def test_a_pin_is_rolled_back_when_the_rest_cannot_be_had(self):
        """
        An admission that finds no block for its rest lets go of what it matched.
        """
        cache = Cache(4)
        cache.use("AB")
        held = cache.admit("CD")
        assert cache.admit("ABEFG") is None
        assert 2 == cache.pool.num_cached
        cache.pool.check_integrity(held)

    def test_unheld_among_matched_blocks_are_counted(self):
        """
        Matched blocks without a holder are counted, since they can no longer be evicted for an
        admission.
        """
        cache = Cache(6)
        cache.use("AB")
        held = cache.admit("A")
        matched = np.array(cache.index.match(digests_of("AB")), np.int32)
        assert 1 == cache.pool.num_unheld(matched)
        cache.pool.check_integrity(held)

    def test_ref_zero_keeps_nothing(self):
        """
        Blocks without a holder are free and gone from the index at once where they are not kept.
        """
        cache = Cache(4, keeps_unheld=False)
        first, second = cache.admit("AB"), cache.admit("A")
        cache.pool.give_back(first)
        assert {"A"} == cache.findable()
        cache.pool.give_back(second)
        assert (set(), 4) == (cache.findable(), cache.pool.num_free)
        cache.pool.check_integrity(np.empty(0, np.int32))


class TestLookup:
    @pytest.mark.parametrize("length", range(10))
    def test_the_longest_indexed_prefix_is_found(self, length):
        """
        Exactly the leading blocks that are indexed match, in order, however many there are.
        """
        cache = Cache(9)
        names = "ABCDEFGHI"
        table = cache.use(names[:length])
        digests = digests_of(names)
        assert length == cache.index.match_len(digests)
        assert table.tolist() == cache.index.match(digests)

    def test_the_version_changes_with_what_can_be_matched(self):
        """
        Adding, evicting and flushing change the version; holding and letting go do not.
        """
        cache = Cache(4)
        versions = [cache.index.version]
        table = cache.admit("AB")
        versions.append(cache.index.version)
        cache.pool.give_back(table)
        assert versions[-1] == cache.index.version
        cache.pool.try_take(3)
        versions.append(cache.index.version)
        cache.pool.flush()
        versions.append(cache.index.version)
        assert 4 == len(set(versions))

    def test_a_chain_must_continue_what_is_indexed(self):
        """
        Indexing twice, or behind a block that is not indexed, is an internal error.
        """
        cache = Cache(4)
        table = cache.admit("AB")
        with pytest.raises(InternalError, match="already"):
            cache.index.add_chain(table[:1], [b"other"], NO_BLOCK, WRITER)
        with pytest.raises(InternalError, match="not indexed"):
            cache.index.add_chain(cache.pool.try_take(1), [b"ABX"], 4, WRITER)


class TestForgetting:
    def test_flush_frees_what_nobody_holds(self):
        """
        A flush returns how many blocks it freed; held ones stay held and can be matched no more.
        """
        cache = Cache(6)
        cache.use("ABC")
        held = cache.admit("AB")
        assert 1 == cache.pool.flush()
        assert [] == cache.index.match(digests_of("AB"))
        cache.pool.check_integrity(held)
        cache.pool.give_back(held)
        assert 6 == cache.pool.num_free

    def test_distrust_takes_what_continues_with_it(self):
        """
        Forgetting a writer removes its blocks and every block behind one of them, no other.
        """
        cache = Cache(8)
        cache.use("AB")
        cache.index.writer[cache.index.block_of(b"AB")] = 8
        cache.use("ABC")
        cache.use("AD")
        held = cache.admit("ABC")
        cache.pool.distrust({8})
        assert {"A", "AD"} == cache.findable()
        cache.pool.check_integrity(held)


class PoolMachine(RuleBasedStateMachine):
    """
    Pool and index against a model that keeps, per prefix, its block, its holders and when it was
    last let go.
    """

    @initialize(num_blocks=st.integers(4, 12), keeps_unheld=st.booleans())
    def start(self, num_blocks, keeps_unheld):
        """
        Make a pool of some size in either mode.
        """
        self.cache = Cache(num_blocks, keeps_unheld=keeps_unheld)
        self.tables: list[tuple[str, np.ndarray]] = []
        self.indexed: dict[str, int] = {}
        """Block of each prefix."""
        self.let_go: dict[str, int] = {}
        """Time at which each prefix was last let go."""
        self.clock = 0

    @rule(names=st.text("ABC", min_size=1, max_size=5), num_partial=st.integers(0, 1))
    def admit(self, names, num_partial):
        """
        An admission matches the longest indexed prefix and succeeds exactly when there is room.
        """
        pool = self.cache.pool
        matched = 0
        while matched < len(names) and names[: matched + 1] in self.indexed:
            matched += 1
        needed = len(names) + num_partial - matched
        held = self._held()
        pinned = sum(names[: i + 1] not in held for i in range(matched))
        unheld = [prefix for prefix in self.indexed if prefix not in held]
        fits = needed <= pool.num_free + len(unheld) - pinned
        num_free = pool.num_free
        table = self.cache.admit(names, num_partial)
        assert fits == (table is not None)
        if table is None:
            for i in reversed(range(matched)):
                if names[: i + 1] not in held:
                    self._note_let_go(names[: i + 1])
            return
        assert [self.indexed[names[: i + 1]] for i in range(matched)] == table[:matched].tolist()
        mine = {names[: i + 1] for i in range(matched)}
        self._evict(needed - num_free, [prefix for prefix in unheld if prefix not in mine])
        for i in range(matched, len(names)):
            self.indexed[names[: i + 1]] = int(table[i])
        self.tables.append((names, table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        """
        Let a holder give back its whole table.
        """
        at = data.draw(st.integers(0, len(self.tables) - 1))
        names, table = self.tables.pop(at)
        self.cache.pool.give_back(table)
        held = self._held()
        for i in reversed(range(len(names))):
            prefix = names[: i + 1]
            if prefix in held or self.indexed.get(prefix) != table[i]:
                continue
            if self.cache.index.keeps_unheld:
                self._note_let_go(prefix)
            else:
                del self.indexed[prefix]

    @rule()
    def flush(self):
        """
        Forget everything now and then.
        """
        freed = len(self.indexed.keys() - self._held())
        assert freed == self.cache.pool.flush()
        self.indexed.clear()
        self.tables = [("", table) for _, table in self.tables]

    @invariant()
    def agrees(self):
        """
        Check that index, counts and integrity agree with the model.
        """
        if not hasattr(self, "cache"):
            return
        pool = self.cache.pool
        assert {name.encode(): block for name, block in self.indexed.items()} == (
            self.cache.index._block_of
        )
        held = {int(block) for _, table in self.tables for block in table}
        assert len(held) == pool.num_used
        assert len(set(self.indexed.values()) - held) == pool.num_cached
        owned = [table for _, table in self.tables]
        pool.check_integrity(np.concatenate([*owned, np.empty(0, np.int32)]))

    def _held(self) -> set[str]:
        blocks = {int(block) for _, table in self.tables for block in table}
        return {prefix for prefix, block in self.indexed.items() if block in blocks}

    def _note_let_go(self, prefix: str) -> None:
        self.clock += 1
        self.let_go[prefix] = self.clock

    def _evict(self, count: int, unheld: list[str]) -> None:
        for _ in range(count):
            leaves = [
                prefix
                for prefix in unheld
                if not any(other != prefix and other.startswith(prefix) for other in self.indexed)
            ]
            oldest = min(leaves, key=self.let_go.__getitem__)
            unheld.remove(oldest)
            del self.indexed[oldest]


class TestAgainstAModel:
    def test_any_use_agrees_with_a_naive_cache(self):
        """
        Matches, counts and evictions are those of a model that searches for the oldest leaf,
        whatever is admitted, let go and flushed.
        """
        run_state_machine_as_test(
            PoolMachine,
            settings=settings(
                max_examples=80,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
