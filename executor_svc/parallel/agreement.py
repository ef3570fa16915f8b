"""Check that the ranks of a model compute alike."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from executor_svc.parallel.collectives import TensorCollectives
from tandem.errors import InternalError, InvalidConfig


def check_agreement(facts: Sequence[Mapping[str, str]]) -> None:
    """
    Compare what all ranks found out about their model and machine, as names and values, with what
    rank 0 did. Every rank checks the same list, so that all of them fail or none.

    Raises:
        InvalidConfig: A rank differs; names it and what differs.
    """
    for rank, own in enumerate(facts):
        for name, first in facts[0].items():
            if own[name] != first:
                raise InvalidConfig(
                    f"the ranks of a model must compute alike, but {name} is {own[name]} on rank "
                    f"{rank} and {first} on rank 0"
                )


def check_same_bits(own: Tensor, ranks: TensorCollectives) -> None:
    """
    Compare a tensor, which all ranks of a stage computed from the same sums, with theirs. All of
    them do so after the same step; it waits for their devices.

    Raises:
        InternalError: They differ, on every rank alike.
    """
    raw = own.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    checksums = ranks.all_of(zlib.crc32(raw), own.device)
    if len(set(checksums)) > 1:
        told = ", ".join(f"{one:#x}" for one in checksums)
        raise InternalError(
            f"the ranks of a stage computed different hidden states in the same step: checksums "
            f"{told}, in the order of ranks"
        )
