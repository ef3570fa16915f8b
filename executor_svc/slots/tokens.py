"""The tokens of each slot, on the device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.device.upload import upload
from executor_svc.parallel.pipeline import Arrival
from kernels.transfer import to_device
from tandem.link.batch import Admission, Int32Column

_NEVER = np.iinfo(np.int32).max


@dataclass(slots=True, eq=False)
class _LateTokens:
    """
    Tokens that another stage sampled.

    Attributes:
        place: int64 ``[R]``, their places in the histories.
        token: int ``[R]``, the tokens once they have arrived; below 0 where not valid.
        is_open: bool ``[R]``, False where a later admission has written the place.
        arrival: Waits for them.
    """

    place: NDArray[np.int64]
    token: Tensor
    is_open: NDArray[np.bool_]
    arrival: Arrival


class SlotTokens:
    """
    Token history by slot; owned by the runner.

    Histories live in one device tensor ``[num_slots, max_model_len + 1]``: tokens of an admission
    are written once, and sampled tokens by the step that sampled them, so a decode's input never
    comes from the scheduler. The last column takes the token sampled after a sequence of full
    length and is never read.

    Tokens that another stage samples are written when a place of theirs is read, which may wait for
    them, or once they are there: histories read as if each had been written in its step.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, vocab_size: int, device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._stride = max_model_len + 1
        self._device = device
        self._history = torch.zeros(num_slots * self._stride, dtype=torch.int32, device=device)
        self._first_bad = np.full(num_slots, _NEVER, np.int32)
        self._late: deque[_LateTokens] = deque()

    @property
    def history(self) -> Tensor:
        """
        All histories, int32 ``[num_slots, max_model_len + 1]`` on the device; it never moves. Late
        tokens may be missing.
        """
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
        for late in self._late:
            late.is_open &= (late.place < first) | (late.place >= first + len(own))
        self._history[first : first + len(own)] = to_device(torch.from_numpy(own), self._device)

    def gather(self, slot: Int32Column, position: NDArray[np.int64]) -> Tensor:
        """Return the tokens at positions of slots, int32 ``[T]`` on the device."""
        place = slot.astype(np.int64) * self._stride + position
        self._settle_for(place)
        return self._history.index_select(0, upload(place, self._device))

    def histories(self, slot: Int32Column, length: int) -> Tensor:
        """
        Return the first `length` tokens of slots, int32 ``[R, length]`` on the device; a shorter
        sequence is followed by arbitrary tokens of the vocabulary.
        """
        while self._late:
            self._settle_first()
        by_slot = self.history[:, :length]
        return by_slot.index_select(0, upload(slot, self._device))

    def write(self, slot: Int32Column, position: Int32Column, token: Tensor) -> None:
        """Record sampled tokens ``[R]`` at positions of slots."""
        place = slot.astype(np.int64) * self._stride + position
        self._history[upload(place, self._device)] = token.to(torch.int32)

    def write_late(
        self, slot: Int32Column, position: Int32Column, token: Tensor, arrival: Arrival
    ) -> None:
        """As `write`, of tokens that are on their way and below 0 where not valid."""
        place = slot.astype(np.int64) * self._stride + position
        self._late.append(_LateTokens(place, token, np.ones(len(place), np.bool_), arrival))
        while self._late and self._late[0].arrival.is_here:
            self._settle_first()

    def has_bad_input(self, slot: Int32Column, end: Int32Column) -> NDArray[np.bool_]:
        """
        Tell which slots have a computed token outside the vocabulary before position `end`, bool
        ``[R]``.
        """
        return self._first_bad[slot] < end

    def _settle_for(self, place: NDArray[np.int64]) -> None:
        """Write late tokens in their order, up to the last that have one of these places."""
        needed = (
            count for count, late in enumerate(self._late, 1) if np.isin(late.place, place).any()
        )
        for _ in range(max(needed, default=0)):
            self._settle_first()

    def _settle_first(self) -> None:
        late = self._late.popleft()
        late.arrival.wait()
        place, token = late.place, late.token.clamp(min=0)
        if not late.is_open.all():
            rows = late.is_open.nonzero()[0]
            place, token = place[rows], token.index_select(0, upload(rows, self._device))
        self._history[upload(place, self._device)] = token
