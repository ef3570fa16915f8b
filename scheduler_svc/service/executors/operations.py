"""Joining, draining and leaving of executors, as operators and names ask for it."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from scheduler_svc.service.executors.fate import ExecutorFate
from scheduler_svc.service.executors.member import Member
from scheduler_svc.service.executors.members import Members
from tandem.errors import InvalidConfig, InvalidParameter
from tandem.network.address import check_target

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class ExecutorOperations:
    """Joining and leaving of executors while the service runs. Owned by the core loop."""

    def __init__(self, members: Members, fate: ExecutorFate) -> None:
        self._members = members
        self._fate = fate
        self._found: frozenset[str] = frozenset()
        """Addresses that the names of executors meant when they were last looked up."""
        self._joined: set[str] = set()
        """Those of them that joined for that reason."""

    def find(self, address: str) -> Member:
        """
        Return the member that was named with an address.

        Raises:
            InvalidParameter: There is none.
        """
        member = self._members.find(address)
        if member is None:
            known = ", ".join(one.address for one in self._members) or "none"
            raise InvalidParameter(
                f"no executor is named {address!r}; these are: {known}", field="address"
            )
        return member

    def add(self, address: str, now: float) -> None:
        """
        Let an executor serve from now on, or again after it was drained.

        Raises:
            InvalidParameter: It serves already, or nothing can be connected to by this address.
        """
        known = self._members.find(address)
        if known is not None and not known.is_drained:
            raise InvalidParameter(f"{address} is named already", field="address")
        try:
            check_target(address)
            if known is not None:
                self._members.remove(known, now)
            self._members.add(address, now)
        except (ValueError, InvalidConfig) as error:
            raise InvalidParameter(f"{address!r}: {error}", field="address") from error
        _log.info("executor_added", address=address)

    def begin_drain(self, address: str, grace_s: float, now: float) -> Member:
        """
        Admit no request at an executor any more; give it back once those that run there have ended
        or `grace_s` has passed: what is left then moves to the others.

        Raises:
            InvalidParameter: No executor is named so.
        """
        member = self.find(address)
        if not member.is_drained:
            if member.port is not None:
                member.port.close()
            member.drain_until_s = now + grace_s
            _log.info("executor_draining", address=address, grace_s=grace_s)
        return member

    def remove(self, address: str, now: float) -> None:
        """
        Forget an executor; its requests move to the others at once.

        Raises:
            InvalidParameter: No executor is named so.
        """
        self._remove(self.find(address), now)

    def follow(self, found: Iterable[str], now: float) -> None:
        """
        Let executors join that the names mean now and did not before. Those that they mean no
        longer serve on until they are lost, as a name may forget an executor before it stops.
        """
        before, self._found = self._found, frozenset(found)
        for address in sorted(self._found - before):
            member = self._members.find(address)
            if member is None:
                _log.info("executor_found", address=address)
                self._members.add(address, now)
                self._joined.add(address)
            else:
                member.is_wanted = True
        for address in (before - self._found) & self._joined:
            if (member := self._members.find(address)) is not None:
                member.is_wanted = False

    def advance(self, now: float) -> None:
        """Give executors back whose drain is over, and forget those that are lost and unwanted."""
        for member in self._members:
            until_s, port = member.drain_until_s, member.port
            if until_s is not None and not member.is_drained:
                num_left = 0 if port is None else port.num_running
                if not num_left or now >= until_s or not member.is_serving:
                    self._finish_drain(member, num_left, now)
            elif not (member.is_wanted or member.is_serving or member.session.is_attached):
                self._remove(member, now)

    @property
    def next_due_s(self) -> float | None:
        """Time of the next call of `advance` if no event comes; None where none is needed."""
        times = [
            one.drain_until_s
            for one in self._members
            if one.drain_until_s is not None and not one.is_drained
        ]
        return min(times, default=None)

    def _finish_drain(self, member: Member, num_left: int, now: float) -> None:
        self._fate.part(member, now)
        member.num_moved = num_left
        self._members.give_back(member, now)
        _log.info("executor_drained", address=member.address, requests_moved=num_left)

    def _remove(self, member: Member, now: float) -> None:
        self._fate.part(member, now)
        self._members.remove(member, now)
        self._joined.discard(member.address)
        _log.info("executor_removed", address=member.address)
