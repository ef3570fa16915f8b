"""The 256 requests by which small engines compare themselves offline."""

from __future__ import annotations

import random
from dataclasses import dataclass

_LARGEST_ID = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRequests:
    """
    Prompts, and the number of output tokens of each.

    Lengths and ids are drawn in the order of nano-vllm's benchmark, so that its seed 0 gives the same
    133,966 output tokens that it publishes.
    """

    prompts: list[list[int]]
    output_len: list[int]

    @classmethod
    def draw(
        cls, num_requests: int, shortest: int, longest: int, vocab_size: int, seed: int = 0
    ) -> OfflineRequests:
        """Draw lengths of prompts and answers from `shortest` to `longest`."""
        source = random.Random(seed)
        largest = min(_LARGEST_ID, vocab_size - 1)
        prompts = [
            [source.randint(0, largest) for _ in range(source.randint(shortest, longest))]
            for _ in range(num_requests)
        ]
        return cls(
            prompts=prompts,
            output_len=[source.randint(shortest, longest) for _ in range(num_requests)],
        )

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(self.output_len)

    @property
    def longest(self) -> int:
        """Tokens of the longest request at its end."""
        return max(
            len(prompt) + output
            for prompt, output in zip(self.prompts, self.output_len, strict=True)
        )
