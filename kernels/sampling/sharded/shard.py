"""A rank's place in a vocabulary that ranks share, and the collectives that sampling calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Collectives(Protocol):
    """
    Collectives over the ranks that share a vocabulary, on integers alone. All ranks call the same
    ones in the same order with one shape, and get the same result, on the device of `own`.
    """

    def max(self, own: Tensor) -> Tensor:
        """Return the largest of all ranks' integers, element by element; may overwrite `own`."""
        ...

    def sum(self, own: Tensor) -> Tensor:
        """Return the sums of all ranks' integers, element by element; may overwrite `own`."""
        ...

    def gather(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks in one, in the order of ranks: ``[ranks, ...]``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """
    The part of the vocabulary whose logits a rank has.

    Attributes:
        first: Id of the rank's first logit; the others follow.
        width: Number of logits, at least 1 and the same on all ranks. Those of ids from
            `vocab_size` on are -infinity.
        vocab_size: Number of ids on all ranks.
        ranks: Collectives over the ranks.
    """

    first: int
    width: int
    vocab_size: int
    ranks: Collectives

    def places_of(self, ids: Tensor) -> Tensor:
        """Return the places of ids among this rank's logits, `width` for those of other ranks."""
        place = ids - self.first
        return torch.where((place >= 0) & (place < self.width), place, self.width)
