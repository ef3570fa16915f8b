"""Time series of a healthy system, and of the fault of each alert, in the notation of promtool."""

from __future__ import annotations

from dataclasses import dataclass, field

INTERVAL_S = 30
BEFORE = 59
"""Steps after the first sample in which a faulty system is still healthy, to half an hour."""
AFTER = 61
FAULT_MINUTE = 30
DAY_S = 86400

SCHEDULER = 'job="tandem-scheduler", instance="s:9464"'
GATEWAY = 'job="tandem-gateway", instance="g:8000"'
EXECUTORS = ("e1:50061", "e2:50061")


def level(before: float, after: float | None = None) -> str:
    """Return a gauge that changes once the fault begins."""
    after = before if after is None else after
    return f"{before}+0x{BEFORE} {after}+0x{AFTER}"  # 0x59 alone would be a hexadecimal number


def counter(before: float, after: float | None = None) -> str:
    """Return a counter that grows by so much a sample, and by another amount from the fault on."""
    top = before * BEFORE
    after = before if after is None else after
    return f"0+{before}x{BEFORE} {top + after}+{after}x{AFTER}"


def of_scheduler(name: str, **labels: str) -> str:
    """Return a series of the scheduler."""
    return _series(name, SCHEDULER, labels)


def of_gateway(name: str, **labels: str) -> str:
    """Return a series of the gateway."""
    return _series(name, GATEWAY, labels)


def _series(name: str, target: str, labels: dict[str, str]) -> str:
    named = [target, *(f'{key}="{text}"' for key, text in labels.items())]
    return f"{name}{{{', '.join(named)}}}"


def state(executor: str, name: str) -> str:
    """Return the series of an executor's state."""
    return of_scheduler("tandem_each_executor_state", executor=executor, state=name)


def attached(executor: str) -> str:
    """Return the series of an executor's session."""
    return of_scheduler("tandem_each_executor_attached", executor=executor)


def failures(reason: str) -> str:
    """Return the series of a frontend's failed calls."""
    return of_scheduler("tandem_call_failures_total", process="frontend-0", reason=reason)


def ended(outcome: str, reason: str) -> str:
    """Return the series of requests that ended."""
    return of_scheduler("tandem_requests_total", outcome=outcome, reason=reason)


def latency(metric: str, before: str, after: str | None = None) -> dict[str, str]:
    """Return a histogram whose values lie below the bound `before`, after the fault below `after`."""
    bounds = ("0.01", "0.1", "1", "30", "+Inf")
    return {
        of_scheduler(f"{metric}_bucket", le=bound): counter(
            4 * (bounds.index(before) <= at), 4 * (bounds.index(after or before) <= at)
        )
        for at, bound in enumerate(bounds)
    }


CERTIFICATE = of_scheduler(
    "tandem_certificate_expiration_timestamp_seconds", process="frontend-0", certificate="s.pem"
)
FILE = of_scheduler("tandem_file_reload_failed", process="frontend-0", file="s.pem")
TTFT, STEP = "tandem_time_to_first_token_seconds", "tandem_step_time_seconds"

HEALTHY: dict[str, str] = {
    of_scheduler("up"): level(1),
    of_scheduler("tandem_uptime_seconds"): counter(INTERVAL_S),
    of_scheduler("tandem_ready"): level(1),
    of_scheduler("tandem_draining"): level(0),
    of_scheduler("tandem_progressing"): level(1),
    of_scheduler("tandem_frontends_alive"): level(1),
    **{attached(one): level(1) for one in EXECUTORS},
    **{state(one, "serving"): level(1) for one in EXECUTORS},
    of_scheduler("tandem_executor_losses_total"): level(1),
    of_scheduler("tandem_executor_fencings_total"): level(0),
    of_scheduler("tandem_out_of_memory_steps_total"): level(0),
    **latency(STEP, "0.1"),
    **latency(TTFT, "1"),
    of_scheduler("tandem_requests_running"): level(64),
    of_scheduler("tandem_requests_waiting"): level(20),
    of_scheduler("tandem_requests_limit"): level(256),
    of_scheduler("tandem_kv_cache_usage_ratio"): level(0.97),
    of_scheduler("tandem_retractions_total"): level(3),
    ended("finished", "EOS"): counter(60),
    ended("failed", "INVALID_LOGITS"): counter(1),
    of_scheduler("tandem_poison_requests_total"): level(0),
    failures("INTERNAL"): level(0),
    failures("SLOW_CONSUMER"): counter(0.05),
    failures("UNAUTHENTICATED"): counter(1),
    of_scheduler("tandem_integrity_failures_total"): level(0),
    of_scheduler("tandem_state_hash_mismatches_total"): level(0),
    CERTIFICATE: level(30 * DAY_S),
    FILE: level(0),
    of_gateway("up"): level(1),
    of_gateway("tandem_gateway_ready_schedulers"): level(2),
    of_gateway("tandem_gateway_requests_total", path="/v1/completions", status="200"): counter(60),
    of_gateway("tandem_gateway_requests_total", path="/v1/completions", status="503"): counter(1),
}


def gone(target: str) -> dict[str, str]:
    """Return a target's series as they are when its page does not answer from the fault on."""
    return {
        series: f"{values.split()[0]} _x{AFTER}"
        for series, values in HEALTHY.items()
        if target in series
    }


@dataclass(frozen=True, slots=True)
class Case:
    """
    One case.

    Attributes:
        name: Situation.
        firing: Alerts that fire in it; all others must not.
        series: Series that differ from those of a healthy system.
        minutes: Minutes after the fault's begin at which that is checked.
    """

    name: str
    firing: tuple[str, ...] = ()
    series: dict[str, str] = field(default_factory=dict)
    minutes: int = 15


def one_executor(name: str, *, is_attached: bool) -> dict[str, str]:
    """Return the series of an executor that leaves the state "serving" for another."""
    first = EXECUTORS[0]
    return {
        attached(first): level(1, int(is_attached)),
        state(first, "serving"): f"1+0x{BEFORE} _x{AFTER}",
        state(first, name): f"_x{BEFORE} 1+0x{AFTER}",
    }


CASES: tuple[Case, ...] = (
    Case("healthy"),
    Case("an executor that an operator drained", (), one_executor("drained", is_attached=False)),
    Case(
        "a drain that takes its time and gives executors back",
        (),
        {attached(one): level(1, 0) for one in EXECUTORS}
        | {of_scheduler("tandem_draining"): level(0, 1), of_scheduler("tandem_ready"): level(1, 0)},
    ),
    Case("no target at all", ("TandemSchedulerMissing",), gone(SCHEDULER)),
    Case(
        "a page that does not answer",
        ("TandemSchedulerDown",),
        gone(SCHEDULER) | {of_scheduler("up"): level(1, 0)},
    ),
    Case(
        "a new process at the same address",
        ("TandemSchedulerRestarted",),
        {of_scheduler("tandem_uptime_seconds"): f"0+{INTERVAL_S}x{BEFORE} 0+{INTERVAL_S}x{AFTER}"},
        minutes=5,
    ),
    Case("a suspended service", ("TandemNotReady",), {of_scheduler("tandem_ready"): level(1, 0)}),
    Case(
        "a frontend whose loop hangs",
        ("TandemFrontendSilent",),
        {of_scheduler("tandem_frontends_alive"): level(1, 0)},
    ),
    Case(
        "a forgotten drain",
        ("TandemDrainingLong",),
        {of_scheduler("tandem_draining"): level(1), of_scheduler("tandem_ready"): level(0)},
    ),
    Case(
        "an executor that died",
        ("TandemExecutorLost",),
        one_executor("connecting", is_attached=False)
        | {of_scheduler("tandem_executor_losses_total"): level(1, 2)},
    ),
    Case(
        "an executor that is stopped",
        ("TandemExecutorSilent",),
        one_executor("silent", is_attached=True),
    ),
    Case(
        "an executor with another model",
        ("TandemExecutorRefused",),
        one_executor("refused", is_attached=False),
    ),
    Case(
        "an executor that dies every minute",
        ("TandemExecutorLossesOften",),
        {of_scheduler("tandem_executor_losses_total"): counter(0, 0.25)},
    ),
    Case(
        "another scheduler that takes an executor",
        ("TandemExecutorFenced",),
        {of_scheduler("tandem_executor_fencings_total"): level(0, 1)},
        minutes=5,
    ),
    Case(
        "a step that does not end",
        ("TandemStepStalled",),
        {of_scheduler("tandem_progressing"): level(1, 0)},
    ),
    Case("steps ten times as slow", ("TandemStepsSlow",), latency(STEP, "0.1", "1"), minutes=20),
    Case(
        "a device without memory",
        ("TandemOutOfMemorySteps",),
        {of_scheduler("tandem_out_of_memory_steps_total"): level(0, 1)},
        minutes=5,
    ),
    Case(
        "a queue that grows",
        ("TandemQueueNearLimit",),
        {of_scheduler("tandem_requests_waiting"): level(20, 170)},
    ),
    Case(
        "refusals",
        ("TandemRequestsRefused",),
        {of_scheduler("tandem_refusals_total", limit="max_num_seqs"): f"_x{BEFORE} 1+1x{AFTER}"},
    ),
    Case("slow first tokens", ("TandemFirstTokenSlow",), latency(TTFT, "1", "30"), minutes=20),
    Case(
        "preemptions for lack of blocks",
        ("TandemKvCacheFull",),
        {of_scheduler("tandem_retractions_total"): counter(0, 30)},
    ),
    Case(
        "requests that fail",
        ("TandemRequestsFailing",),
        {ended("failed", "EXECUTOR_LOST"): f"_x{BEFORE} 1+30x{AFTER}"},
    ),
    Case(
        "a request that executors die of",
        ("TandemPoisonRequest",),
        {of_scheduler("tandem_poison_requests_total"): level(0, 1)},
        minutes=5,
    ),
    Case("a bug", ("TandemInternalErrors",), {failures("INTERNAL"): level(0, 1)}, minutes=5),
    Case(
        "clients that do not read",
        ("TandemSlowConsumers",),
        {failures("SLOW_CONSUMER"): counter(0, 1)},
    ),
    Case(
        "callers without a credential",
        ("TandemCallersUnknown",),
        {failures("UNAUTHENTICATED"): counter(1, 60)},
        minutes=20,
    ),
    Case(
        "wrong bookkeeping",
        ("TandemIntegrityFailure",),
        {of_scheduler("tandem_integrity_failures_total"): level(0, 1)},
    ),
    Case(
        "an executor with other slots",
        ("TandemIntegrityFailure",),
        {of_scheduler("tandem_state_hash_mismatches_total"): level(0, 1)},
    ),
    Case(
        "a certificate of three days",
        ("TandemCertificateExpiresSoon",),
        {CERTIFICATE: level(30 * DAY_S, 3 * DAY_S)},
    ),
    Case(
        "a certificate of an hour",
        ("TandemCertificateExpiresSoon", "TandemCertificateExpiresToday"),
        {CERTIFICATE: level(30 * DAY_S, 3600 * 2)},
    ),
    Case("a broken new file", ("TandemFileReloadFailed",), {FILE: level(0, 1)}),
    Case(
        "a gateway that does not answer",
        ("TandemGatewayDown",),
        gone(GATEWAY) | {of_gateway("up"): level(1, 0)},
    ),
    Case(
        "a gateway without schedulers",
        ("TandemGatewayNoScheduler",),
        {of_gateway("tandem_gateway_ready_schedulers"): level(2, 0)},
    ),
    Case(
        "a gateway that answers 503",
        ("TandemGatewayErrors",),
        {
            of_gateway(
                "tandem_gateway_requests_total", path="/v1/completions", status="503"
            ): counter(1, 30)
        },
    ),
)
