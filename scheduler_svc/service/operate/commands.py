"""Commands of operators: abort, flush, drain, suspend and resume, and a change of the executors."""

from __future__ import annotations

import structlog

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.request.tenant import NO_TENANT
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.ipc.snapshot import (
    SUSPEND_WAIT_S,
    AbortResult,
    DrainResult,
    ExecutorDrainResult,
    FlushResult,
    SuspendResult,
    decode_abort_argument,
    decode_drain_argument,
    decode_executor_argument,
    decode_suspend_argument,
)
from scheduler_svc.service.drain import Drain
from scheduler_svc.service.executors.members import Members, SuspensionWish
from scheduler_svc.service.executors.operations import ExecutorOperations
from scheduler_svc.service.operate.pending import Pending
from scheduler_svc.service.service_state import ServiceState
from tandem.errors import ExecutorLost, InvalidParameter, NoExecutor, RequestNotFound
from tandem.link.commands import KvMode

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

DRAINED_WITHIN_S = 5.0
"""Longest time after its grace in which an executor is given back; the next turn does it."""


class Commands:
    """
    Commands of operators; see `ipc.snapshot` for their arguments and results. Owned by the core
    loop.
    """

    def __init__(
        self, state: ServiceState, members: Members, drain: Drain, operations: ExecutorOperations
    ) -> None:
        self._state = state
        self._members = members
        self._drain = drain
        self._operations = operations

    def abort(self, argument: bytes, now: float) -> AbortResult:
        """End a live request of a tenant."""
        wanted, core = decode_abort_argument(argument), self._state.core
        request_id = wanted.request_id
        if core is None:
            raise RequestNotFound(
                f"no live request has the id {request_id!r}: nothing was accepted yet",
                field="request_id",
            )
        tenant = _tenant_of(request_id, core) if wanted.tenant is None else wanted.tenant
        ended = core.end_request(request_id, FinishReason.CANCELLED, now, tenant=tenant)
        _log.info("request_aborted", **ended.log_ids, tenant=tenant)
        return AbortResult()

    def flush(self, _argument: bytes, _now: float) -> FlushResult:
        """Empty the prefix cache."""
        core = self._state.core
        freed = 0 if core is None else core.flush_prefix_cache()
        _log.info("prefix_cache_flushed", freed_blocks=freed)
        return FlushResult(freed_blocks=freed)

    def drain(self, argument: bytes, now: float) -> Pending:
        """Drain the service: refuse new requests, and hand over what is left after the grace."""
        grace_s = decode_drain_argument(argument).grace_s
        num_before = self._drain.num_handed_over
        self._drain.begin(grace_s, now, asked_by="operator")
        return Pending(
            until_s=now + grace_s,
            is_done=lambda: self._drain.is_over,
            result=lambda: DrainResult(remaining_requests=self._num_left(num_before)),
        )

    def suspend(self, argument: bytes, now: float) -> Pending:
        """Suspend all executors, those that attach later too."""
        mode, core = KvMode(decode_suspend_argument(argument).kv_mode), self._state.core
        members = self._members
        if core is None or not members.is_attached:
            raise NoExecutor("no executor is attached that could be suspended: try again later")
        if not members.is_suspended:
            _log.info("suspending", kv_mode=mode.name, requests=core.num_requests)
        return self._obeyed(now, members.suspend(mode, now))

    def resume(self, _argument: bytes, now: float) -> Pending:
        """Resume all executors."""
        members = self._members
        if members.is_suspended:
            _log.info("resuming", requests=self._state.num_requests)
        members.resume()
        return self._obeyed(now)

    def add_executor(self, argument: bytes, now: float) -> None:
        """Name another executor."""
        self._operations.add(decode_executor_argument(argument).address, now)

    def remove_executor(self, argument: bytes, now: float) -> None:
        """Forget an executor."""
        self._operations.remove(decode_executor_argument(argument).address, now)

    def drain_executor(self, argument: bytes, now: float) -> Pending:
        """Move the requests of an executor to others, and give it back."""
        wanted = decode_executor_argument(argument)
        member = self._operations.begin_drain(wanted.address, wanted.grace_s, now)
        return Pending(
            until_s=now + wanted.grace_s + DRAINED_WITHIN_S,
            is_done=lambda: member.is_drained,
            result=lambda: ExecutorDrainResult(member.num_moved),
        )

    def _num_left(self, num_handed_over_before: int) -> int:
        """
        Return the number of choices that were handed over since the query; those still live, if a
        later drain has lengthened the grace time.
        """
        if self._drain.is_over:
            return self._drain.num_handed_over - num_handed_over_before
        return self._state.num_requests

    def _obeyed(self, now: float, wish: SuspensionWish | None = None) -> Pending:
        return Pending(
            until_s=now + SUSPEND_WAIT_S,
            is_done=lambda: self._members.has_obeyed or _is_refused(wish),
            result=lambda: self._suspend_result(wish),
        )

    def _suspend_result(self, wish: SuspensionWish | None) -> SuspendResult:
        if wish is not None and wish.refused is not None:
            raise wish.refused
        if not self._members.has_obeyed:
            raise ExecutorLost(
                f"the executor has not answered for {SUSPEND_WAIT_S:g} s; what was asked for stays "
                "asked for"
            )
        return SuspendResult(self._members.device_memory_bytes)


def _is_refused(wish: SuspensionWish | None) -> bool:
    return wish is not None and wish.refused is not None


def _tenant_of(request_id: str, core: Scheduler) -> str:
    """
    Return the tenant of the live request with an id; no tenant if there is no such request.

    Raises:
        InvalidParameter: Several tenants have one.
    """
    tenants = {row.tenant for row in core.list_requests() if row.request_id == request_id}
    if len(tenants) > 1:
        raise InvalidParameter(
            f"{len(tenants)} tenants have a live request with the id {request_id!r}: name one.",
            field="tenant",
        )
    return next(iter(tenants), NO_TENANT)
