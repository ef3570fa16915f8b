"""One request of a workload, and the protocol of a workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tandem.link.batch import Int32Column
from tandem_simulator.executor.model_tokens import FIRST_ID, VOCAB_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """
    One request to send.

    Attributes:
        arrival_s: Time of its arrival, seconds on the virtual clock.
        prompt: Token ids, shape ``[P]``.
        output_len: Tokens after which the model ends it, EOS included.
        max_tokens: Tokens that it asks for; it gets the smaller of both numbers.
        priority: Priority; lower goes first.
        tenant: Name of its tenant.
        cache_salt: Salt of the prefix cache; only requests with the same salt share KV.
        num_choices: Completions of the prompt (parallel sampling).
        timeout_s: Seconds from its arrival to its deadline; None for none.
        conversation: Number of its conversation; -1 for none.
        turn: Turn within the conversation, from 0.
        branch: Branch of the conversation after its first turn, from 0.
    """

    arrival_s: float
    prompt: Int32Column
    output_len: int
    max_tokens: int
    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    num_choices: int = 1
    timeout_s: float | None = None
    conversation: int = -1
    turn: int = 0
    branch: int = 0


class Requests(Protocol):
    """Source of requests; the same arguments always give the same requests."""

    @property
    def max_handles(self) -> int:
        """Most completions that it can ask for, all choices counted."""

    def opening(self) -> Iterator[Ask]:
        """Return the requests that depend on no others, in order of arrival."""

    def follow(self, ask: Ask, outputs: Int32Column, now: float) -> list[Ask]:
        """Return the requests that follow the end of `ask`, given its outputs."""


_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def random_ids(seed: int, kind: int, number: int, count: int) -> Int32Column:
    """
    Return token ids, shape ``[count]``: a pure function of the arguments.

    A shorter count gives the beginning of a longer one. Source: splitmix64's finaliser over a
    counter.
    """
    start = ((seed * 1_000_003 + kind) * 0xD1342543DE82EF95 + number * 0xF1357AEA2E62A9C5) & _WORD
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(start)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    ids: Int32Column = (FIRST_ID + mixed % np.uint64(VOCAB_SIZE - FIRST_ID)).astype(np.int32)
    return ids
