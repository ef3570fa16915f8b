"""
Digests of full KV blocks: a chain of SHA-256 hashes over each block's tokens and all before them.

    digest[i] = SHA256(digest[i - 1] || tokens of block i as little-endian int64)
    digest[-1] = 32 zero bytes, or SHA256(salt) where there is one

Two blocks have the same digest exactly when they stand behind the same tokens, hold the same tokens
and were hashed with the same salt. Tenants with secret salts of their own can neither share KV nor
find out by timing what others sent. Source: Megatron Core's inference engine (chaining, byte
layout, 63-bit ids); it has no salt, which is vLLM's idea and is hashed here so that any bytes will
do.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from tandem.errors import InternalError
from tandem.link.batch import Int32Column

DIGEST_BYTES = 32
"""Length of one digest."""

_NO_PARENT = bytes(DIGEST_BYTES)
_TOKEN_BYTES = 8
_ID_MODULUS = (1 << 63) - 1


def root_digest(salt: bytes = b"") -> bytes:
    """Return the digest that the first block of a sequence is chained to, 32 bytes."""
    return sha256(salt).digest() if salt else _NO_PARENT


def block_digests(
    tokens: Int32Column, block_size: int, salt: bytes = b"", parent: bytes | None = None
) -> bytes:
    """
    Hash every full block of a sequence; tokens past the last full block have no effect.

    Args:
        tokens: Token ids, shape ``[T]``: a sequence from its start, or what follows `parent`.
        block_size: Tokens per block, at least 1.
        salt: Salt of the chain: only sequences with the same salt share digests; empty for none.
        parent: Digest of the block before `tokens`, which takes the place of the salt.

    Returns:
        ``T // block_size`` digests of 32 bytes each, one after the other.

    Raises:
        InternalError: `parent` is not one digest.
    """
    digest = root_digest(salt) if parent is None else parent
    if len(digest) != DIGEST_BYTES:
        raise InternalError(f"a parent digest has {len(digest)} bytes, not {DIGEST_BYTES}")
    num_blocks = len(tokens) // block_size
    width = block_size * _TOKEN_BYTES
    content = memoryview(tokens[: num_blocks * block_size].astype("<i8").tobytes())
    digests = []
    for start in range(0, num_blocks * width, width):
        state = sha256(digest)
        state.update(content[start : start + width])
        digest = state.digest()
        digests.append(digest)
    return b"".join(digests)


def split_digests(digests: bytes) -> list[bytes]:
    """Split concatenated digests into one entry per block."""
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def block_ids(digests: bytes) -> list[int]:
    """
    Return a 63-bit number per digest, 1 to 2**63 - 1, for routing by prefix, where a collision
    does no harm.
    """
    words = np.frombuffer(digests, "<u8").reshape(-1, DIGEST_BYTES // _TOKEN_BYTES)[:, 0]
    return [word % _ID_MODULUS + 1 for word in words.tolist()]
