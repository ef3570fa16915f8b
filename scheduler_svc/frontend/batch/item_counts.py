"""Items in flight of each connection: they count like the calls of other connections."""

from __future__ import annotations

from collections import Counter

from tandem.errors import QueueFull

LIMIT = "max_items_in_flight"
"""Name of the limit, in errors."""
RETRY_AFTER_S = 1.0


class ItemCounts:
    """
    Numbers of items in flight by connection. Owned by the event loop.

    Attributes:
        max_items: Most items that one connection may have at a time.
    """

    def __init__(self, max_items: int) -> None:
        self._counts: Counter[str] = Counter()
        self.max_items = max_items

    def enter(self, connection: str) -> None:
        """
        Count a new item.

        Raises:
            QueueFull: The connection has as many as it may have.
        """
        if self._counts[connection] >= self.max_items:
            raise QueueFull(
                f"{self.max_items} items of this connection are in flight, the limit: add others "
                "when some have ended",
                retry_after_s=RETRY_AFTER_S,
                metadata={"limit": LIMIT},
            )
        self._counts[connection] += 1

    def leave(self, connection: str) -> None:
        """Forget an item."""
        self._counts[connection] -= 1
        if not self._counts[connection]:
            del self._counts[connection]


def connection_of(peer: str, stream: object) -> str:
    """Return the key of a call's connection; peers of Unix sockets have no name of their own."""
    return f"unix-{id(stream)}" if peer.startswith("unix") else peer
