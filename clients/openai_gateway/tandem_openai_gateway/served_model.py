"""The model that the schedulers serve, and the names that requests may give it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.error_codes import Unauthenticated
from tandem.errors import TandemError
from tandem_openai_gateway.api.headers import key_of
from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.scheduler_calls.batch_call import Metadata
from tandem_openai_gateway.scheduler_calls.schedulers import Schedulers
from tandem_openai_gateway.upstream import Model, Started

KEY_KNOWN_S = 30.0
"""Seconds for which a key that a scheduler has let in is not asked about again."""
MAX_KEYS = 4096
"""Most keys that are known at a time; the one that was asked about longest ago gives way."""


class KnownKeys:
    """Keys that a scheduler has let in a short while ago; only their hashes are kept."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: Function that returns monotonic time in seconds.
        """
        self._clock = clock
        self._until_s: dict[bytes, float] = {}

    def knows(self, metadata: Metadata) -> bool:
        """Return True if the key of these headers was let in; having none counts as a key."""
        return self._clock() < self._until_s.get(key_of(metadata), 0.0)

    def note(self, metadata: Metadata) -> None:
        """Note that a scheduler has let a key in."""
        key = key_of(metadata)
        self._until_s.pop(key, None)
        self._until_s[key] = self._clock() + KEY_KNOWN_S
        if len(self._until_s) > MAX_KEYS:
            del self._until_s[next(iter(self._until_s))]

    def forget(self, metadata: Metadata) -> None:
        """Have a scheduler asked about a key again; one that is not known is left so."""
        self._until_s.pop(key_of(metadata), None)


class ServedModel:
    """
    Name of the served model, as far as it is known; it is asked for again when a request names
    another one and when an answer came from another revision.
    """

    def __init__(self, schedulers: Schedulers) -> None:
        self._schedulers = schedulers
        self._known: Model | None = None
        self._keys = KnownKeys()

    @property
    def max_request_bytes(self) -> int | None:
        """Size of the largest message that the schedulers take; None if it is not known."""
        return self._known.max_request_bytes or None if self._known is not None else None

    async def admit(self, metadata: Metadata) -> None:
        """
        Have a scheduler look at the key of a request, before its body costs anything, and tell its
        largest message where that is not known, as after a change of the model.

        Raises:
            TandemError: The key is refused, or no scheduler answers.
        """
        if self._known is None or not self._keys.knows(metadata):
            await self.ask(metadata)

    async def ask(self, metadata: Metadata) -> Model:
        """
        Return the model that is served now.

        Raises:
            TandemError: No scheduler answers.
        """
        with self.forgetting(metadata):
            self._known = await self._schedulers.get_model(metadata)
        self._keys.note(metadata)
        return self._known

    async def check(self, name: str | None, metadata: Metadata) -> str:
        """
        Return the name of the served model.

        Args:
            name: Name that the request gives; None = any.
            metadata: Metadata of the request.

        Raises:
            ApiError: Another model is served.
            TandemError: No scheduler answers.
        """
        model = self._known
        if model is None or name not in (None, model.name):
            model = await self.ask(metadata)
        if name not in (None, model.name):
            raise ApiError(
                404,
                f"the model {name!r} is not served here; the served model is {model.name!r}",
                param="model",
                code="model_not_found",
            )
        return model.name

    @contextmanager
    def forgetting(self, metadata: Metadata) -> Iterator[None]:
        """Forget the key of a request if this block fails as a scheduler does not know it."""
        try:
            yield
        except TandemError as error:
            if error.reason == Unauthenticated.reason:
                self._keys.forget(metadata)
            raise

    def note(self, started: Started) -> None:
        """Forget the name if the schedulers have changed the model."""
        if self._known is not None and self._known.revision != started.model_revision:
            self._known = None
