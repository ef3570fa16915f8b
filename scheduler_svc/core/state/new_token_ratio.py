"""
Share of the output they may still produce that running requests are expected to produce, and the
memory this leaves for new requests.

Source: SGLang 0.3.5. We differ where blocks differ from single tokens: a prompt's blocks are all
taken at its admission, so its charge is its whole uncached prompt even if only a chunk is computed;
a request that ran before is charged what it can still produce; and where no request runs this check
is left out, else a request that asks for all memory there is would wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.invariants import require
from scheduler_svc.core.slots.slots import SlotTable

INIT_RATIO = 0.7
MIN_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_STEPS = 20
"""Decode steps that must fit after a retraction, which thus frees more than is needed at once."""
CLIP_MAX_NEW_TOKENS = 4096
"""Most output tokens that one request is expected to have left."""


class NewTokenRatio:
    """
    Share of their remaining `max_tokens` that running requests are expected to use.

    It starts at `init`, falls linearly to `min` over 600 tokens of each request without a
    shortage, is set anew by each retraction, and goes back to `init` when no request is left. It is
    not updated step by step: its value follows from a count of decode steps that the caller keeps
    anyway.

    Args:
        conservativeness: At least 0; scales `init`, which is at most 1.
        num_lanes: Number of steps in a row that give each request one token together.

    Attributes:
        init: Value at the start.
        min: Value at which it stops falling, unless a retraction set it lower.
        decay: Amount by which it falls per decode step.
    """

    __slots__ = ("_since_step", "_start", "decay", "init", "min")

    def __init__(self, conservativeness: float, num_lanes: int = 1) -> None:
        self.init = min(INIT_RATIO * conservativeness, 1.0)
        self.min = min(self.init * MIN_FACTOR, 1.0)
        self.decay = (self.init - self.min) / (DECAY_STEPS * num_lanes)
        self._start = self.init
        self._since_step = 0

    def at(self, decode_step: int) -> float:
        """Return the value after this many decode steps since the core was made."""
        steps = max(decode_step - self._since_step, 0)
        return max(self._start - self.decay * steps, self.min) if steps else self._start

    def reset(self, decode_step: int) -> None:
        """Start over, as no request runs or waits."""
        self._start, self._since_step = self.init, decode_step

    def note_retraction(self, slots: SlotTable, decode_step: int) -> None:
        """
        Expect each survivor to produce 20 more tokens than it has produced so far.

        Args:
            slots: The slots; those that still run are the survivors.
            decode_step: Decode steps so far, the one that retracts included.
        """
        left = slots.running.nonzero()[0]
        generated = int((slots.tokens.known[left] - slots.admitted.prompt_len[left]).sum())
        max_new = int((slots.admitted.stop_len[left] - slots.admitted.prompt_len[left]).sum())
        expected = generated + RETRACT_STEPS * len(left)
        self._start = min(1.0, expected / max_new) if max_new else 1.0
        self._since_step = decode_step

    def check_integrity(self, decode_step: int) -> None:
        """
        Compare with the number of decode steps since the core was made.

        Raises:
            InternalError: The value is no share of anything, or begins behind the step that is
                planned next.
        """
        require(0.0 <= self.min <= self.init <= 1.0, "the new-token ratio falls to no share")
        require(0.0 <= self._start <= 1.0, "the new-token ratio is no share")
        require(self._since_step <= decode_step + 1, "the new-token ratio is that of a later step")


def lasts(free: int, left: NDArray[np.int64], held: NDArray[np.int64]) -> bool:
    """
    Return True when memory lasts while all requests produce what they have left, one token per
    step, and free what they hold and have produced as they end.

    Args:
        free: Tokens that free and evictable blocks hold.
        left: Tokens that each request will still produce, shape ``[N]``; 0 for one that may end at
            any time: it is left out, and counts as freeing no memory.
        held: Tokens that the blocks of each request hold now, shape ``[N]``.
    """
    left, held = left[left > 0], held[left > 0]
    order = left.argsort(kind="stable")
    left, held = left[order], held[order]
    freed = held.cumsum() - held
    num_going_on = np.arange(len(left), 0, -1)
    return bool((free + freed - left * num_going_on > 0).all())


@dataclass(slots=True)
class AdmissionBudget:
    """
    Memory that one step's plan leaves for new requests.

    `reserved` is the number of tokens that running requests are expected to need beyond the blocks
    they hold: ``sum(min(max_tokens - generated, 4096)) * ratio`` over those that ran before this
    step, and unscaled for those it admits.
    """

    reserved: float

    @classmethod
    def of(cls, slots: SlotTable, ratio: float) -> AdmissionBudget:
        """Make the reserve for all running requests, in time proportional to the slots."""
        left = slots.admitted.stop_len - slots.tokens.known
        expected = np.minimum(left, CLIP_MAX_NEW_TOKENS).sum(where=slots.running, dtype=np.int64)
        return cls(float(expected) * ratio)

    def fits(self, available: int, extend_len: int, max_new: int) -> bool:
        """
        Return True when a request may join the running ones.

        Args:
            available: Tokens that free and evictable blocks hold, less those of its cached prefix.
            extend_len: Its uncached tokens.
            max_new: Output tokens it can still produce.
        """
        charge = extend_len + min(max_new, CLIP_MAX_NEW_TOKENS)
        return charge < available - self.reserved

    def charge(self, max_new: int) -> None:
        """Reserve what an admitted request may produce, besides the blocks of its prompt."""
        self.reserved += min(max_new, CLIP_MAX_NEW_TOKENS)
