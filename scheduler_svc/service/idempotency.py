"""Idempotency keys of live requests: what makes repeating a request safe."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduler_svc.ipc.messages import Submit
from tandem.errors import InvalidParameter


@dataclass(slots=True, eq=False, kw_only=True)
class _Holder:
    """A live request with a key."""

    fingerprint: bytes
    seed: int
    handles: set[int]
    """Handles of its live choices."""


class IdempotencyKeys:
    """
    Live requests by idempotency key; a request that ended holds no key. Owned by the core loop.

    Keys are per tenant. A client that repeats a request with its key wants it served once, so the
    caller ends the older one. An equal key on a different request is a mistake of the client: it is
    refused and the older request goes on.
    """

    def __init__(self) -> None:
        self._holders: dict[tuple[str, str], _Holder] = {}
        self._keys: dict[int, tuple[str, str]] = {}
        """Tenant and key by the handle of each live choice."""

    def find(self, submit: Submit, is_live: Callable[[int], bool]) -> list[int]:
        """
        Return the handles of the live choices of the request that holds this one's key.

        Args:
            submit: A request with a key.
            is_live: Returns True for a handle that has not ended; `forget` may not have been called
                yet for one that has.

        Raises:
            InvalidParameter: The request that holds the key has another prompt, other parameters or
                another seed.
        """
        holder = self._holders.get((submit.tenant, submit.attempt_key))
        live = [] if holder is None else sorted(filter(is_live, holder.handles))
        if holder is None or not live:
            return []
        is_same_seed = not submit.is_seed_given or submit.sampling.seed == holder.seed
        if holder.fingerprint != submit.fingerprint or not is_same_seed:
            what = "prompt or parameters" if is_same_seed else "seed"
            # The error names no request: the key may be guessed, and the id would end the request.
            raise InvalidParameter(
                f"a live request has this attempt_key, but another {what}: use a key for one "
                "request only.",
                field="attempt_key",
            )
        return live

    def claim(self, submit: Submit, handles: Iterable[int]) -> None:
        """Give the request its key, also if another request holds it."""
        if not submit.attempt_key:
            return
        key = (submit.tenant, submit.attempt_key)
        before = self._holders.pop(key, None)
        for handle in before.handles if before is not None else ():
            del self._keys[handle]
        own = set(handles)
        self._holders[key] = _Holder(
            fingerprint=submit.fingerprint,
            seed=submit.sampling.seed,
            handles=own,
        )
        self._keys.update(dict.fromkeys(own, key))

    def forget(self, handle: int) -> None:
        """Note that a choice ended; a request loses its key with its last choice."""
        key = self._keys.pop(handle, None)
        if key is None:
            return
        handles = self._holders[key].handles
        handles.discard(handle)
        if not handles:
            del self._holders[key]

    def __len__(self) -> int:
        """Return the number of keys that are held."""
        return len(self._holders)
