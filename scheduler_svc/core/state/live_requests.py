"""Accepted requests that have not ended."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.queue.tenants import TenantCounts
from scheduler_svc.core.request.request import Request
from tandem.errors import InternalError, RequestNotFound


class LiveRequests:
    """
    Live choices of requests by handle and by tenant and request id, their deadlines, and counts per
    tenant. Ids are each tenant's own: two tenants may use the same one at once.

    A request is here from its acceptance to its end, wherever it waits or runs meanwhile.

    Attributes:
        next_number: Number of the choice that is accepted next: they count in order of acceptance,
            which is their order of age.
        tenants: Number of live choices of each tenant.
    """

    __slots__ = ("_by_handle", "_by_id", "_deadlines", "next_number", "tenants")

    def __init__(self) -> None:
        self._by_id: dict[tuple[str, str], list[Request]] = {}
        """Live choices by tenant and request id."""
        self._by_handle: dict[int, Request] = {}
        self._deadlines: KeyedHeap[float, Request] = KeyedHeap()
        self.next_number = 0
        self.tenants = TenantCounts()

    def __len__(self) -> int:
        """Return the number of live choices."""
        return len(self._by_handle)

    def __iter__(self) -> Iterator[Request]:
        """Yield the live choices, in order of acceptance."""
        return iter(self._by_handle.values())

    def has(self, tenant: str, request_id: str) -> bool:
        """Return True while any choice of a tenant's request is live."""
        return (tenant, request_id) in self._by_id

    def find(self, handle: int) -> Request | None:
        """Return the live choice with this handle; None without one."""
        return self._by_handle.get(handle)

    def choices_of(self, tenant: str, request_id: str) -> list[Request]:
        """
        Return the live choices of a tenant's request, in order, as a list that the caller may keep.

        Raises:
            RequestNotFound: No live request of this tenant has this id.
        """
        choices = self._by_id.get((tenant, request_id))
        if choices is None:
            message = f"no live request has the id {request_id!r}: it may have ended already"
            raise RequestNotFound(message, field="request_id")
        return list(choices)

    @property
    def next_deadline_s(self) -> float | None:
        """Time of the earliest deadline; None without any."""
        top = self._deadlines.peek()
        return None if top is None else top[0]

    def expired(self, now: float) -> Request | None:
        """Return the request with the earliest deadline if that is not after `now`, else None."""
        return self._deadlines.peek_due(now)

    def add(self, request: Request) -> None:
        """Add one choice of a request, which gets to know its siblings by it."""
        new = request.new
        self.next_number = max(self.next_number, request.number + 1)
        choices = self._by_id.setdefault((new.tenant, new.request_id), [])
        choices.append(request)
        request.join(choices)
        self._by_handle[new.handle] = request
        if new.deadline_s is not None:
            self._deadlines.push(new.deadline_s, request.number, request)
        self.tenants.add(new.tenant)

    def remove(self, request: Request) -> None:
        """Remove one choice, since it has ended."""
        self._deadlines.discard(request.number)
        self.tenants.remove(request.new.tenant)
        key = request.new.tenant, request.new.request_id
        choices = self._by_id[key]
        choices.remove(request)
        if not choices:
            del self._by_id[key]
        del self._by_handle[request.new.handle]

    def check_integrity(self) -> None:
        """
        Compare the indexes with one another.

        Raises:
            InternalError: A request is missing from one of them, or has a number of one to come.
        """
        if any(request.number >= self.next_number for request in self):
            raise InternalError("a request has the number of one that is yet to be accepted")
        self.tenants.check_integrity(request.new.tenant for request in self)
        by_id = [request for choices in self._by_id.values() for request in choices]
        if {request.new.handle: request for request in by_id} != self._by_handle:
            raise InternalError("request ids and handles are not of the same requests")
        if [request for request in self if request.new.deadline_s is not None] != sorted(
            self._deadlines, key=lambda request: request.number
        ):
            raise InternalError("a request with a deadline is missing, or a stranger has one")
        self._deadlines.check_integrity()
        for request in by_id:
            request.check_integrity()
        for request in by_id:
            if request.siblings is not self._by_id[request.new.tenant, request.new.request_id]:
                raise InternalError("a request does not know its siblings")
