"""Items in flight: they count for their connection and their tenant as calls of their own would."""

from __future__ import annotations

from collections import Counter

from scheduler_svc.frontend.identity.call_shares import CallShares
from scheduler_svc.frontend.identity.identity import Caller
from tandem.errors import QueueFull

LIMIT = "max_items_in_flight"
"""Name of the limit, in errors."""
RETRY_AFTER_S = 1.0


class ItemCounts:
    """
    Numbers of items in flight. Owned by the event loop.

    Attributes:
        max_items: Most items that one connection may have at a time.
    """

    def __init__(self, max_items: int, shares: CallShares) -> None:
        """
        Args:
            max_items: Most items that one connection may have at a time.
            shares: Calls of each tenant, among which items count.
        """
        self._counts: Counter[str] = Counter()
        self._shares = shares
        self.max_items = max_items

    def enter(self, connection: str, caller: Caller | None) -> None:
        """
        Count a new item.

        Args:
            connection: Key of its connection.
            caller: Caller of its stream; None where callers need no credential. Items of a delegate
                count for no tenant, as its calls do not.

        Raises:
            QueueFull: The connection has as many as it may have, or all places are taken and the
                caller's tenant has its share of them.
        """
        if self._counts[connection] >= self.max_items:
            raise QueueFull(
                f"{self.max_items} items of this connection are in flight, the limit: add others "
                "when some have ended",
                retry_after_s=RETRY_AFTER_S,
                metadata={"limit": LIMIT},
            )
        if caller is not None and not caller.is_delegate:
            self._shares.begin(caller.identity.tenant, caller.weight)
        self._counts[connection] += 1

    def leave(self, connection: str, caller: Caller | None) -> None:
        """Forget an item that was counted with the same arguments."""
        if caller is not None and not caller.is_delegate:
            self._shares.end(caller.identity.tenant)
        self._counts[connection] -= 1
        if not self._counts[connection]:
            del self._counts[connection]
