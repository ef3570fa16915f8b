"""The executors of one cell, for decisions that concern more than one of them."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.geometry import Limits
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.cell import Cell
from scheduler_svc.core.state.replica import Replica
from tandem.errors import InternalError, InvalidConfig


class Fleet:
    """
    Replicas of one cell, by number; number 0 is always there, and no number is used twice.

    Attributes:
        cell: The requests, which belong to no replica while they wait.
    """

    __slots__ = ("_next_number", "_replicas", "cell")

    def __init__(self, cell: Cell, limits: Limits) -> None:
        self.cell = cell
        self._replicas = {0: Replica(cell, limits)}
        self._next_number = 1

    def __getitem__(self, number: int) -> Replica:
        """
        Return the replica with this number.

        Raises:
            InternalError: It was removed.
        """
        replica = self._replicas.get(number)
        if replica is None:
            raise InternalError(f"executor {number} is asked for and was removed")
        return replica

    def __iter__(self) -> Iterator[Replica]:
        """Return an iterator over all replicas."""
        return iter(self._replicas.values())

    @property
    def largest(self) -> Replica:
        """Replica that takes the longest requests."""
        return max(self, key=lambda replica: replica.limits.longest)

    def add(self, limits: Limits) -> int:
        """
        Add an empty executor; returns its number.

        Raises:
            InvalidConfig: Its blocks have another size than those of the others, so that prefixes
                would be other blocks there.
        """
        self._check_block_size(limits, list(self))
        number = self._next_number
        self._next_number += 1
        self._replicas[number] = Replica(self.cell, limits, number)
        return number

    def replace(self, number: int, limits: Limits) -> None:
        """
        Let another, empty executor take a number over; what ran there waits again.

        Raises:
            InvalidConfig: Its blocks have another size than those of the other executors.
        """
        replica = self[number]
        self._check_block_size(limits, [one for one in self if one is not replica])
        replica.start_over(limits)

    def remove(self, number: int) -> None:
        """Remove an executor, but not the first; what ran on it waits again with its outputs."""
        require(number > 0, "the first executor cannot be removed")
        replica = self[number]
        replica.start_over(replica.limits)
        del self._replicas[number]
        self.cell.part(number)

    def of(self, request: Request) -> Replica | None:
        """Return the replica in whose slot a request is; None where it has no slot."""
        if request.place.slot is None or request.place.replica is None:
            return None
        return self[request.place.replica]

    def under_pressure(self) -> bool:
        """Return True while KV use of every executor is so high that no prompt may be admitted."""
        return all(replica.under_pressure() for replica in self)

    def match_len(self, request: Request) -> int:
        """Return the most leading tokens of a request that have cached KV on one executor."""
        caches = [replica.kv.prefixes for replica in self]
        return max((cache.match_len(request) for cache in caches if cache is not None), default=0)

    def check_integrity(self) -> None:
        """
        Compare the replicas with one another, and with what the cell knows of them.

        Raises:
            InternalError: The first invariant that does not hold.
        """
        require(0 in self._replicas, "the first executor is gone")
        for number, replica in self._replicas.items():
            require(number < self._next_number, "a number may be used twice")
            require(replica.slots.replica == number, "an executor has another one's number")
        self.cell.check_holders(self._replicas)

    @staticmethod
    def _check_block_size(limits: Limits, others: list[Replica]) -> None:
        for other in others[:1]:
            size = other.limits.block_size
            if limits.block_size != size:
                raise InvalidConfig(
                    f"the executor has block_size {limits.block_size} and the others have {size}: "
                    "start it with the same"
                )
