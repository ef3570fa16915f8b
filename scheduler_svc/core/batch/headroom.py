"""The check that blocks suffice for one more request, now and for all outputs still to come."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.new_token_ratio import CLIP_MAX_NEW_TOKENS, AdmissionBudget, lasts
from scheduler_svc.core.state.replica import Replica


class Headroom:
    """
    The blocks one step's plan may give to new requests.

    The expected need of running requests is summed up only for a request that passes all other
    checks, so a step that cannot admit does not pay for it. A `schedule_conservativeness` of 0
    turns that estimate off: a request that fits now is admitted, as in vLLM.

    A request without an EOS token will produce all its max_tokens. Without prefix caching its end
    frees all its blocks, so it is admitted if memory lasts while all requests run to their ends (as
    in SGLang 0.3.5): more of them fit than if each were charged for its full length beforehand.
    """

    __slots__ = ("_budget", "_replica")

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._budget: AdmissionBudget | None = None

    def fits(self, request: Request, num_blocks: int, extend_len: int, available: int) -> bool:
        """
        Return True when a request may take its blocks; where no request runs, it is enough that
        they are available.

        Args:
            request: The waiting request.
            num_blocks: Blocks it takes now, without those it shares.
            extend_len: Its tokens in these.
            available: Free or evictable blocks, without those it shares.
        """
        replica, slots = self._replica, self._replica.slots
        cell = replica.cell
        # One block is kept back for each row that may still grow: otherwise the new request would
        # be the next victim.
        if num_blocks + slots.num_may_grow() > available:
            return False
        if not slots.num_running or not cell.options.schedule_conservativeness:
            return True
        max_new = request.terms.stop_len - request.num_known
        if not request.new.eos_token_ids and not cell.options.prefix_caching:
            return self._lasts(num_blocks, max_new, available)
        return self._estimate().fits(available * replica.limits.block_size, extend_len, max_new)

    def charge(self, request: Request) -> None:
        """Reserve for a request that is being admitted; to be called before it has its slot."""
        if self._replica.cell.options.schedule_conservativeness:
            self._estimate().charge(request.terms.stop_len - request.num_known)

    def _lasts(self, num_blocks: int, max_new: int, available: int) -> bool:
        """
        Return True when memory lasts while this request, which takes so many blocks, and all
        running ones go on to their ends; a request with an EOS token counts up to its expected
        length.
        """
        replica, slots = self._replica, self._replica.slots
        ratio = replica.new_token_ratio
        running = slots.running.nonzero()[0]
        may_end = [bool(slots.request_of(slot).new.eos_token_ids) for slot in running.tolist()]
        generated = (slots.tokens.known - slots.admitted.prompt_len)[running]
        max_tokens = (slots.admitted.stop_len - slots.admitted.prompt_len)[running]
        expected = (max_tokens * np.where(may_end, ratio, 1.0)).astype(np.int64) - generated
        left = np.minimum(np.append(expected, max_new), CLIP_MAX_NEW_TOKENS)
        held = np.append(slots.blocks.num_blocks[running], num_blocks) * slots.blocks.block_size
        return lasts((available - num_blocks) * slots.blocks.block_size, left, held)

    def _estimate(self) -> AdmissionBudget:
        if self._budget is None:
            replica = self._replica
            ratio = replica.new_token_ratio
            self._budget = AdmissionBudget.of(replica.slots, ratio)
        return self._budget
