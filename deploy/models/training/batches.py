"""Windows of the training stream in an order that a count of windows alone determines."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Batches:
    """
    Endless windows of a token stream; one pass visits every window once.

    Seed, window length and the number of the pass determine the order of a pass, so a run that
    stores ``taken`` resumes at exactly the window that it would have taken next.

    Args:
        stream: Token ids ``[N]``.
        seed: Seed of the order of windows.
        taken: Number of windows already taken, by window length; updated in place.
    """

    def __init__(self, stream: npt.NDArray[np.uint16], seed: int, taken: dict[int, int]) -> None:
        self._stream = stream
        self._seed = seed
        self.taken = taken
        self._orders: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    def take(self, length: int, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the next windows, both ``[count, length]`` int64."""
        rows = np.stack([self._next_window(length) for _ in range(count)])
        ids = torch.from_numpy(rows.astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def windows_per_pass(self, length: int) -> int:
        """Return the number of windows of ``length`` in a pass, the same for every pass."""
        return (len(self._stream) - 1) // length - 1

    def starts(self, length: int, number: int) -> npt.NDArray[np.int64]:
        """Return the start positions of the windows of pass ``number``, in the order taken."""
        random = np.random.default_rng([self._seed, length, number])
        offset = int(random.integers(length))
        order = random.permutation(self.windows_per_pass(length))
        return offset + order.astype(np.int64) * length

    def _next_window(self, length: int) -> npt.NDArray[np.uint16]:
        number, position = divmod(self.taken.get(length, 0), self.windows_per_pass(length))
        if self._orders.get(length, (-1,))[0] != number:
            self._orders[length] = (number, self.starts(length, number))
        start = int(self._orders[length][1][position])
        self.taken[length] = self.taken.get(length, 0) + 1
        return self._stream[start : start + length + 1]
