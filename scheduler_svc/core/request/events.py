"""Events of requests that the core emits; those with one entry per token are columns."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.request import FinishReason
from tandem.errors import TandemError
from tandem.link.batch import NO_INT32, Int32Column, no_int32
from tandem.link.logprobs import LogprobColumns


class ProgressKind(enum.IntEnum):
    """Kind of a `Progress` event; it gives `Progress.value` its meaning."""

    QUEUED = 1
    """In the waiting queue; `value` is the number of requests ahead."""
    SCHEDULED = 2
    """Admitted; `value` is the number of cached prompt tokens."""
    PREFILLED = 3
    """Partly or wholly prefilled; `value` is the number of prompt tokens done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """
    One line for the log.

    Attributes:
        event: Name of the event where logs are for machines.
        values: Values of the event by key, where logs are for machines.
        text: Line where logs are for people, verbatim.
        is_warning: True for a warning, False for information.
        is_of_step: True for a line about the step that is being planned, whose id is known once it
            is sent: see `EventLog.name_step`.
    """

    event: str
    values: Mapping[str, object]
    text: str
    is_warning: bool = False
    is_of_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a request that waits or is being prefilled."""

    handle: int
    kind: ProgressKind
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """
    End of a request without an error; no event follows for its handle.

    `num_output_tokens` counts up to the end, the ending token included. Times are seconds;
    `first_token_s` is None when no token was produced.
    """

    handle: int
    reason: FinishReason
    matched_token: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    queue_s: float
    first_token_s: float | None
    total_s: float
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """End of a request by an error; no event follows for its handle."""

    handle: int
    error: TandemError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """
    Log probabilities of tokens that are in the token columns of the same events, or of prompt
    tokens.

    Attributes:
        handle: int64 ``[Q]``, handle of the request of each token.
        offset: int32 ``[Q]``, offset of each token among its request's outputs; prompt tokens have
            negative ones, the last of them -1.
        columns: Log probabilities; their `row` has no meaning here.
        rank: int32 ``[Q]``, place of each prompt token among all ids; None for outputs.
    """

    handle: NDArray[np.int64]
    offset: Int32Column
    columns: LogprobColumns
    rank: Int32Column | None = None


_NO_INT64: NDArray[np.int64] = np.empty(0, np.int64)
_NO_INT64.flags.writeable = False


def _no_int64() -> NDArray[np.int64]:
    return _NO_INT64


@dataclass(slots=True, kw_only=True)
class CoreEvents:
    """
    Events of one turn of the core.

    The three token columns have one entry per new output token: its request's handle, its output
    offset (0 = first), its id. Tokens of a request come in order and before its `Ended`. `logprobs`
    has those of the requests that asked for them, in order too, those of a prompt first. Under one
    `token_version` other than 0 the column of handles is always the same.
    """

    token_handle: NDArray[np.int64] = field(default_factory=_no_int64)
    token_offset: Int32Column = field(default_factory=no_int32)
    token: Int32Column = field(default_factory=no_int32)
    token_version: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    log_lines: list[LogLine] = field(default_factory=list)
    """Lines for the operators' log, in order."""

    def __bool__(self) -> bool:
        """Return True when there is any event or log line."""
        is_any = len(self.token) or self.ended or self.failed or self.progress or self.log_lines
        return bool(is_any or self.logprobs)


class EventLog:
    """
    Events of the core, collected until `take` is called.

    Attributes:
        has_unnamed: True while there is a line about a step whose id was not told yet.
    """

    __slots__ = (
        "_ended",
        "_failed",
        "_log_lines",
        "_logprobs",
        "_progress",
        "_token_version",
        "_tokens",
        "has_unnamed",
    )

    def __init__(self) -> None:
        self._tokens: list[tuple[NDArray[np.int64], Int32Column, Int32Column]] = []
        self._token_version = 0
        self._logprobs: list[TokenLogprobs] = []
        self._ended: list[Ended] = []
        self._failed: list[Failed] = []
        self._progress: list[Progress] = []
        self._log_lines: list[LogLine] = []
        self.has_unnamed = False

    def add_tokens(
        self, handle: NDArray[np.int64], offset: Int32Column, token: Int32Column, version: int = 0
    ) -> None:
        """Add new output tokens as equally long columns; see `CoreEvents` for the version."""
        self._tokens.append((handle, offset, token))
        self._token_version = version

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """
        Add log probabilities, of prompt tokens or of outputs that are added before the events are
        taken.
        """
        self._logprobs.append(logprobs)

    def add(self, event: Ended | Failed | Progress) -> None:
        """Add an event other than tokens."""
        if isinstance(event, Ended):
            self._ended.append(event)
        elif isinstance(event, Failed):
            self._failed.append(event)
        else:
            self._progress.append(event)

    def add_prefilled(self, handle: int, num_done: int) -> None:
        """Add the progress of a prompt: the number of its tokens that are computed."""
        self._progress.append(Progress(handle=handle, kind=ProgressKind.PREFILLED, value=num_done))

    def add_log(self, line: LogLine) -> None:
        """Add a line for the operators' log."""
        self._log_lines.append(line)
        self.has_unnamed |= line.is_of_step

    def name_step(self, step_id: int | None) -> None:
        """Add its id to the lines about the step planned last; None where nothing was sent."""
        ids = {} if step_id is None else {"step_id": step_id}
        self._log_lines = [
            replace(line, values={**line.values, **ids}, is_of_step=False)
            if line.is_of_step
            else line
            for line in self._log_lines
        ]
        self.has_unnamed = False

    def check_integrity(self) -> None:
        """
        Check the events that were not taken yet.

        Raises:
            InternalError: Columns differ in length, or a request ends twice.
        """
        is_even = all(len(one) == len(two) == len(three) for one, two, three in self._tokens)
        require(is_even, "columns of tokens differ in length")
        over = [ended.handle for ended in self._ended] + [one.handle for one in self._failed]
        require(len(over) == len(set(over)), "a request ends twice")

    def take(self) -> CoreEvents:
        """Return, and remove, all events since the last call."""
        version = 0
        if len(self._tokens) == 1:
            handle, offset, token = self._tokens[0]
            version = self._token_version
        elif self._tokens:
            handle, offset, token = map(np.concatenate, zip(*self._tokens, strict=True))
        else:
            handle, offset, token = _NO_INT64, NO_INT32, NO_INT32
        events = CoreEvents(
            token_handle=handle,
            token_offset=offset,
            token=token,
            token_version=version,
            logprobs=self._logprobs,
            ended=self._ended,
            failed=self._failed,
            progress=self._progress,
            log_lines=self._log_lines,
        )
        self._tokens, self._logprobs, self._ended = [], [], []
        self._failed, self._progress, self._log_lines = [], [], []
        self.has_unnamed = False
        return events
