"""Digests of full blocks: chained, salted, and equal only for equal prefixes."""

from __future__ import annotations

import struct
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.request.block_hashes import (
    block_digests,
    block_ids,
    root_digest,
    split_digests,
)
from tandem.errors import InternalError

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=24)
FEW_TOKENS = st.lists(st.integers(0, 2), max_size=12)
BLOCK_SIZE = st.integers(1, 7)


def column(tokens):
    return np.array(tokens, np.int32)


def by_definition(tokens, block_size, salt=b""):
    """Return the chain of digests, spelled out one block at a time."""
    digest = sha256(salt).digest() if salt else bytes(32)
    digests = []
    for end in range(block_size, len(tokens) + 1, block_size):
        content = struct.pack(f"<{block_size}q", *tokens[end - block_size : end])
        digest = sha256(digest + content).digest()
        digests.append(digest)
    return digests


class TestBlockHashes:
    def test_ids_equal_the_reference_vectors(self):
        """
        Tokens 1 to 8 in blocks of 4 have the two ids that Megatron Core gives them.
        """
        ids = block_ids(block_digests(column(range(1, 9)), 4))
        assert [2169646968702219264, 1548982756790257953] == ids

    def test_a_partial_block_has_no_digest(self):
        """
        Three tokens fill no block of four, and a ninth token adds nothing to two blocks.
        """
        assert b"" == block_digests(column([1, 2, 3]), 4)
        assert [] == block_ids(b"")
        eight, nine = column(range(8)), column(range(9))
        assert block_digests(eight, 4) == block_digests(nine, 4)

    @settings(max_examples=100, deadline=None)
    @given(TOKENS, BLOCK_SIZE, st.binary(max_size=40))
    def test_digests_follow_the_definition(self, tokens, block_size, salt):
        """
        Each digest is SHA-256 over the digest before it and its tokens as little-endian int64.
        """
        digests = block_digests(column(tokens), block_size, salt)
        assert by_definition(tokens, block_size, salt) == split_digests(digests)

    @settings(max_examples=100, deadline=None)
    @given(TOKENS, BLOCK_SIZE, st.integers(0, 5), st.binary(max_size=4))
    def test_hashing_on_from_a_parent_continues_the_chain(self, tokens, block_size, at, salt):
        """
        Blocks hashed later, from the digest before them, have the digests of the whole sequence.
        """
        at = min(at, len(tokens) // block_size)
        whole = block_digests(column(tokens), block_size, salt)
        head = block_digests(column(tokens[: at * block_size]), block_size, salt)
        parent = head[-32:] or root_digest(salt)
        rest = block_digests(column(tokens[at * block_size :]), block_size, parent=parent)
        assert whole == head + rest

    @settings(max_examples=200, deadline=None)
    @given(FEW_TOKENS, FEW_TOKENS, BLOCK_SIZE, st.sampled_from([b"", b"a"]), st.booleans())
    def test_equal_digest_means_equal_prefix_and_salt(self, ours, theirs, block_size, salt, same):
        """
        Two sequences share exactly the digests of the full blocks of their common prefix.
        """
        other = salt if same else salt + b"x"
        mine = split_digests(block_digests(column(ours), block_size, salt))
        yours = split_digests(block_digests(column(theirs), block_size, other))
        for i, (left, right) in enumerate(zip(mine, yours, strict=False), start=1):
            is_same = same and ours[: i * block_size] == theirs[: i * block_size]
            assert is_same == (left == right)

    def test_ids_are_never_zero(self):
        """
        An id is 1 to 2**63 - 1 whatever the digest begins with.
        """
        first_words = (0, 2**63 - 2, 2**63 - 1, 2**64 - 1)
        digests = b"".join(struct.pack("<Q24x", word) for word in first_words)
        assert [1, 2**63 - 1, 1, 2] == block_ids(digests)

    def test_a_parent_that_is_no_digest_is_an_error(self):
        """
        A parent of the wrong length is refused instead of hashed.
        """
        with pytest.raises(InternalError, match="31 bytes"):
            block_digests(column([1]), 1, parent=bytes(31))
