"""Search for runs of generated tokens that also occur in the training stream."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_BASE = np.uint64(6364136223846793005)


def longest_shared_run(stream: npt.NDArray[np.uint16], ids: list[list[int]]) -> int:
    """
    Return the largest ``n`` such that ``n`` generated tokens in a row occur in ``stream``.

    Args:
        stream: Training token ids ``[N]``.
        ids: Generated sequences.
    """
    low, high = 0, max(map(len, ids), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if count_shared(stream, ids, middle):
            low = middle
        else:
            high = middle - 1
    return low


def count_shared(stream: npt.NDArray[np.uint16], ids: list[list[int]], run: int) -> int:
    """
    Return the number of sequences with ``run`` tokens in a row that occur in ``stream``.

    Every window of the stream is compared by a 64-bit hash of its tokens, so no match is missed;
    a false match is possible but needs two different windows with equal hashes.
    """
    wanted = [_hashes(np.array(sequence, dtype=np.uint16), run) for sequence in ids]
    present = np.unique(np.concatenate([np.empty(0, np.uint64), *wanted]))
    if not len(present):
        return 0
    hashes = _hashes(stream, run)
    places = np.minimum(np.searchsorted(present, hashes), len(present) - 1)
    hits = np.unique(hashes[present[places] == hashes])
    return sum(bool(np.isin(part, hits).any()) for part in wanted)


def _hashes(ids: npt.NDArray[np.uint16], run: int) -> npt.NDArray[np.uint64]:
    """Return the hash of every window of ``run`` tokens, shape ``[len(ids) - run + 1]``."""
    count = max(len(ids) - run + 1, 0)
    total = np.zeros(count, dtype=np.uint64)
    for offset in range(run if count else 0):
        total *= _BASE
        total += ids[offset : offset + count].astype(np.uint64) + np.uint64(1)
    return total
