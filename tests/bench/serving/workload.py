"""The requests that every contestant serves: fixed lengths, random ids, no early end."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`num_requests` prompts of `input_len` random ids, `output_len` greedy tokens each, `concurrency` at once."""

    num_requests: int
    concurrency: int
    input_len: int
    output_len: int
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids of every prompt; low ids are left out because special tokens live there."""
        source = random.Random(self.seed)
        return [
            [source.randrange(16, vocab_size) for _ in range(self.input_len)]
            for _ in range(self.num_requests)
        ]

    @property
    def output_tokens(self) -> int:
        """Tokens that a complete run produces."""
        return self.num_requests * self.output_len
