"""Memory of bodies of requests: how much all of them may hold, and how much those of one key."""

from __future__ import annotations

from collections import Counter

from tandem_openai_gateway.errors import RETRY_AFTER_S, ApiError, retry_headers

MAX_HELD_BYTES = 96 << 20
"""Most bytes that all bodies hold together; one that is alone may have more."""
KEY_SHARE = 0.667
"""Most of these bytes that bodies with one key may hold while there are none with another."""


class HeldBytes:
    """
    Bytes that bodies of requests hold, by the key that they came with. Owned by the event loop.

    A key may have a multiple of the bytes that are still free, as a connection to a scheduler may
    of the messages that wait to be decoded there (`undecoded_share`): a key that is alone has its
    share, several have less each, and something is left for the next one in any case.
    """

    def __init__(self, max_bytes: int = MAX_HELD_BYTES, key_share: float = KEY_SHARE) -> None:
        """
        Args:
            max_bytes: Most bytes of all bodies together.
            key_share: Most of them that those with one key may hold while no other has any, over 0
                and up to 1.
        """
        self._max_bytes = max_bytes
        self._share = key_share
        self._num_bytes = 0
        self._of_key: Counter[bytes] = Counter()
        """Bytes of keys that have some."""

    def take(self, key: bytes, num_bytes: int, *, own_bytes: int) -> None:
        """
        Count further bytes of a body.

        Args:
            key: Key that it came with.
            num_bytes: Number of the bytes.
            own_bytes: Bytes that are counted for this body already.

        Raises:
            ApiError: There is no room for them, or not for this key.
        """
        others = self._num_bytes - own_bytes
        if others:
            self._check_room(key, num_bytes)
        self._num_bytes += num_bytes
        self._of_key[key] += num_bytes

    def give_back(self, key: bytes, num_bytes: int) -> None:
        """Count bytes no more that were taken with the same key."""
        self._num_bytes -= num_bytes
        self._of_key[key] -= num_bytes
        if not self._of_key[key]:
            del self._of_key[key]

    def _check_room(self, key: bytes, num_bytes: int) -> None:
        free = self._max_bytes - self._num_bytes
        if num_bytes > free:
            raise _no_room("too many bodies are being read: try again when some have been")
        if (self._of_key[key] + num_bytes) * (1 - self._share) > free * self._share:
            raise _no_room(
                "too many bodies with this key are being read, and too little would be left for "
                "others: try again when some have been"
            )


class BodyBytes:
    """
    The bytes of one body, as they come.

    Each counts twice: as it came, and for what is made of it, which stays when the body itself is
    gone. So there is room for that as soon as the body is complete.
    """

    def __init__(self, held: HeldBytes, key: bytes) -> None:
        """
        Args:
            held: Bytes of all bodies.
            key: Key that this one comes with.
        """
        self._held = held
        self._key = key
        self._counted = 0
        self._raw = bytearray()

    def __len__(self) -> int:
        return len(self._raw)

    def add(self, part: bytes) -> None:
        """
        Take the next part.

        Raises:
            ApiError: There is no room for it.
        """
        num_bytes = 2 * len(part)
        self._held.take(self._key, num_bytes, own_bytes=self._counted)
        self._counted += num_bytes
        self._raw += part

    def take_raw(self) -> bytes:
        """Return the body, which is not kept here any more; it counts on until `note_decoded`."""
        raw = bytes(self._raw)
        self._raw = bytearray()
        return raw

    def note_decoded(self) -> None:
        """Count only what was made of the body from now on."""
        self._give_back(self._counted // 2)

    def release(self) -> None:
        """Count nothing any more; safe to call more than once."""
        self._raw = bytearray()
        self._give_back(self._counted)

    def _give_back(self, num_bytes: int) -> None:
        if num_bytes:
            self._counted -= num_bytes
            self._held.give_back(self._key, num_bytes)


def _no_room(why: str) -> ApiError:
    return ApiError(503, why, code="overloaded", headers=retry_headers(RETRY_AFTER_S))
