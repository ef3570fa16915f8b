"""The tokens of each slot, on the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.device.upload import upload
from kernels.transfer import to_device
from tandem.link.batch import Admission, Int32Column

_NEVER = np.iinfo(np.int32).max


class SlotTokens:
    """
    Token history by slot; owned by the runner.

    Histories live in one device tensor ``[num_slots, max_model_len + 1]``: tokens of an admission
    are written once, and sampled tokens by the step that sampled them, so a decode's input never
    comes from the scheduler. The last column takes the token sampled after a sequence of full
    length and is never read.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, vocab_size: int, device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._stride = max_model_len + 1
        self._device = device
        self._history = torch.zeros(num_slots * self._stride, dtype=torch.int32, device=device)
        self._first_bad = np.full(num_slots, _NEVER, np.int32)

    @property
    def history(self) -> Tensor:
        """All histories, int32 ``[num_slots, max_model_len + 1]`` on the device; it never moves."""
        return self._history.view(-1, self._stride)

    def admit(self, admission: Admission) -> None:
        """Take over a slot; note tokens outside the vocabulary and replace them by 0."""
        slot, tokens = admission.slot, admission.token_ids
        is_outside = (tokens < 0) | (tokens >= self._vocab_size)
        bad = np.flatnonzero(is_outside)
        if len(bad):
            tokens = np.where(is_outside, 0, tokens)
            bad = bad[bad >= admission.num_cached_tokens]
        self._first_bad[slot] = bad[0] if len(bad) else _NEVER
        first = slot * self._stride
        own = np.array(tokens, np.int32)  # a copy: columns decoded from the wire are read-only
        self._history[first : first + len(own)] = to_device(torch.from_numpy(own), self._device)

    def gather(self, slot: Int32Column, position: NDArray[np.int64]) -> Tensor:
        """Return the tokens at positions of slots, int32 ``[T]`` on the device."""
        place = slot.astype(np.int64) * self._stride + position
        return self._history.index_select(0, upload(place, self._device))

    def histories(self, slot: Int32Column, length: int) -> Tensor:
        """
        Return the first `length` tokens of slots, int32 ``[R, length]`` on the device; a shorter
        sequence is followed by arbitrary tokens of the vocabulary.
        """
        by_slot = self.history[:, :length]
        return by_slot.index_select(0, upload(slot, self._device))

    def write(self, slot: Int32Column, position: Int32Column, token: Tensor) -> None:
        """Record sampled tokens ``[R]`` at positions of slots."""
        place = slot.astype(np.int64) * self._stride + position
        self._history[upload(place, self._device)] = token.to(torch.int32)

    def has_bad_input(self, slot: Int32Column, end: Int32Column) -> NDArray[np.bool_]:
        """
        Tell which slots have a computed token outside the vocabulary before position `end`, bool
        ``[R]``.
        """
        return self._first_bad[slot] < end
