"""The features of the sampler that the rows of a batch need together."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.sampling.columns import SamplingColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """
    Features that some row of a batch needs; kernels for other features are not launched.

    Attributes:
        noise: Some row is not greedy.
        top_k: Some row that is not greedy has a top_k from 1 to below the vocabulary's size.
        top_p: Some row that is not greedy has a top_p below 1.
        min_p: Some row that is not greedy has a min_p above 0.
    """

    noise: bool = True
    top_k: bool = True
    top_p: bool = True
    min_p: bool = True

    @classmethod
    def of(cls, columns: SamplingColumns, vocab_size: int) -> Needs:
        """Find the needs of columns on the host; on a device need all, so as not to wait for it."""
        if columns.temperature.device.type != "cpu":
            return cls(min_p=columns.min_p is not None)
        noisy = ~columns.is_greedy
        cuts = (columns.top_k > 0) & (columns.top_k < vocab_size)
        return cls(
            noise=bool(noisy.any()),
            top_k=bool((noisy & cuts).any()),
            top_p=bool((noisy & (columns.top_p < 1)).any()),
            min_p=columns.min_p is not None and bool((noisy & (columns.min_p > 0)).any()),
        )
