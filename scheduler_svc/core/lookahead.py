"""
Lookahead: the number of steps that may be in flight.

It is large enough that the executor never waits for the scheduler, and small enough that a new
request does not wait for steps that were sent before it arrived.

The executor computes a step while the result of the step before travels, which hides the
scheduler's time. Two steps in flight are enough where a step takes longer than that time; shorter
steps need more. More are sent only where they delay no request: no request waits, drains, is paused
or has a prompt left to compute, so no result in flight could make room for one; there are blocks
for every decode to go on meanwhile; and an abort still takes effect within milliseconds. A request
that ends by its length is planned up to that length and no further, however many steps are in
flight.

Of an executor with N pipeline stages, `window` steps of each of its lanes may be in flight: of all
N while there are prompts to compute, which need no lane, else of those in which requests decode. So
whatever a request held is free at most N x `window` + 1 steps after its end, or
`run_ahead` + 1 where that is more.

After an executor has died, one step at a time is sent until the requests that may have caused it
have made progress (see `suspects`): with several in flight it is not always known in which one it
died. Of several executors this is so for the one that runs these requests (`quarantine`).

Source: SGLang's overlap scheduler and vLLM's async scheduling plan one step ahead; ours plans as
far ahead as `run_ahead` says.
"""

from __future__ import annotations

from scheduler_svc.core.state.replica import Replica

SHORT_STEP_S = 0.005
"""Seconds; more than `window` steps may be in flight only where steps are shorter than this."""


def lookahead(replica: Replica, usual_step_s: float) -> int:
    """
    Return how many steps may be in flight now, at most `SentSteps.most_in_flight`; its time does
    not depend on the numbers of rows and requests.

    Args:
        replica: The executor.
        usual_step_s: Seconds that a step usually takes; 0 while that is not known.
    """
    cell = replica.cell
    if cell.suspects.is_cautious(replica.slots.replica):
        return 1
    options = cell.options
    window, ahead = options.window, options.run_ahead
    if replica.limits.num_stages > 1:
        window *= _num_lanes(replica)
    if ahead <= window or not 0.0 < usual_step_s < SHORT_STEP_S:
        return window
    slots = replica.slots
    num_decoding = slots.num_decoding
    is_quiet = (
        num_decoding == slots.num_running  # no prompt under way and no row paused
        and not cell.queue
        and not replica.draining
        and not slots.has_vacated()
    )
    if not is_quiet:
        return window
    num_blocks = num_decoding * replica.limits.blocks_for(ahead)
    return ahead if num_blocks <= replica.kv.pool.num_available else window


def _num_lanes(replica: Replica) -> int:
    """Return how many lanes steps may be planned of: of all while there are prompts to compute."""
    slots = replica.slots
    has_prompts = slots.num_running > slots.num_decoding + len(replica.paused)
    if has_prompts or replica.cell.queue:
        return slots.num_lanes()
    return max(slots.num_busy_lanes(), 1)
