"""Ranks that share logits, as threads of one process, and what they answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from typing import TypeVar

import torch
from torch import Tensor

from kernels.sampling import Logprobs, Sampled, VocabularyShard

Answer = TypeVar("Answer")

WAIT_S = 60.0
"""Time that is long on a busy machine; a rank that fails lets the others wait no longer."""


class Ranks:
    """
    Collectives of so many threads. `calls` has the name and shape of each that rank 0 took part in,
    and `sent_bytes` what a rank gave to it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.sent_bytes = 0
        self._own: list[Tensor] = [torch.empty(0)] * size
        self._barrier = Barrier(size)
        self._here = local()

    def max(self, own: Tensor) -> Tensor:
        return self._gathered("max", own).amax(dim=0)

    def sum(self, own: Tensor) -> Tensor:
        return self._gathered("sum", own).sum(dim=0, dtype=own.dtype)

    def gather(self, own: Tensor) -> Tensor:
        return self._gathered("gather", own)

    def run(self, function: Callable[[int], Answer]) -> list[Answer]:
        """Call a function on all ranks at once; return their answers."""

        def on(rank: int) -> Answer:
            self._here.rank = rank
            try:
                return function(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(on, range(self.size)))

    def _gathered(self, name: str, own: Tensor) -> Tensor:
        assert not own.is_floating_point()
        rank = self._here.rank
        if rank == 0:
            self.calls.append((name, tuple(own.shape)))
            self.sent_bytes += own.nbytes
        self._own[rank] = own
        self._barrier.wait(WAIT_S)
        gathered = torch.stack(self._own)
        self._barrier.wait(WAIT_S)
        return gathered


def shared(
    logits: Tensor, size: int, function: Callable[[Tensor, VocabularyShard], Answer]
) -> tuple[Answer, Ranks]:
    """
    Call a function with the part of the logits of each of `size` ranks; check that all answer
    alike, and return the answer and the ranks.
    """
    vocab_size = logits.shape[1]
    width = -(-vocab_size // size)
    ranks = Ranks(size)

    def on(rank: int) -> Answer:
        first = rank * width
        part = torch.full((len(logits), width), -torch.inf, dtype=logits.dtype)
        known = logits[:, first : first + width]
        part[:, : known.shape[1]] = known
        before = part.clone()
        shard = VocabularyShard(first=first, width=width, vocab_size=vocab_size, ranks=ranks)
        answer = function(part, shard)
        assert torch.equal(before.nan_to_num(nan=7.0), part.nan_to_num(nan=7.0))
        return answer

    first, *others = ranks.run(on)
    for other in others:
        check_same(first, other)
    return first, ranks


def check_same(expected: object, found: object) -> None:
    """Check that two answers have the same bits where they have a meaning."""
    if isinstance(expected, Sampled) and isinstance(found, Sampled):
        assert torch.equal(expected.valid, found.valid)
        assert torch.equal(expected.token, found.token)
        assert (expected.margin is None) == (found.margin is None)
        if expected.margin is not None:
            assert torch.equal(expected.margin, found.margin)
        assert (expected.logprobs is None) == (found.logprobs is None)
        if expected.logprobs is not None:
            _check_logprobs(expected.logprobs, found.logprobs, expected.valid)
    elif isinstance(expected, tuple) and isinstance(found, tuple):
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def _check_logprobs(expected: Logprobs, found: Logprobs, valid: Tensor) -> None:
    assert torch.equal(expected.row, found.row)
    assert torch.equal(expected.num_top, found.num_top)
    has_meaning = valid[expected.row]
    assert torch.equal(expected.chosen[has_meaning], found.chosen[has_meaning])
    for row in has_meaning.nonzero()[:, 0].tolist():
        count = int(expected.num_top[row])
        assert torch.equal(expected.top_token[row, :count], found.top_token[row, :count])
        assert torch.equal(expected.top[row, :count], found.top[row, :count])
    assert (expected.requested_ids is None) == (found.requested_ids is None)
    if expected.requested_ids is not None:
        assert torch.equal(expected.requested_ids, found.requested_ids)
        wanted = (expected.requested_ids >= 0) & has_meaning[:, None]
        assert torch.equal(expected.requested[wanted], found.requested[wanted])
