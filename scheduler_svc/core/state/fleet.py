"""The executors of one cell, for decisions that concern more than one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.geometry import Limits
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.cell import Cell
from scheduler_svc.core.state.replica import Replica
from tandem.errors import InternalError, InvalidConfig


class Fleet:
    """
    Replicas of one cell, by number; there is at least one, and no number is used twice.

    Attributes:
        cell: The requests, which belong to no replica while they wait.
    """

    __slots__ = ("_next_number", "_replicas", "cell")

    def __init__(self, cell: Cell, limits: Limits) -> None:
        self.cell = cell
        self._replicas = {0: Replica(cell, limits)}
        self._next_number = 1
        self._note_size()

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

    def __len__(self) -> int:
        """Return the number of replicas."""
        return len(self._replicas)

    @property
    def present(self) -> list[Replica]:
        """Replicas that have their executor; all of them while none has."""
        return [replica for replica in self if not replica.gate.is_away] or list(self)

    @property
    def largest(self) -> Replica:
        """Replica that takes the longest requests, of those that have their executor."""
        if len(self._replicas) == 1:  # asked several times for each request
            return next(iter(self._replicas.values()))
        return max(self.present, key=_longest)

    @property
    def largest_expected(self) -> Replica:
        """Replica that takes the longest requests, now or once its executor is back."""
        return max(self, key=_longest)

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
        if len(self) == 1:
            self._note_running()
        self._replicas[number] = Replica(self.cell, limits, number)
        self._note_size()
        return number

    def replace(self, number: int, limits: Limits) -> None:
        """
        Let another, empty executor take a number over; what ran there waits again.

        Raises:
            InvalidConfig: Its blocks have another size than those of the other executors.
        """
        replica = self[number]
        self._check_block_size(limits, [one for one in self if one is not replica])
        replica.gate.note_away()
        replica.start_over(limits)
        self.reroute(number)
        replica.gate.note_back()
        self._note_size()

    def remove(self, number: int) -> None:
        """
        Remove an executor, but not the last; what ran on it waits again with its outputs.

        Raises:
            InternalError: It is the only one, or it was removed before.
        """
        replica = self[number]
        require(len(self) > 1, "the last executor cannot be removed")
        replica.start_over(replica.limits)
        del self._replicas[number]
        self.cell.part(number)
        self.reroute(number)
        if len(self) == 1:
            self.cell.router.leave_none()
        self._note_size()

    def route(self, choices: Sequence[Request]) -> None:
        """Let choices of one request that wait prefer an executor, where there are several."""
        router, first, suspects = self.cell.router, choices[0], self.cell.suspects
        if not (router.has_preferences and self.cell.has_others):
            return
        places = {
            replica.slots.replica: replica.limits.max_running
            for replica in self
            if replica.gate.takes_new
            and replica.can_ever_take(first)
            and not suspects.bars(replica.slots.replica, first)
        }
        if places:
            self[min(places)].kv.prefix_cache.digests_of(first)
            router.route(choices, first.prefix.digests, places)

    def reroute(self, number: int) -> None:
        """Forget what an executor that is lost or has left was preferred for, and route it anew."""
        dropped = self.cell.router.drop(number)
        families: dict[int, list[Request]] = {}
        for request in sorted(self.cell.queue, key=lambda one: one.number):
            if request.number in dropped:
                families.setdefault(id(request.siblings), []).append(request)
        for choices in families.values():
            self.route(choices)

    def of(self, request: Request) -> Replica | None:
        """Return the replica in whose slot a request is; None where it has no slot."""
        if request.place.slot is None or request.place.replica is None:
            return None
        return self[request.place.replica]

    def under_pressure(self) -> bool:
        """Return True while KV use of every executor is so high that no prompt may be admitted."""
        return all(replica.under_pressure() for replica in self.present)

    def match_len(self, request: Request) -> int:
        """Return the most leading tokens of a request that have cached KV on one executor."""
        caches = [replica.kv.prefixes for replica in self.present]
        return max((cache.match_len(request) for cache in caches if cache is not None), default=0)

    def check_integrity(self) -> None:
        """
        Compare the replicas with one another, and with what the cell knows of them.

        Raises:
            InternalError: The first invariant that does not hold.
        """
        require(bool(self._replicas), "no executor is left")
        for number, replica in self._replicas.items():
            require(number < self._next_number, "a number may be used twice")
            require(replica.slots.replica == number, "an executor has another one's number")
        self.cell.check_holders(self._replicas)
        live = {request.number for request in self.cell.requests}
        waiting = {request.number for request in self.cell.queue}
        there = {number for number, replica in self._replicas.items() if not replica.gate.is_away}
        self.cell.router.check_integrity(live, waiting, there)

    def _note_running(self) -> None:
        """Note where requests are, as there was no other executor to be told from."""
        for request in self.cell.requests:
            for replica in self:
                if request.place.replica == replica.slots.replica and not replica.gate.is_away:
                    self.cell.router.note_running(request, replica.slots.replica)

    def _note_size(self) -> None:
        self.cell.router.resize(sum(replica.limits.num_blocks for replica in self))

    @staticmethod
    def _check_block_size(limits: Limits, others: list[Replica]) -> None:
        for other in others[:1]:
            size = other.limits.block_size
            if limits.block_size != size:
                raise InvalidConfig(
                    f"the executor has block_size {limits.block_size} and the others have {size}: "
                    "start it with the same"
                )


def _longest(replica: Replica) -> int:
    return replica.limits.longest
