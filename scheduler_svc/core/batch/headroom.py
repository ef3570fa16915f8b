"""Whether blocks are there for one more request, now and for what all will still produce."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.new_token_ratio import CLIP_MAX_NEW_TOKENS, AdmissionBudget, lasts
from scheduler_svc.core.state.state import CoreState


class Headroom:
    """
    The blocks one step's plan may give to new requests.

    What running requests are expected to need is summed up when a request would else be admitted,
    so a step that cannot admit does not pay for it. A `schedule_conservativeness` of 0 turns that
    estimate off: what fits now is admitted, as in vLLM.

    Who has no EOS will produce what it may. Where no prefixes are cached, so that its end frees all
    it holds, it is admitted if memory lasts while everybody goes on to the end (as in SGLang
    0.3.5): more of them fit than if each were charged for its end beforehand.
    """

    __slots__ = ("_budget", "_state")

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._budget: AdmissionBudget | None = None

    def fits(self, request: Request, num_blocks: int, extend_len: int, available: int) -> bool:
        """
        Say whether a request may take its blocks; where nothing runs it may if they are there.

        Args:
            request: Who waits.
            num_blocks: Blocks it takes now; those it shares are none of them.
            extend_len: Its tokens in these.
            available: Blocks free or evictable, but for those it shares.
        """
        state, slots = self._state, self._state.slots
        # One block kept back for each row that may still grow: else the newcomer is the next
        # victim.
        if num_blocks + slots.num_may_grow() > available:
            return False
        if not slots.num_running or not state.options.schedule_conservativeness:
            return True
        max_new = request.stop_len - request.num_known
        if not request.new.eos_token_ids and not state.options.prefix_caching:
            return self._lasts(num_blocks, max_new, available)
        return self._estimate().fits(available * state.limits.block_size, extend_len, max_new)

    def charge(self, request: Request) -> None:
        """A request is being admitted; call it before it has its slot."""
        if self._state.options.schedule_conservativeness:
            self._estimate().charge(request.stop_len - request.num_known)

    def _lasts(self, num_blocks: int, max_new: int, available: int) -> bool:
        """
        True when memory lasts if a request that takes so many blocks and all that run go on; those
        with an EOS as far as is expected of them.
        """
        state, slots = self._state, self._state.slots
        ratio = state.ratio.at(state.counters.decode_steps)
        running = slots.running.nonzero()[0]
        may_end = [bool(slots.request_of(slot).new.eos_token_ids) for slot in running.tolist()]
        generated = (slots.known - slots.prompt_len)[running]
        max_tokens = (slots.stop_len - slots.prompt_len)[running]
        expected = (max_tokens * np.where(may_end, ratio, 1.0)).astype(np.int64) - generated
        left = np.minimum(np.append(expected, max_new), CLIP_MAX_NEW_TOKENS)
        held = np.append(slots.num_blocks[running], num_blocks) * slots.block_size
        return lasts((available - num_blocks) * slots.block_size, left, held)

    def _estimate(self) -> AdmissionBudget:
        if self._budget is None:
            state = self._state
            ratio = state.ratio.at(state.counters.decode_steps)
            self._budget = AdmissionBudget.of(state.slots, ratio)
        return self._budget
