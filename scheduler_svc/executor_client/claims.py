"""Which executor each link of one scheduler has, so that no two of them take the same one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tandem.errors import IncompatibleExecutor


@dataclass(frozen=True, slots=True)
class Claim:
    """An executor that a link has: boot id, and the address at which it was last reached."""

    boot_id: str
    address: str


class Claims:
    """
    Claims of the links of one scheduler to executors. Any thread may use them.

    A second session with an executor would end the first one, as a scheduler may have one at each:
    so an executor that is named twice, or that stands by for several, must be taken only once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[object, Claim] = {}
        """Claim of each owner; guarded by the lock."""

    def taken(self, owner: object) -> frozenset[str]:
        """Return the addresses of executors that others than `owner` have."""
        with self._lock:
            others = (claim for one, claim in self._claims.items() if one is not owner)
            return frozenset(claim.address for claim in others)

    @contextmanager
    def taking(self, owner: object, claim: Claim) -> Iterator[None]:
        """
        Let `owner` have an executor in place of the one it had, unless the block raises.

        Raises:
            IncompatibleExecutor: Another owner has it.
        """
        with self._lock:
            for one, other in self._claims.items():
                if one is not owner and other.boot_id == claim.boot_id:
                    raise IncompatibleExecutor(
                        f"the executor at {claim.address} serves already as {other.address}: name "
                        "each executor once"
                    )
            before = self._claims.get(owner)
            self._claims[owner] = claim
        try:
            yield
        except BaseException:
            with self._lock:
                self._claims.pop(owner)
                if before is not None:
                    self._claims[owner] = before
            raise

    def drop(self, owner: object) -> None:
        """Let others have the executor that `owner` had, if it had one."""
        with self._lock:
            self._claims.pop(owner, None)
