"""A function of the caller that changes logits before tokens are drawn, and the rows it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor_svc.slots.metadata import MetadataType
from executor_svc.slots.numbers import SlotNumbers
from executor_svc.slots.tokens import SlotTokens
from tandem.link.batch import Int32Column


class DrawnRows:
    """
    The R rows of a step whose next tokens are about to be drawn, in the order of their logits.

    `rows[label]` is the number that each row's request has under a label of the metadata types, a
    tensor ``[R]`` on the host or the device, as the type says.
    """

    def __init__(
        self, numbers: SlotNumbers, tokens: SlotTokens, slot: Int32Column, position: Int32Column
    ) -> None:
        self._numbers = numbers
        self._tokens = tokens
        self._slot = slot
        self._position = position

    def __len__(self) -> int:
        return len(self._slot)

    def __getitem__(self, label: str) -> Tensor:
        if label not in self._numbers.labels:
            raise KeyError(
                f"no metadata type has the label {label!r}: request_metadata_types may have it; "
                f"there are {', '.join(self._numbers.labels)}"
            )
        return self._numbers.rows(label, self._slot)

    @property
    def num_tokens(self) -> Tensor:
        """Number of tokens of each row so far, prompt included, int64 ``[R]`` on the host."""
        return torch.from_numpy(self._position.astype(np.int64))

    def tokens(self) -> Tensor:
        """
        Return each row's tokens so far, int32 ``[R, L]`` on the device, L being the largest of
        `num_tokens`; after its own a row has arbitrary tokens.
        """
        return self._tokens.histories(self._slot, int(self._position.max()))


HookFunction = Callable[[Tensor, DrawnRows], Tensor | None]
"""
Function of the logits ``[R, V]`` and their rows. It returns other logits of this shape, or None
after it changed them in place or not at all.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsHook:
    """
    A hook, and the metadata types whose numbers it reads.

    It is called for every row that draws, before all edits and sampling parameters, so that log
    probabilities of drawn tokens are those of its logits; prompts are scored without it. A row's
    tokens depend on nothing else in the batch only if its logits do not either.
    """

    call: HookFunction
    types: tuple[MetadataType, ...]

    def changed(self, logits: Tensor, rows: DrawnRows) -> Tensor:
        """
        Return the logits that the hook makes of these.

        Raises:
            ValueError: It returned anything but logits of the same shape and device, or None.
        """
        found = self.call(logits, rows)
        if found is None:
            return logits
        if (
            not isinstance(found, Tensor)
            or not found.is_floating_point()
            or found.shape != logits.shape
            or found.device != logits.device
        ):
            what = type(found).__name__
            if isinstance(found, Tensor):
                what = f"{found.dtype} {list(found.shape)} on {found.device}"
            raise ValueError(
                f"logits_hook must return floating logits of shape {list(logits.shape)} on "
                f"{logits.device}, or None, got {what}"
            )
        return found.contiguous()
