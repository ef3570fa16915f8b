"""Latencies that clients see: to the first token, and between tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.observe.stats import INTER_TOKEN_BOUNDS_S, TTFT_BOUNDS_S, Histogram
from scheduler_svc.core.request.request import Request


class Latencies:
    """
    Histograms of the time that tokens take, in seconds.

    Attributes:
        ttft_s: From a request's arrival to its first token.
        inter_token_s: Between successive tokens of a request.
    """

    __slots__ = ("inter_token_s", "ttft_s")

    def __init__(self) -> None:
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)

    def note_first_tokens(self, requests: Sequence[Request], now: float) -> None:
        """Note `now` as the time at which each of these requests produced its first token."""
        waits: NDArray[np.float64] = np.array([now - r.new.arrival_s for r in requests])
        self.ttft_s.observe(waits)
        for request in requests:
            request.times.note_first_token(now)
