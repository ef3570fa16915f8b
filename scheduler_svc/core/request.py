"""What the core knows of a request, from submission to its end."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tandem.link.batch import Int32Column, RowSampling


class FinishReason(enum.IntEnum):
    """Why a choice ended; numbers are those of `tandem.common.v1.FinishReason`."""

    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    MAX_TOKENS = 4
    CONTEXT_LIMIT = 5
    DEADLINE = 6
    CANCELLED = 7


class RequestState(enum.Enum):
    """
    Where a request is; it is in exactly one state.

    Legal moves: WAITING to PREFILL, PREFILL to DECODE, PREFILL or DECODE to DRAINING (preempted,
    results still in flight) or straight to WAITING (preempted, none in flight), DRAINING to
    WAITING, and any of them to ENDED.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """
    One accepted-to-be request, validated and resolved by whoever submits it.

    Attributes:
        request_id: Unique among live requests.
        handle: The submitter's number for this request; the core returns it with every event.
            int64, at least 0.
        prompt: Token ids, shape ``[P]``, P at least 1.
        sampling: Resolved parameters.
        max_tokens: Most output tokens, at least 1.
        eos_token_ids: Ids that end it with EOS; empty under ignore_eos.
        stop_token_ids: Ids that end it with STOP_TOKEN.
        arrival_s: When it arrived, on the clock the core is driven with.
        deadline_s: When it ends with DEADLINE, same clock; None for never.
    """

    request_id: str
    handle: int
    prompt: Int32Column
    sampling: RowSampling
    max_tokens: int
    arrival_s: float
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    deadline_s: float | None = None
