"""Output processing of the log probabilities of prompt tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scheduler_svc.core.request.events import TokenLogprobs
from scheduler_svc.core.request.request import FinishReason, Request
from scheduler_svc.core.state.ends import finish
from scheduler_svc.core.state.replica import Replica
from tandem.errors import SessionLost
from tandem.link.logprobs import PromptLogprobColumns


def note_prompt_logprobs(replica: Replica, told: PromptLogprobColumns) -> None:
    """
    Add the log probabilities of prompt tokens to the core's events, each token's once: those that
    were reported before the request was computed again are dropped, as are those of requests that
    have ended.

    Raises:
        SessionLost: They are not those of the next prompt tokens; nothing was changed then.
    """
    rows = list(_rows_of(replica, told))
    cell = replica.cell
    kept = np.zeros(len(told), np.bool_)
    handle, offset = np.zeros(len(told), np.int64), np.zeros(len(told), np.int32)
    for request, first, end in rows:
        new = slice(first + request.scoring.next_position - int(told.position[first]), end)
        kept[new] = True
        handle[new] = request.new.handle
        offset[new] = told.position[new] - request.prompt_len
        request.scoring.note_told(int(told.position[end - 1]))
    if not kept.any():
        return
    told = told.select(kept)
    cell.telemetry.counters.compute.scored_prompt_tokens += len(told)
    cell.events.add_logprobs(
        TokenLogprobs(
            handle=handle[kept], offset=offset[kept], columns=told.columns, rank=told.rank
        )
    )


def finish_if_scored(replica: Replica, request: Request, num_computed: int, now: float) -> bool:
    """
    Finish a request that produces no output once its whole prompt is computed; return True if it
    was finished.
    """
    if request.produces or num_computed < request.prompt_len:
        return False
    finish(replica.cell, request, FinishReason.MAX_TOKENS, now)
    return True


def _rows_of(replica: Replica, told: PromptLogprobColumns) -> Iterator[tuple[Request, int, int]]:
    """Yield each live request with its range of entries, of which some may be new."""
    keys = told.slot.astype(np.int64) << 32 | told.generation
    starts = np.flatnonzero(np.diff(keys, prepend=-1)).tolist()
    for first, end in zip(starts, [*starts[1:], len(told)], strict=True):
        request = replica.request_at(int(told.slot[first]), int(told.generation[first]))
        if request is None:
            continue
        position = told.position[first:end]
        follows = np.array_equal(position, np.arange(position[0], position[0] + len(position)))
        least, most = 1, request.scoring.next_position
        if not follows or not least <= position[0] <= most or position[-1] >= request.prompt_len:
            message = (
                f"log probabilities of the prompt tokens {position[0]} to {position[-1]} of slot "
                f"{told.slot[first]}, expected position {most} of {request.prompt_len} next"
            )
            raise SessionLost(message)
        if position[-1] >= most:
            yield request, first, end
