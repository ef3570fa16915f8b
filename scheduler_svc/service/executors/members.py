"""The executors that serve together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import inf

from scheduler_svc.config.settings import SchedulerSettings
from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.executor_client.link import ExecutorLink
from scheduler_svc.executor_client.session import ExecutorSession
from scheduler_svc.executor_client.session_events import SessionCounts
from scheduler_svc.service.executors.member import Member
from tandem.errors import TandemError
from tandem.link.commands import KvMode

MakeLink = Callable[[str], ExecutorLink]
"""Makes the link to the executor with an address; it is not started yet."""


@dataclass(slots=True, eq=False)
class SuspensionWish:
    """
    Wish of an operator to suspend all executors, those that attach later too.

    Attributes:
        mode: Mode in which they are to suspend.
        refused: Error of the executor that could not, for which it was given up; None before.
    """

    mode: KvMode
    refused: TandemError | None = None


class Members:
    """
    Executors that serve together, in the order in which they were named. Owned by the core loop;
    `stop` may be called by another thread once the loop has ended.

    Attributes:
        newest: Member whose session was opened last; None before the first.
        spare: The core's port to the last member, which was removed: the core keeps one.
        suspension: Suspension that an operator has asked for; None without one.
    """

    def __init__(self, make_link: MakeLink, settings: SchedulerSettings, now: float) -> None:
        """
        Args:
            make_link: Makes links.
            settings: Name the first members, and the times after which one is given up.
            now: Seconds, on the clock of all calls.
        """
        self._make_link = make_link
        self._lost_after_s = settings.lost_after_s
        self._move_after_s = settings.move_after_s
        self._members: tuple[Member, ...] = ()
        """The members; another tuple once one is added or removed."""
        self._turn: Callable[[], None] | None = None
        """Makes a turn of the loop, for links; None until the loop runs."""
        self._counts_of_gone = SessionCounts()
        self._alone_since_s = now
        """Time at which the last member was removed, or the start."""
        self.newest: Member | None = None
        self.spare: ExecutorPort | None = None
        self.suspension: SuspensionWish | None = None
        for address in settings.executor_addresses:
            self.add(address, now)

    def __iter__(self) -> Iterator[Member]:
        """Return an iterator over those that are members now, also while some join or leave."""
        return iter(self._members)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._members)

    def find(self, address: str) -> Member | None:
        """Return the member that was named with an address, if any."""
        return next((one for one in self._members if one.address == address), None)

    def add(self, address: str, now: float) -> Member:
        """Let the executor with an address serve; it has not been named before."""
        link = self._make_link(address)
        session = ExecutorSession(link, lost_after_s=self._lost_after_s, now=now)
        member = Member(address, link, session)
        self._members = (*self._members, member)
        if self._turn is not None:
            self._start(member, self._turn)
        return member

    def give_back(self, member: Member, now: float) -> None:
        """Give a member's executor back, as it serves no longer; the member stays known."""
        if (port := member.port) is not None:  # it is the last one of the core's
            port.executor_lost(now)
            self.spare, member.port = port, None
        member.is_serving, member.is_drained = False, True
        member.session.release(now)

    def remove(self, member: Member, now: float) -> None:
        """Give a member's executor back, and forget it."""
        self._members = tuple(one for one in self._members if one is not member)
        self.give_back(member, now)
        counts = self._counts_of_gone
        for counter in fields(counts):
            _add(counts, counter.name, member.session.counts)
        self._alone_since_s = now
        if self.newest is member:
            self.newest = None

    def start(self, turn: Callable[[], None]) -> None:
        """Connect to every member; links call `turn` for step results from now on."""
        self._turn = turn
        for member in self:
            self._start(member, turn)

    def release(self, now: float) -> None:
        """Give every executor back for good."""
        for member in self:
            member.session.release(now)
            member.is_serving = False

    def stop(self, *, release: bool) -> None:
        """End every link, with `release` so that another scheduler can soon have the executors."""
        if release:
            for member in self:
                member.link.release()
        for member in self:
            member.link.stop(release=release)

    def suspend(self, mode: KvMode, now: float) -> SuspensionWish:
        """Suspend all executors that are not suspended, those that attach later too."""
        if self.suspension is None:
            self.suspension = SuspensionWish(mode)
        self.suspension.mode = mode
        for member in self:
            if member.port is not None:
                member.port.suspend(mode, now)
        return self.suspension

    def resume(self) -> None:
        """Resume all executors."""
        self.suspension = None
        for member in self:
            if member.port is not None:
                member.port.resume()

    def give_up_suspension(self, error: TandemError) -> None:
        """Resume all executors, as one could not suspend; callers that wait get the error."""
        if self.suspension is not None:
            self.suspension.refused = error
        self.resume()

    def others_serving(self, member: Member) -> list[Member]:
        """Return the members but one that have a session which can be used."""
        return [one for one in self._members if one.is_serving and one is not member]

    def look(self, member: Member, now: float) -> None:
        """Judge a member's silence: where requests can move to another, it is given up sooner."""
        has_others = self.num_attached > member.session.is_attached
        member.session.look(now, silent_s=self._move_after_s if has_others else inf)

    @property
    def num_attached(self) -> int:
        """Number of members with which steps and results flow."""
        return sum(member.session.is_attached for member in self._members)

    @property
    def is_attached(self) -> bool:
        """True while steps and results flow with one member at least."""
        return self.num_attached > 0

    @property
    def detached_since_s(self) -> float | None:
        """Time since which no member is attached; None while one is."""
        latest = self._alone_since_s
        for member in self:
            if member.session.detached_since_s is None:
                return None
            latest = max(latest, member.session.detached_since_s)
        return latest

    def is_progressing(self) -> bool:
        """Return True unless the steps of every member take much longer than predicted."""
        return not self._members or any(member.session.is_progressing() for member in self._members)

    @property
    def is_suspended(self) -> bool:
        """True while an operator's suspension holds all that serve, or that would."""
        known = [one for one in self._members if one.port is not None]
        return bool(known) and all(member.is_suspended for member in known)

    @property
    def has_obeyed(self) -> bool:
        """True once every executor that serves has done the last suspension or resumption."""
        serving = [member for member in self._members if member.is_serving] or self._members
        return all(member.has_obeyed for member in serving)

    @property
    def device_memory_bytes(self) -> int:
        """Device memory in use at the latest step of each member, in sum."""
        return sum(member.device_memory_bytes for member in self._members)

    @property
    def refusal(self) -> str:
        """Reasons why executors are not used, in words; empty when there is none."""
        found = [one for one in self._members if one.session.refusals.text]
        if not found:
            return ""
        if len(self._members) == 1:
            return found[0].session.refusals.text
        return "; ".join(f"{one.address}: {one.session.refusals.text}" for one in found)

    @property
    def counts(self) -> SessionCounts:
        """Counts of all sessions since the start."""
        total = SessionCounts()
        for one in (self._counts_of_gone, *(member.session.counts for member in self._members)):
            for counter in fields(total):
                _add(total, counter.name, one)
        return total

    @property
    def num_sessions(self) -> int:
        """Number of sessions opened since the start."""
        opened = sum(member.session.counts.executor_sessions for member in self._members)
        return self._counts_of_gone.executor_sessions + opened

    @property
    def address(self) -> str:
        """Address at which the newest session's executor was last reached; empty before."""
        return "" if self.newest is None else self.newest.session.address

    def _start(self, member: Member, turn: Callable[[], None]) -> None:
        member.link.turn_with(turn)
        member.link.start()
        member.link.connect()


def _add(total: SessionCounts, name: str, more: SessionCounts) -> None:
    setattr(total, name, getattr(total, name) + getattr(more, name))
