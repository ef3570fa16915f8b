"""KV memory that remembers, per position, the prefix written, its writer and its salt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.link.batch import Batch

_PRIME = 0x100000001B3
_WORD = (1 << 64) - 1
_COLUMNS = ("owner", "position", "fingerprint", "salt", "is_bad")


def fold(fingerprint: int, token: int) -> int:
    """Return the fingerprint of a prefix with one more token."""
    return ((fingerprint ^ (token + 1)) * _PRIME + 0x9E3779B97F4A7C15) & _WORD


@dataclass(frozen=True)
class Writer:
    """A slot and what it holds: its key, its salt and the fingerprint of each of its prefixes."""

    key: int
    salt: bytes
    prefixes: list[int]


class KvMemory:
    """
    Blocks of positions; each position's "KV" is the fingerprint of the prefix up to it.

    A wrong or stale read would change tokens; the writer is checked besides, so that it fails where
    it happens.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        shape = (num_blocks + 1, block_size)
        self.block_size = block_size
        self.owner = np.full(shape, -1, np.int64)
        self.position = np.full(shape, -1, np.int64)
        self.fingerprint = np.zeros(shape, np.uint64)
        self.salt = np.full(shape, b"", object)
        self.is_bad = np.zeros(shape, np.bool_)
        """True for positions computed with NaN."""

    def forget(self, blocks, first_offset: int = 0) -> None:
        """Forget what these blocks hold from an offset on."""
        self.position[blocks, first_offset:] = -1
        self.is_bad[blocks, first_offset:] = False

    def copy_from(self, other: KvMemory, source, destination) -> None:
        """Take whole blocks over, all at once."""
        for name in _COLUMNS:
            getattr(self, name)[destination] = getattr(other, name)[source].copy()

    def read(self, table, reader: Writer, start: int, num_cached: int) -> bool:
        """
        Check positions 0 to `start` - 1 as `reader` is to find them; True when all are sound.

        From `num_cached` on the reader must have written them itself under its present key.
        """
        context = np.arange(start)
        at = table[context // self.block_size], context % self.block_size
        own = reader.prefixes[:start]
        assert (self.position[at] == context).all(), "reads KV of another position or none"
        expected = np.array(own, np.uint64)
        assert (self.fingerprint[at] == expected).all(), "reads KV of another prefix"
        assert (self.salt[at] == reader.salt).all(), "reads KV under another salt"
        is_own = self.owner[at] == reader.key
        assert is_own[num_cached:].all(), "reads KV of another request that it did not match"
        return not self.is_bad[at].any()

    def write(self, table, writer: Writer, start: int, length: int, *, is_bad: bool) -> None:
        """Write positions `start` to `start + length` - 1."""
        positions = np.arange(start, start + length)
        at = table[positions // self.block_size], positions % self.block_size
        self.owner[at] = writer.key
        self.position[at] = positions
        self.fingerprint[at] = np.array(writer.prefixes[start : start + length], np.uint64)
        self.salt[at] = writer.salt
        self.is_bad[at] = is_bad


def move_blocks(device: KvMemory, host: KvMemory, batch: Batch) -> None:
    """Swap out, copy and swap in, in this order; a host block is read once."""
    host.copy_from(device, batch.swap_out_block, batch.swap_out_host)
    device.copy_from(device, batch.copy_source, batch.copy_destination)
    assert not np.isin(batch.swap_in_host, batch.swap_out_host).any()
    held = (host.position[batch.swap_in_host] >= 0).any(axis=1)
    assert held.all(), "swaps in a host block that holds nothing or was swapped in before"
    device.copy_from(host, batch.swap_in_host, batch.swap_in_block)
    host.forget(batch.swap_in_host)
