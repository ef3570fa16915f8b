"""Operations of a model that is spread over ranks: those of one rank, and sums over all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from executor_svc.model.row_operations import RowOperations
from executor_svc.parallel.collectives import TensorCollectives
from executor_svc.parallel.integers import IntegerCollectives
from executor_svc.parallel.process_groups import ProcessGroups
from executor_svc.parallel.sharding import Sharding
from kernels.sampling import VocabularyShard


class ShardedOperations:
    """
    Row operations of one rank. A product that is added to the hidden states has a part of its sum
    on each rank: the parts are added up in float32, then bias and residual once, and the result is
    rounded once. There are two such products in each layer.
    """

    def __init__(self, own: RowOperations, ranks: TensorCollectives) -> None:
        self._own = own
        self._ranks = ranks
        self.linear = own.linear
        self.partial_linear = own.partial_linear
        self.silu_mul = own.silu_mul
        self.rope_kv_write = own.rope_kv_write

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Add a product to `hidden` in place, which all ranks hold whole."""
        total = self._ranks.sum(self._own.partial_linear(x, weight))
        if bias is not None:
            total += bias
        hidden.copy_(total.add_(hidden))


class ShardedVocabulary:
    """Embedding and logits of a vocabulary of which each rank holds some rows."""

    def __init__(self, sharding: Sharding, ranks: TensorCollectives, groups: ProcessGroups) -> None:
        self._own = sharding.vocabulary
        self._ranks = ranks
        self.shard = VocabularyShard(
            first=sharding.rank * sharding.own.vocab_size,
            width=sharding.own.vocab_size,
            vocab_size=sharding.whole.vocab_size,
            ranks=IntegerCollectives(groups),
        )
        """The ids of this rank's logits, rows of padding included."""

    def embedded(self, token_id: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """
        Return the embeddings of ids int ``[T]``: ``[T, hidden_size]``. One rank has a row, all
        others add zeros to it, which is exact.

        Args:
            token_id: Ids in the vocabulary.
            rows: Returns rows of this rank's table.
        """
        is_here = (token_id >= self._own.start) & (token_id < self._own.stop)
        found = rows(torch.where(is_here, token_id - self._own.start, 0))
        here = torch.where(is_here[:, None], found.float(), 0.0)
        return self._ranks.sum(here).to(found.dtype)

    def logits(self, own: Tensor) -> Tensor:
        """
        Return this rank's logits ``[R, width]`` with -infinity for rows of padding, in place; all
        ranks sample from their own together.
        """
        own[:, len(self._own) :] = float("-inf")
        return own
