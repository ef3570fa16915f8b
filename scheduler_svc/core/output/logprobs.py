"""Output processing of log probabilities."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.events import TokenLogprobs
from scheduler_svc.core.state.replica import Replica
from tandem.link.logprobs import LogprobColumns
from tandem.link.results import StepResult


def note_logprobs(
    replica: Replica,
    result: StepResult,
    columns: LogprobColumns,
    late: NDArray[np.intp] | None = None,
) -> None:
    """
    Add the log probabilities of the tokens that a result is about to append to the core's events.

    Args:
        replica: The executor, before the tokens are appended, as these may end their requests.
        result: The result, already checked.
        columns: Its log probabilities.
        late: Rows of the result for requests that no longer run in their slots, shape ``[L]``; None
            where all do. Requests that have ended get no log probabilities.
    """
    row = columns.row
    slot, slots = result.slot[row], replica.slots
    handle = slots.admitted.handle[slot]
    offset = result.position[row] - slots.admitted.prompt_len[slot]
    kept = np.ones(len(row), np.bool_)
    late_entries = [] if late is None else np.isin(row, late).nonzero()[0].tolist()
    for entry in late_entries:
        key = (int(slot[entry]), int(result.generation[row[entry]]))
        request = replica.draining.get(key)
        if request is None:
            kept[entry] = False
        else:
            handle[entry], offset[entry] = request.new.handle, len(request.outputs)
    if not kept.all():
        handle, offset, columns = handle[kept], offset[kept], columns.select(kept)
    replica.cell.events.add_logprobs(TokenLogprobs(handle=handle, offset=offset, columns=columns))
