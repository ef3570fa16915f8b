"""Lookup of identities by token and by certificate."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping

from scheduler_svc.core.request.tenant import TenantLimits
from scheduler_svc.frontend.identity.identity import Caller, Identity
from tandem.bearer_token import token_hash


class CredentialTable:
    """
    Credentials of one file, by what proves them; it never changes.

    Tokens are found by a hash with a key that only this process knows, so that how long a lookup
    takes tells nothing about tokens; the last comparison takes the same time for every token.
    """

    def __init__(
        self,
        *,
        by_hash: Mapping[str, Identity],
        by_certificate: Mapping[str, Identity],
        limits: Mapping[str, TenantLimits],
    ) -> None:
        self._key = secrets.token_bytes(32)
        self._by_hash = {
            self._keyed(known): (known, identity) for known, identity in by_hash.items()
        }
        self._by_certificate = dict(by_certificate)
        self._limits = dict(limits)

    @property
    def knows_certificates(self) -> bool:
        """True if a client certificate can prove an identity."""
        return bool(self._by_certificate)

    @property
    def num_credentials(self) -> int:
        """Number of tokens and certificates."""
        return len(self._by_hash) + len(self._by_certificate)

    def of_token(self, token: str) -> Caller | None:
        """Return the caller that a token proves; None if the token is unknown."""
        return self.of_hash(token_hash(token))

    def of_hash(self, given: str) -> Caller | None:
        """Return the caller that the token of a hash proves; None if it is unknown."""
        known, identity = self._by_hash.get(self._keyed(given), ("", None))
        is_equal = hmac.compare_digest(given, known)
        return None if identity is None or not is_equal else self._caller(identity)

    def of_certificate(self, names: Iterable[str]) -> Caller | None:
        """Return the caller of the first name of a client certificate that is known."""
        for name in names:
            if identity := self._by_certificate.get(name):
                return self._caller(identity)
        return None

    def _keyed(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(), key=self._key).digest()

    def _caller(self, identity: Identity) -> Caller:
        return Caller(identity=identity, limits=self._limits)
