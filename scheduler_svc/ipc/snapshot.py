"""
Arguments and answers of a `Query`, by its kind; each travels as JSON inside the message. Statistics
are the very `tandem.admin.v1.GetStatsResponse` that operators get, its bytes as base64 in a string.

    kind       argument          result
    "abort"    AbortArgument     AbortResult      error RequestNotFound
    "stats"    none (b"{}")      Stats
    "drain"    DrainArgument     DrainResult      when all are handed over, or grace_s passed
    "config"   none (b"{}")      ConfigSnapshot
    "metrics"  none (b"{}")      MetricsSnapshot
    "activity" ActivityArgument  ActivitySnapshot  both of `ipc.activity`
    "requests" ListArgument      RequestList
    "events"   EventsArgument    EventList        errors EventsNotTracked, RequestNotFound
    "flush"    none (b"{}")      FlushResult
    "suspend"  SuspendArgument   SuspendResult    when done; errors NoExecutor, ExecutorLost, and
                                                the executor's own, such as OutOfMemory
    "resume"   none (b"{}")      SuspendResult    as "suspend"
    "executor" none (b"{}")      ExecutorInUse    error NoExecutor
    "report"   ProcessReport     Reported         of a frontend, every few seconds
    "executors"       none (b"{}")      ExecutorList
    "add_executor"    ExecutorArgument  ExecutorList         error InvalidParameter
    "drain_executor"  ExecutorArgument  ExecutorDrainResult  when it serves none, or grace_s passed
    "remove_executor" ExecutorArgument  ExecutorList         error InvalidParameter
    "demand"          none (b"{}")      Demand
    "unserved"        none (b"{}")      Noted                a frontend refused a request itself

Unknown keys are ignored, so that a newer core can add some. Counters count since the core started.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats

SUSPEND_WAIT_S = 300.0
"""Longest time "suspend" and "resume" wait for the executor to move its KV memory."""


class AbortArgument(msgspec.Struct, frozen=True):
    """
    Id of a request to end with CANCELLED, and its tenant; None for whichever tenant has a request
    of this id. Any frontend may end any request.
    """

    request_id: str
    tenant: str | None = ""


class AbortResult(msgspec.Struct, frozen=True):
    """Confirmation that the request was live; its end follows on its own stream."""


class DrainArgument(msgspec.Struct, frozen=True):
    """Seconds that requests may go on before they are handed over."""

    grace_s: float


class DrainResult(msgspec.Struct, frozen=True):
    """Number of choices handed over, or still live because a later "drain" gave them more time."""

    remaining_requests: int


class ListArgument(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of the requests to list; see tandem.admin.v1.ListRequestsRequest."""

    page_size: int
    after: int = -1
    """`RequestList.last` of the page before; -1 for the first page."""
    tenant: str | None = None
    states: tuple[str, ...] = ()
    """Names as in `RequestSummary.state`; empty for all."""


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """
    One choice of a live request; the fields of `tandem.admin.v1.RequestSummary`.

    Attributes:
        state: Value of a scheduler_svc.core.request.request.RequestState.
    """

    request_id: str
    choice: int
    state: str
    tenant: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    age_s: float
    preemptions: int
    time_to_first_token_s: float | None


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, oldest first, and the total that match, including those cut off."""

    requests: tuple[RequestSummary, ...]
    total: int
    last: int | None = None
    """Arrival number of the last one, if there are more; None if these are the last."""


class EventsArgument(msgspec.Struct, frozen=True):
    """
    Id of the request to list the events of, and its tenant; None for the latest of any tenant.
    """

    request_id: str
    tenant: str | None = None


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `tandem.admin.v1.BlockStats`."""

    used_blocks: int
    cached_blocks: int
    free_blocks: int


class EventEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `tandem.admin.v1.RequestEvent`; `kind` is its number."""

    kind: int
    choice: int
    at_s: float
    token_id: int | None
    blocks: BlockCounts | None
    detail: str
    time_to_first_token_s: float | None
    dropped_events: int


class EventList(msgspec.Struct, frozen=True):
    """Events of a request, in order of time."""

    events: tuple[EventEntry, ...]


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """
    Work that there is for executors.

    Attributes:
        waiting_requests: Choices of requests that wait for a place.
        running_requests: Choices that have one.
        queued_tokens: Uncached prompt tokens of requests that wait for the first time.
        unserved_age_s: Seconds since a request was last refused because no executor was there, by
            the core or by a frontend; None for never.
    """

    waiting_requests: int
    running_requests: int
    queued_tokens: int
    unserved_age_s: float | None


class Noted(msgspec.Struct, frozen=True):
    """Confirmation without content."""


class FlushResult(msgspec.Struct, frozen=True):
    """Number of blocks freed: those that only the prefix cache had kept."""

    freed_blocks: int


class SuspendArgument(msgspec.Struct, frozen=True):
    """Treatment of the KV memory: a tandem.link.commands.KvMode number."""

    kv_mode: int


class SuspendResult(msgspec.Struct, frozen=True):
    """Confirmation by the executor, with its device memory after the command; 0 where unknown."""

    device_memory_bytes: int


class ExecutorInUse(msgspec.Struct, frozen=True):
    """Address of the attached executor, and its optional features by name."""

    address: str
    features: tuple[str, ...]


class ExecutorRow(msgspec.Struct, frozen=True, kw_only=True):
    """An executor that serves or is expected to, as in `tandem.admin.v1.ExecutorSummary`."""

    address: str
    reached_at: str
    """Address of the newest session: one that stands by may have it; empty before the first."""
    state: str
    """serving, draining, drained, suspended, silent, connecting or refused."""
    why: str
    """Reason in words where it is refused; else empty."""
    boot_id: str
    model: str
    device: str
    dtype: str
    running_requests: int
    max_requests: int
    used_blocks: int
    total_blocks: int
    cached_blocks: int
    steps: int
    step_s: float
    """Seconds that a step usually computes; 0 before the first."""
    sessions: int
    losses: int
    device_memory_bytes: int
    away_s: float
    """Seconds for which no stream has been attached; 0 while one is."""


class ExecutorList(msgspec.Struct, frozen=True):
    """Every executor that serves or is expected to, in the order in which they were named."""

    executors: tuple[ExecutorRow, ...]


class ExecutorArgument(msgspec.Struct, frozen=True, kw_only=True):
    """An executor by the address that it was named with, and its grace where it is drained."""

    address: str
    grace_s: float = 0.0


class ExecutorDrainResult(msgspec.Struct, frozen=True):
    """Number of requests that moved to other executors when the grace was over."""

    moved_requests: int


class ConfigEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One setting in force; the fields of `tandem.admin.v1.ConfigEntry`."""

    name: str
    json_value: str
    source: str


class ConfigSnapshot(msgspec.Struct, frozen=True):
    """Every setting, in the order of the documentation."""

    entries: tuple[ConfigEntry, ...]


class HistogramSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """
    Histogram with cumulative buckets, as in Prometheus.

    `cumulative_counts[i]` is the number of observations at most `upper_bounds[i]`; `count` is the
    number of all (the `+Inf` bucket) and `total` their sum. Bounds are seconds or, for sizes,
    tokens, strictly growing.
    """

    upper_bounds: tuple[float, ...]
    cumulative_counts: tuple[int, ...]
    count: int
    total: float


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """
    Numbers of one process of the service, as it tells them.

    Attributes:
        name: "core", or "frontend-0" and so on.
        cpu_s: Processor time that it has used, in seconds.
        resident_bytes: Its resident memory; 0 where unknown.
        open_streams: Requests that have a client in this process now; 0 for the core.
        failed_calls: Calls and items of calls that failed here, by ErrorReason name.
        certificates: Last valid second, since 1970, of each certificate in force, by its file.
        refused_files: True where the newest content of files that belong together could not be
            used and that before it is in force; by the first of these files.
    """

    name: str
    cpu_s: float
    resident_bytes: int
    open_streams: int = 0
    failed_calls: dict[str, int] = {}
    certificates: dict[str, float] = {}
    refused_files: dict[str, bool] = {}


class Reported(msgspec.Struct, frozen=True):
    """Confirmation that a report was taken."""


class MetricsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """
    All metrics of the core.

    Attributes:
        stats: Gauges and plain counters.
        ready: True when new requests would be served at once.
        finished_by_reason: Requests ended without an error, by FinishReason name ("EOS", ...).
        failed_by_reason: Requests ended by an error after acceptance, by ErrorReason name.
        refused_by_reason: Requests refused by the core, by ErrorReason name.
        histograms: "time_to_first_token", "inter_token_latency", "request_queue_time",
            "e2e_request_latency", "step_time" (send to result), "schedule_time" (planning),
            "executor_queue_time", "executor_forward_time", "executor_sample_time"; in tokens
            "request_prompt_tokens", "request_generation_tokens", "step_tokens".
        prompt_tokens: Prompt tokens of ended requests.
        cached_prompt_tokens: Those of them that came from the prefix cache.
        merged_updates: Updates that had to wait for a slow frontend and were merged with later
            ones.
        integrity_failures: Bookkeeping inconsistencies found while idle; any is a bug.
        device_memory_bytes: Last reported by the executor; 0 where unknown.
        model_name: Model served; empty before the first executor.
        model_fingerprint: Its revision.
        executors: A row per executor that serves or is expected to.
        progressing: False while a step in flight is older than it should be.
        frontends_alive: False while a frontend was not heard for as long as liveness allows.
        processes: The newest report of each process of the service.
        max_num_seqs: Most requests in the system at a time; 0 before the first executor.
    """

    stats: Stats
    ready: bool
    finished_by_reason: dict[str, int]
    failed_by_reason: dict[str, int]
    refused_by_reason: dict[str, int]
    histograms: dict[str, HistogramSnapshot]
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    merged_updates: int = 0
    integrity_failures: int = 0
    device_memory_bytes: int = 0
    model_name: str = ""
    model_fingerprint: str = ""
    executors: tuple[ExecutorRow, ...] = ()
    progressing: bool = True
    frontends_alive: bool = True
    processes: tuple[ProcessReport, ...] = ()
    max_num_seqs: int = 0


def _bytes_of(value: Any) -> bytes:
    """Return the bytes of a statistics message, which msgspec writes in base64."""
    if isinstance(value, Stats):
        return value.SerializeToString()
    raise NotImplementedError(f"{type(value).__name__} is no answer to a query")


def _stats_of(_kind: type, text: str) -> Stats:
    """Return the statistics message that `_bytes_of` took apart."""
    return Stats.FromString(base64.b64decode(text))


encode_json = msgspec.json.Encoder(enc_hook=_bytes_of).encode
decode_abort_argument = msgspec.json.Decoder(AbortArgument).decode
decode_drain_argument = msgspec.json.Decoder(DrainArgument).decode
decode_drain_result = msgspec.json.Decoder(DrainResult).decode
decode_config = msgspec.json.Decoder(ConfigSnapshot).decode
decode_list_argument = msgspec.json.Decoder(ListArgument).decode
decode_request_list = msgspec.json.Decoder(RequestList).decode
decode_events_argument = msgspec.json.Decoder(EventsArgument).decode
decode_event_list = msgspec.json.Decoder(EventList).decode
decode_demand = msgspec.json.Decoder(Demand).decode
decode_flush_result = msgspec.json.Decoder(FlushResult).decode
decode_suspend_argument = msgspec.json.Decoder(SuspendArgument).decode
decode_suspend_result = msgspec.json.Decoder(SuspendResult).decode
decode_executor = msgspec.json.Decoder(ExecutorInUse).decode
decode_executors = msgspec.json.Decoder(ExecutorList).decode
decode_executor_argument = msgspec.json.Decoder(ExecutorArgument).decode
decode_executor_drain = msgspec.json.Decoder(ExecutorDrainResult).decode
decode_report = msgspec.json.Decoder(ProcessReport).decode
decode_stats = msgspec.json.Decoder(Stats, dec_hook=_stats_of).decode
decode_metrics = msgspec.json.Decoder(MetricsSnapshot, dec_hook=_stats_of).decode
