"""One `Execute` stream of the link's model: two ordered queues that can be cut at any point."""

from __future__ import annotations

from collections import deque

from tandem.errors import TandemError
from tandem.link.session import Attach


class Stream:
    """Messages under way between one scheduler and one boot; those sent after a cut are lost."""

    def __init__(self, owner: str, boot_id: str, attach: Attach) -> None:
        self.owner = owner
        self.boot_id = boot_id
        self.attach = attach
        self.down: deque[bytes] = deque()
        self.up: deque[bytes | TandemError] = deque()
        self.is_cut = False
        self.was_accepted = False

    def send_down(self, raw: bytes) -> None:
        if not self.is_cut:
            self.down.append(raw)

    def send_up(self, item: bytes | TandemError) -> None:
        if not self.is_cut:
            self.up.append(item)

    def cut(self) -> None:
        """Lose everything under way, in both directions."""
        self.is_cut = True
        self.down.clear()
        self.up.clear()

    def repeat(self, direction: str, which: int, where: int) -> None:
        """Send a message that is under way a second time, right after itself or later."""
        queue = self.down if direction == "down" else self.up
        first = 1 if direction == "down" and len(queue) and queue[0] is self.first_message else 0
        candidates = [i for i in range(first, len(queue)) if isinstance(queue[i], bytes)]
        if candidates:
            index = candidates[which % len(candidates)]
            place = index + 1 + where % (len(queue) - index)
            queue.insert(place, queue[index])  # type: ignore[arg-type]  # bytes go both ways

    first_message: bytes = b""
