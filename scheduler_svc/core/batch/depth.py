"""
How many steps may be in flight: enough that the executor never waits for the scheduler, few enough
that whoever comes need not wait for steps that were sent before.

A step that is computed while the result of the one before travels hides the scheduler's time, so
two are enough where a step takes longer than that. Short steps need more of them. More are sent
only where nobody can be the worse for it: nobody waits, and no result in flight could make room for
somebody; every decode has the blocks that it needs meanwhile; and an abort still takes effect
within milliseconds. Who ends by its length is planned up to there and no further, however many are
in flight.

After the death of an executor one step at a time is sent until its requests have got on: with
several it is not always known which one it died in.

Source: SGLang's overlap scheduler and vLLM's async scheduling plan one step ahead; ours plans as
far ahead as is asked for.
"""

from __future__ import annotations

from scheduler_svc.core.state.state import CoreState

SHORT_STEP_S = 0.005
"""Only steps shorter than this are worth more than the window."""


def depth(state: CoreState, usual_step_s: float) -> int:
    """
    How many steps may be in flight now; takes the same time however many rows and requests there
    are.

    Args:
        state: The core.
        usual_step_s: Seconds that a step usually takes; 0 while that is not known.
    """
    suspects = state.suspects
    if suspects and (suspects.num_suspects or state.counters.steps < suspects.cautious_until):
        return 1
    options = state.options
    window, ahead = options.window, options.run_ahead
    if ahead <= window or not 0.0 < usual_step_s < SHORT_STEP_S:
        return window
    slots = state.slots
    num_decoding = slots.num_decoding
    is_quiet = (
        num_decoding == slots.num_running  # neither a prompt under way nor anybody paused
        and not state.queue
        and not state.draining
        and not slots.ended
    )
    if not is_quiet:
        return window
    num_blocks = num_decoding * state.limits.blocks_for(ahead)
    return ahead if num_blocks <= state.pool.num_available else window
