"""The executors of one cell, for decisions that concern more than one of them."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.geometry import Limits
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.cell import Cell
from scheduler_svc.core.state.replica import Replica
from tandem.errors import InvalidConfig


class Fleet:
    """
    Replicas of one cell, by number; number 0 is always there.

    Attributes:
        cell: The requests, which belong to no replica while they wait.
    """

    __slots__ = ("_replicas", "cell")

    def __init__(self, cell: Cell, limits: Limits) -> None:
        self.cell = cell
        self._replicas = {0: Replica(cell, limits)}

    def __getitem__(self, number: int) -> Replica:
        """Return the replica with this number."""
        return self._replicas[number]

    def __iter__(self) -> Iterator[Replica]:
        """Return an iterator over all replicas."""
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def largest(self) -> Replica:
        """Replica that takes the longest requests."""
        return max(self, key=lambda replica: replica.limits.longest)

    def add(self, number: int, limits: Limits) -> None:
        """
        Add an empty executor.

        Raises:
            InvalidConfig: The number is taken, or its blocks have another size than those of the
                others, so that prefixes would be other blocks there.
        """
        if number in self._replicas:
            raise InvalidConfig(f"there is an executor {number} already")
        block_size = self.largest.limits.block_size
        if limits.block_size != block_size:
            raise InvalidConfig(
                f"the executor has block_size {limits.block_size} and the others have "
                f"{block_size}: start it with the same"
            )
        self._replicas[number] = Replica(self.cell, limits, number)

    def remove(self, number: int) -> None:
        """Remove an executor, but not the first; what ran on it waits again with its outputs."""
        require(number > 0, "the first executor cannot be removed")
        replica = self._replicas.pop(number)
        replica.start_over(replica.limits)
        self.cell.part(number)

    def of(self, request: Request) -> Replica | None:
        """Return the replica in whose slot a request is; None where it has no slot."""
        if request.place.slot is None or request.place.replica is None:
            return None
        return self._replicas[request.place.replica]

    def under_pressure(self) -> bool:
        """Return True while KV use of every executor is so high that no prompt may be admitted."""
        return all(replica.under_pressure() for replica in self)

    def match_len(self, request: Request) -> int:
        """Return the most leading tokens of a request that have cached KV on one executor."""
        caches = [replica.kv.prefixes for replica in self]
        return max((cache.match_len(request) for cache in caches if cache is not None), default=0)
