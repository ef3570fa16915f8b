"""Record of the executors that prompts were assigned to, by the digests of their blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from scheduler_svc.core.invariants import require


@dataclass(frozen=True, slots=True)
class Match:
    """
    Blocks of a prompt that an executor was assigned.

    Attributes:
        depth: Leading blocks of the prompt, at least 1.
        recency: Number of the latest assignment of the last of them.
    """

    depth: int
    recency: int


class PrefixTable:
    """
    Executors by the digests of the blocks that they were assigned, with the number of the latest
    assignment each.

    The table is optimistic: it learns neither that an executor evicted a block nor whether it ever
    computed it. Only an executor that is gone is forgotten (`purge`).

    Source: the table of Megatron Core's coordinator. It keeps what a dead rank was assigned, so
    that requests still go there, and grows for ever; here the blocks assigned longest ago are
    forgotten beyond `capacity`, the last ones of a prompt first.

    Attributes:
        capacity: Most blocks that are kept.
    """

    __slots__ = ("_executors", "_num_assigned", "capacity")

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self._executors: OrderedDict[bytes, dict[int, int]] = OrderedDict()
        self._num_assigned = 0

    def __len__(self) -> int:
        """Return the number of blocks that are kept."""
        return len(self._executors)

    def assign(self, digests: Sequence[bytes], executor: int) -> None:
        """Note that a prompt with these blocks is assigned to an executor."""
        self._num_assigned += 1
        for digest in reversed(digests):
            holders = self._executors.get(digest)
            if holders is None:
                self._executors[digest] = {executor: self._num_assigned}
            else:
                holders[executor] = self._num_assigned
                self._executors.move_to_end(digest)
        self._shrink()

    def matches(self, digests: Sequence[bytes], among: Collection[int]) -> dict[int, Match]:
        """Return what each of some executors was assigned of a prompt; others are left out."""
        found: dict[int, Match] = {}
        for depth in range(len(digests), 0, -1):
            for executor, recency in self._executors.get(digests[depth - 1], {}).items():
                if executor in among and executor not in found:
                    found[executor] = Match(depth, recency)
            if len(found) == len(among):
                break
        return found

    def purge(self, executor: int) -> None:
        """Forget all that an executor was assigned."""
        for digest in [one for one, holders in self._executors.items() if executor in holders]:
            holders = self._executors[digest]
            del holders[executor]
            if not holders:
                del self._executors[digest]

    def resize(self, capacity: int) -> None:
        """Keep so many blocks from now on."""
        self.capacity = capacity
        self._shrink()

    def check_integrity(self, executors: Collection[int]) -> None:
        """
        Compare with the executors that may be preferred.

        Raises:
            InternalError: The table has another executor, a block without one, or too many blocks.
        """
        require(len(self) <= self.capacity, "the routing table has too many blocks")
        require(all(self._executors.values()), "the routing table has a block of no executor")
        known = {executor for holders in self._executors.values() for executor in holders}
        require(known <= set(executors), "the routing table has an executor that is gone")

    def _shrink(self) -> None:
        while len(self._executors) > self.capacity:
            self._executors.popitem(last=False)
