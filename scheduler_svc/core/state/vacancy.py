"""Room of an executor for requests that wait, as of one moment of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vacancy:
    """
    Room of an executor for requests that wait, without what depends on the request: one plan asks
    about many of them, and only its own executor changes meanwhile.

    Attributes:
        num_requests: Most requests that could be admitted, at least 1.
        num_blocks: KV blocks that could be taken for them.
        num_tokens: About how many tokens are computed before theirs, in time for prompt tokens:
            those of prompts under way, and for running requests and full memory up to a step each.
        tokens_each: How much `num_tokens` grows by each request that is admitted first, besides its
            own tokens.
        prefill_s: Seconds per prompt token.
    """

    num_requests: int
    num_blocks: int
    num_tokens: float
    tokens_each: float
    prefill_s: float

    def before_s(self, num_more: int, more_tokens: int) -> float:
        """
        Return about how many seconds pass here before a request's own tokens are computed.

        Args:
            num_more: Requests that are about to be admitted before it.
            more_tokens: Their tokens.
        """
        return (self.num_tokens + num_more * self.tokens_each + more_tokens) * self.prefill_s
