"""Bearer tokens: how one is made, and the hash by which a server knows it."""

from __future__ import annotations

import hashlib
import secrets

PREFIX = "tdm_"
"""Beginning of every token that is made here, so that scanners for leaked secrets find it."""
_NUM_RANDOM_BYTES = 32


def new_token() -> str:
    """Return a token with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(_NUM_RANDOM_BYTES)


def token_hash(token: str) -> str:
    """
    Return the SHA-256 of a token in hexadecimal, which a file of credentials has in its place.

    A plain hash is enough for tokens of `new_token`, which are as random as a key; one that a
    person made up could be guessed from it.
    """
    return hashlib.sha256(token.encode()).hexdigest()
