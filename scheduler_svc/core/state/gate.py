"""The gate through which an executor admits requests that wait, and its room for them."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.invariants import require
from scheduler_svc.core.routing.router import Router
from scheduler_svc.core.state.suspension import Suspension
from tandem.link.commands import KvMode


class AdmissionGate:
    """
    Reasons for which an executor admits no request, besides want of slots and blocks.

    The router is told of each change, as what it knows of the executor holds no longer.

    Attributes:
        is_away: True from the loss of the executor until a step is planned for the one in its
            place: it has nothing, and no request is left to it meanwhile.
        is_closing: True once no request is admitted any more, as the executor is to be given back.
        is_full: True when a request did not fit beside the running ones, so that none is admitted
            until a running or waiting request is gone.
        suspension: Suspension of steps that was asked for, and the one the executor was told of;
            others only read it.
    """

    __slots__ = ("_router", "is_away", "is_closing", "is_full", "suspension")

    def __init__(self, router: Router) -> None:
        self._router = router
        self.is_away = self.is_closing = False
        self.is_full = False
        self.suspension = Suspension()

    @property
    def takes_new(self) -> bool:
        """True while its executor is there and plans steps, so that requests may prefer it."""
        return not (self.is_away or self.is_closing or self.suspension.is_in_force)

    def note_away(self) -> None:
        """Note that the executor is lost; what it had is given up by `Replica.start_over`."""
        self._router.note_change()
        self.is_away = True

    def note_back(self) -> None:
        """Note that there is an executor again, which has nothing yet."""
        self._router.note_change()
        self.is_away = self.is_closing = False

    def close(self) -> None:
        """Admit no request any more; those that run go on."""
        self._router.note_change()
        self.is_closing = True

    def note_full(self, num_running: int) -> None:
        """
        Note that a waiting request does not fit, so that none is admitted until a request is gone:
        nothing else makes room, since running requests only take more blocks.
        """
        self._router.note_change()
        self.is_full = num_running > 0

    def reopen(self) -> None:
        """Let requests be admitted again, as one is gone, or came and may make others give way."""
        if self.is_full:
            self._router.note_change()
            self.is_full = False

    def suspend(self, mode: KvMode) -> None:
        """Ask for a suspension in this mode: no step is planned until its end."""
        self._router.note_change()
        self.suspension.begin(mode)

    def resume(self) -> None:
        """Ask for the end of the suspension, if there is one."""
        self._router.note_change()
        self.suspension.end()

    def note_suspended(self) -> None:
        """Note that the executor is told to suspend in the mode that was asked for."""
        self._router.note_change()
        self.suspension.note_told()

    def note_resumed(self) -> None:
        """Note that the executor is told to resume, or is another one, which knows of none."""
        self._router.note_change()
        self.suspension.note_resumed()

    def check_integrity(self, *, num_running: int, num_draining: int, num_live: int) -> None:
        """
        Compare with the numbers of running and draining requests and of live slots.

        Raises:
            InternalError: None runs and none may be admitted, or a request is where none can be.
        """
        self.suspension.check_integrity(num_live)
        require(num_running > 0 or not self.is_full, "none runs and none may be admitted")
        is_empty = num_running == 0 and num_draining == 0
        require(is_empty or not self.is_away, "an executor that is lost runs a request")


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
