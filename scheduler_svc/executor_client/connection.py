"""
Opening of sessions: the order in which executors are tried, and the checks that they must pass.

    Describe ──▶ may it be used? ──▶ GetTokenizer, once per model ──▶ OpenSession ──▶ SessionOpened

Each address is tried once per round; a silent one does not hold up the others (see `probe`). The
wait between rounds grows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from scheduler_svc.executor_client.channel import ExecutorAccess, stub_on
from scheduler_svc.executor_client.claims import Claim, Claims
from scheduler_svc.executor_client.description import ExecutorDescription, read_description
from scheduler_svc.executor_client.link_events import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    ConnectFailed,
    LinkEvent,
    PathFound,
    SessionOpened,
    backoff_s,
)
from scheduler_svc.executor_client.model_cache import ModelCache
from scheduler_svc.executor_client.probe import Answer, ExecutorProbe
from tandem.errors import (
    IncompatibleExecutor,
    ModelChanged,
    SessionHeld,
    SessionLost,
    TandemError,
)
from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.executor.v1 import session_pb2
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.link import PROTOCOL_VERSION
from tandem.link.session import SchedulerId
from tandem.status import from_rpc_error

DESCRIBE_DEADLINE_S = 5.0
SEEK_DEADLINE_S = 2.0
"""Deadline of a Describe by `seek`; short, as the session may come back where it was meanwhile."""
OPEN_DEADLINE_S = 15.0
"""
Deadline of OpenSession, which waits for the executor's running step; it is safe to repeat a call
that timed out.
"""
TOKENIZER_DEADLINE_S = 120.0
SHORTEST_LEASE_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInUse:
    """
    Model that live requests began with, or that other executors serve; only an executor of this
    one can join. Where others serve, its type of numbers and its blocks must be theirs too, so that
    a request has the same tokens wherever it runs.
    """

    fingerprint: str
    name: str
    dtype: str | None = None
    block_size: int | None = None


class ExecutorConnector:
    """
    Opener of sessions. `require` may be called from any thread; all else belongs to the link's
    thread.

    Attributes:
        address: Address at which the newest session's executor was last reached; the first of all
            addresses before any session.
        access: Way to executors; any thread may use it.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        *,
        scheduler: SchedulerId,
        lease_ms: int,
        take_over: bool,
        cache: ModelCache,
        accept: Callable[[ExecutorDescription], object],
        access: ExecutorAccess | None = None,
        claims: Claims | None = None,
    ) -> None:
        """
        Args:
            addresses: host:port or unix:PATH of each executor, at least one, preferred ones first.
            scheduler: Id of this scheduler.
            lease_ms: Milliseconds of silence after which another scheduler may open a session.
            take_over: Fence the scheduler that holds the executor when the first session is opened;
                not for later sessions.
            cache: Stores tokenizer files.
            accept: Raises IncompatibleExecutor for an executor that must not be used; called before
                a session is opened.
            access: Way to executors; None for plain text and no token.
            claims: Executors that other links of this scheduler have; None without others.
        """
        self.access = ExecutorAccess() if access is None else access
        self._claims = Claims() if claims is None else claims
        self._addresses = addresses
        self._scheduler = scheduler
        self._lease_ms = lease_ms
        self._may_take_over = take_over
        self._cache = cache
        self._accept = accept
        self._in_use: ModelInUse | None = None
        self._boot_id = ""
        """Boot id of the last session's executor; empty before the first session."""
        self.address = addresses[0]

    def require(self, model: ModelInUse | None) -> None:
        """Accept only executors with this model from now on; None for any."""
        self._in_use = model

    def give_up(self) -> None:
        """Let other links of this scheduler have the executor of the last session."""
        self._claims.drop(self)

    def connect(
        self, post: Callable[[LinkEvent], None], stopping: threading.Event, *, elsewhere: bool
    ) -> None:
        """
        Try all addresses until one opens a session or `stopping` is set.

        Args:
            post: Takes each ConnectFailed, and at the end the SessionOpened.
            stopping: Ends the attempts once it is set.
            elsewhere: Try the address of the last session last instead of first.
        """
        num_rounds = 0
        while not stopping.is_set():
            order = self._in_turn(elsewhere=elsewhere)
            waits: list[float] = []
            with ExecutorProbe(order, deadline_s=DESCRIBE_DEADLINE_S, access=self.access) as probe:
                for answer in probe.answers():
                    failed = self._try(answer, post)
                    if failed is None or stopping.is_set():
                        return
                    waits.append(self._wait_after(failed.error, num_rounds + 1))
                    retry_in_s = min(waits) if len(waits) == len(order) else 0.0
                    post(_retrying(failed, retry_in_s))
            num_rounds += 1
            stopping.wait(min(waits))

    def seek(self, post: Callable[[LinkEvent], None], *, may_move: bool) -> None:
        """
        Ask once at all addresses but that of the last session, all at the same time.

        Args:
            post: Takes a PathFound if the last session's executor answers at one of them; else,
                with `may_move`, each failure to open a session with another one, and the session.
            may_move: Open a session with another executor if the last session's was not found.
        """
        others = [one for one in self._in_turn(elsewhere=True) if one != self.address]
        with ExecutorProbe(others, deadline_s=SEEK_DEADLINE_S, access=self.access) as probe:
            answers = probe.first_answers()
            for answer in answers:
                if answer.boot_id == self._boot_id:
                    self.address = answer.address
                    post(PathFound(boot_id=answer.boot_id, address=answer.address))
                    return
            for answer in answers if may_move else ():
                failed = self._try(answer, post)
                if failed is None:
                    return
                post(failed)

    def shorten_lease(self) -> None:
        """Open this scheduler's session again with a lease of `SHORTEST_LEASE_MS`."""
        if not self._boot_id:
            return
        with self.access.open(self.address) as channel:
            try:
                stub_on(channel).OpenSession(
                    self._open_request(SHORTEST_LEASE_MS, take_over=False),
                    timeout=DESCRIBE_DEADLINE_S,
                    metadata=self.access.metadata(),
                )
            except grpc.RpcError:
                return  # The lease of an executor that cannot be reached ends by itself.

    def _in_turn(self, *, elsewhere: bool) -> list[str]:
        first = self._addresses.index(self.address) + elsewhere
        taken = self._claims.taken(self)
        order = [*self._addresses[first:], *self._addresses[:first]]
        # The own address, which comes last where all are taken, is refused where others have it.
        return [one for one in order if one not in taken] or [self.address]

    def _try(self, answer: Answer, post: Callable[[LinkEvent], None]) -> ConnectFailed | None:
        """Open a session and post it; return the failure if that did not succeed."""
        description: ExecutorDescription | None = None
        try:
            if isinstance(answer.described, grpc.RpcError):
                raise answer.described
            description = read_description(answer.described)
            opened = self._open(answer.address, answer.stub, description)
        except grpc.RpcError as broken:
            error = from_rpc_error(broken)
        except TandemError as refused:
            error = refused
        else:
            self.address = answer.address
            self._boot_id = opened.description.boot_id
            self._may_take_over = False
            post(opened)
            return None
        return ConnectFailed(
            error=error, retry_in_s=0.0, address=answer.address, description=description
        )

    def _open(
        self, address: str, stub: ExecutorServiceStub, description: ExecutorDescription
    ) -> SessionOpened:
        self._accept(description)
        self._check_model(description)
        tokenizer_dir = self._cache.find(description.fingerprint)
        if tokenizer_dir is None:
            files = stub.GetTokenizer(
                executor_pb2.GetTokenizerRequest(),
                timeout=TOKENIZER_DEADLINE_S,
                metadata=self.access.metadata(),
            )
            tokenizer_dir = self._cache.store(description.fingerprint, files)
        claim = Claim(description.boot_id, address)
        with self._claims.taking(self, claim):
            session = stub.OpenSession(
                self._open_request(self._lease_ms, take_over=self._may_take_over),
                timeout=OPEN_DEADLINE_S,
                metadata=self.access.metadata(),
            )
        if session.boot_id != description.boot_id:
            raise SessionLost("the executor restarted between Describe and OpenSession")
        return SessionOpened(
            description=description,
            tokenizer_dir=tokenizer_dir,
            session_epoch=session.session_epoch,
            address=address,
        )

    def _check_model(self, description: ExecutorDescription) -> None:
        model = self._in_use
        if model is not None and model.fingerprint != description.fingerprint:
            raise ModelChanged(
                f"it serves {description.model_name} ({description.fingerprint[:16]}), running "
                f"requests need {model.name} ({model.fingerprint[:16]})"
            )
        for name, theirs, needed in (
            ("dtype", description.dtype, None if model is None else model.dtype),
            ("block_size", description.geometry.block_size, model and model.block_size),
        ):
            if needed is not None and theirs != needed:
                raise IncompatibleExecutor(
                    f"it has {name} {theirs} and those that serve have {needed}: start it with the "
                    "same"
                )

    def _open_request(self, lease_ms: int, *, take_over: bool) -> session_pb2.OpenSessionRequest:
        return session_pb2.OpenSessionRequest(
            protocol_version=PROTOCOL_VERSION,
            scheduler_name=self._scheduler.name,
            scheduler_incarnation=self._scheduler.incarnation,
            take_over=take_over,
            lease_ms=lease_ms,
        )

    def _wait_after(self, error: TandemError, num_rounds: int) -> float:
        """
        Return the seconds to wait after a failure.

        The wait grows with the rounds. An executor held by another scheduler is tried again when
        that lease may end, an incompatible one after `LONGEST_BACKOFF_S`; no wait is longer.
        """
        if isinstance(error, SessionHeld) and error.metadata.get("holder") != self._scheduler.name:
            left_ms = float(error.metadata.get("lease_left_ms", "0"))
            return min(LONGEST_BACKOFF_S, max(FIRST_BACKOFF_S, left_ms / 1000))
        if isinstance(error, IncompatibleExecutor):
            return LONGEST_BACKOFF_S
        return backoff_s(num_rounds)


def _retrying(failed: ConnectFailed, retry_in_s: float) -> ConnectFailed:
    return ConnectFailed(
        error=failed.error,
        retry_in_s=retry_in_s,
        address=failed.address,
        description=failed.description,
    )
