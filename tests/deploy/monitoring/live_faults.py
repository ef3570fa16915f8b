"""Faults that the live check causes, each with the alerts that must and that may fire."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem.errors import TandemError
from tandem_client import ExecutorState
from tests.deploy.monitoring.prometheus import Prometheus
from tests.deploy.monitoring.system import System
from tests.e2e.cluster import Process
from tests.faults.workload.marks import BAD_ROW_MARK, POISON_MARK

Cause = Callable[[System, Prometheus], contextlib.AbstractContextManager[None]]
SERVING = ExecutorState.SERVING
OUTAGE = frozenset(
    {"TandemNotReady", "TandemExecutorLost", "TandemExecutorSilent", "TandemGatewayNoScheduler"}
)
"""Alerts that an outage of executors brings with it, one after the other."""
GATEWAY = frozenset({"TandemGatewayErrors", "TandemGatewayNoScheduler"})


@dataclass(frozen=True, slots=True)
class Fault:
    """
    One fault.

    Attributes:
        name: What is done.
        cause: Begins it, and ends it at the end of the block.
        must: Alerts that must fire.
        may: Others that may, as they follow from it; no further one may.
    """

    name: str
    cause: Cause
    must: frozenset[str]
    may: frozenset[str] = frozenset()


@contextlib.contextmanager
def repeatedly(act: Callable[[], None], every_s: float, num_threads: int = 1) -> Iterator[None]:
    """Act again and again during the block; errors of clients are what some faults are about."""
    is_over = threading.Event()

    def turn() -> None:
        while not is_over.wait(every_s):
            with contextlib.suppress(TandemError):
                act()

    threads = [threading.Thread(target=turn, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(timeout=90)


@contextlib.contextmanager
def executor_killed(system: System, _: Prometheus) -> Iterator[None]:
    system.stop_executor(1)
    yield
    system.start_executor(1)


@contextlib.contextmanager
def all_executors_killed(system: System, _: Prometheus) -> Iterator[None]:
    for number in range(len(system.executors)):
        system.stop_executor(number)
    yield
    for number in range(len(system.executors)):
        system.start_executor(number)


@contextlib.contextmanager
def executor_paused(system: System, _: Prometheus) -> Iterator[None]:
    with system.stopped(system.executors[1]):
        yield


@contextlib.contextmanager
def steps_held(system: System, _: Prometheus) -> Iterator[None]:
    for gate in system.gates:
        gate.allow(0)
    yield
    for gate in system.gates:
        gate.open()


@contextlib.contextmanager
def steps_slowed(system: System, _: Prometheus) -> Iterator[None]:
    with repeatedly(lambda: [gate.allow(1) for gate in system.gates], 0.1):
        yield
    for gate in system.gates:
        gate.open()


@contextlib.contextmanager
def executors_die_often(system: System, _: Prometheus) -> Iterator[None]:
    def kill() -> None:
        with system.admin() as admin:
            serving = [one.address for one in admin.executors() if one.state == SERVING]
        for address in serving:
            system.stop_executor(system.executor_ports.index(address), is_wanted=True)

    with repeatedly(kill, 0.5):
        yield


@contextlib.contextmanager
def other_model(system: System, _: Prometheus) -> Iterator[None]:
    system.stop_executor(1)
    system.start_executor(1, system.other_model)
    yield
    system.stop_executor(1)
    system.start_executor(1)


@contextlib.contextmanager
def service_suspended(system: System, _: Prometheus) -> Iterator[None]:
    with system.admin() as admin:
        admin.suspend()
        yield
        admin.resume()


@contextlib.contextmanager
def drained(system: System, _: Prometheus) -> Iterator[None]:
    with system.admin() as admin:
        admin.drain(grace_s=0.5)
    yield
    system.scheduler.end()
    system.start_scheduler()


@contextlib.contextmanager
def frontend_killed(system: System, _: Prometheus) -> Iterator[None]:
    system.frontends()[1].kill()
    system.scheduler.process.wait()
    yield
    system.start_scheduler()


@contextlib.contextmanager
def scheduler_restarted(system: System, _: Prometheus) -> Iterator[None]:
    system.scheduler.end()
    system.start_scheduler()
    yield


@contextlib.contextmanager
def scheduler_gone(system: System, _: Prometheus) -> Iterator[None]:
    system.scheduler.end()
    yield
    system.start_scheduler()


@contextlib.contextmanager
def frontend_paused(system: System, _: Prometheus) -> Iterator[None]:
    with system.stopped(system.frontends()[1]):
        yield


@contextlib.contextmanager
def target_removed(_: System, prometheus: Prometheus) -> Iterator[None]:
    prometheus.know_scheduler(is_known=False)
    yield
    prometheus.know_scheduler(is_known=True)


@contextlib.contextmanager
def gateway_killed(system: System, _: Prometheus) -> Iterator[None]:
    system.gateway.end()
    yield
    system.start_gateway()


def generate(
    system: System, token_ids: tuple[int, ...], max_tokens: int, **options: object
) -> None:
    """Send a request and read its stream to the end."""
    with system.client() as client:
        for _ in client.generate(
            token_ids=list(token_ids), max_tokens=max_tokens, deadline_s=60, **options
        ):
            pass


@contextlib.contextmanager
def flood(system: System, _: Prometheus) -> Iterator[None]:
    prompt = tuple(range(20, 40))
    with repeatedly(lambda: generate(system, prompt, 60, ignore_eos=True), 0.01, num_threads=60):
        yield


@contextlib.contextmanager
def long_outputs(system: System, _: Prometheus) -> Iterator[None]:
    prompt = tuple(range(20, 100))
    with repeatedly(lambda: generate(system, prompt, 400, ignore_eos=True), 0.01, num_threads=18):
        yield


@contextlib.contextmanager
def poison(system: System, _: Prometheus) -> Iterator[None]:
    with repeatedly(lambda: generate(system, (*POISON_MARK, 20, 21), 8), 5.0):
        yield


@contextlib.contextmanager
def bad_logits(system: System, _: Prometheus) -> Iterator[None]:
    with repeatedly(lambda: generate(system, (*BAD_ROW_MARK, 20, 21), 8), 0.01, num_threads=3):
        yield


@contextlib.contextmanager
def unread(system: System, _: Prometheus) -> Iterator[None]:
    def read_one() -> None:
        with system.client() as client:
            prompt = list(range(20, 30))
            stream = client.generate(
                token_ids=prompt, max_tokens=440, ignore_eos=True, logprobs=20, deadline_s=60
            )
            next(iter(stream))
            time.sleep(6)

    with repeatedly(read_one, 0.01, num_threads=5):
        yield


@contextlib.contextmanager
def taken_over(system: System, _: Prometheus) -> Iterator[None]:
    ports = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "metrics-listen")]
    arguments = [f"--executor={system.executor_ports[1]}", "--take-over", *ports]
    other = Process("scheduler_svc", arguments, system.folder, "other-scheduler")
    try:
        other.addresses()
        yield
    finally:
        other.end()


@contextlib.contextmanager
def strangers(system: System, _: Prometheus) -> Iterator[None]:
    def call() -> None:
        with system.client("not-a-token-of-the-file") as client:
            client.complete(token_ids=[20, 21], max_tokens=1)

    with repeatedly(call, 0.05, num_threads=2):
        yield


def certificate(days: float) -> Cause:
    """Return the fault of a certificate that is valid for so many days only."""

    @contextlib.contextmanager
    def cause(system: System, _: Prometheus) -> Iterator[None]:
        system.renew(days=days)
        with repeatedly(lambda: generate(system, (20, 21), 1), 0.2):
            yield
            system.renew(days=90)
            time.sleep(5)

    return cause


@contextlib.contextmanager
def broken_key(system: System, _: Prometheus) -> Iterator[None]:
    system.pair.key.write_text("no key")
    with repeatedly(lambda: generate(system, (20, 21), 1), 0.2):
        yield
        system.renew(days=90)
        time.sleep(5)


def names(*alerts: str) -> frozenset[str]:
    """Return the full names of alerts."""
    return frozenset(f"Tandem{alert}" for alert in alerts)


SLOW = names("FirstTokenSlow", "StepsSlow", "StepStalled", "RequestsRefused", "QueueNearLimit")
"""Alerts that standing still brings with it, by and by."""
STARTS = names("StepsSlow")
"""On two cores a process that starts makes the steps of an executor of a tiny model slower."""
RESTART = STARTS | names(
    "SchedulerRestarted", "SchedulerDown", "GatewayNoScheduler", "GatewayErrors"
)
DEATHS = OUTAGE | GATEWAY | SLOW | names("ExecutorLossesOften", "RequestsFailing")

FAULTS: tuple[Fault, ...] = (
    Fault("one of two executors is killed", executor_killed, names("ExecutorLost"), STARTS),
    Fault("one of two executors is stopped (SIGSTOP)", executor_paused, names("ExecutorLost"),
          names("ExecutorSilent") | STARTS),
    Fault("both executors are killed", all_executors_killed,
          names("ExecutorLost", "NotReady", "GatewayNoScheduler"), OUTAGE | GATEWAY | SLOW),
    Fault("executors are killed whenever they serve", executors_die_often,
          names("ExecutorLossesOften"), DEATHS),
    Fault("an executor with another model joins", other_model, names("ExecutorRefused"),
          names("ExecutorLost") | STARTS),
    Fault("steps of both executors do not end", steps_held,
          names("StepStalled", "ExecutorSilent", "NotReady"),
          OUTAGE | GATEWAY | SLOW),
    Fault("steps take 100 ms", steps_slowed, names("StepsSlow"), SLOW | names("KvCacheFull")),
    Fault("the service is suspended", service_suspended, names("NotReady", "GatewayNoScheduler"),
          GATEWAY | SLOW),
    Fault("the service is drained and left so", drained, names("DrainingLong"),
          GATEWAY | RESTART),
    Fault("the scheduler is killed and started again", scheduler_restarted,
          names("SchedulerRestarted"), RESTART | OUTAGE),
    Fault("a frontend is killed, with it the service", frontend_killed, names("SchedulerDown"),
          RESTART | OUTAGE),
    Fault("a frontend is stopped (SIGSTOP)", frontend_paused, names("FrontendSilent"), GATEWAY),
    Fault("Prometheus loses its target", target_removed, names("SchedulerMissing")),
    Fault("the gateway is killed", gateway_killed, names("GatewayDown"), STARTS),
    Fault("60 clients beside a limit of 32 requests", flood,
          names("QueueNearLimit", "RequestsRefused"), GATEWAY | SLOW | names("KvCacheFull")),
    Fault("18 long outputs in 96 blocks of KV", long_outputs, names("KvCacheFull"),
          SLOW | names("QueueNearLimit")),
    Fault("a request kills executors", poison, names("PoisonRequest"), DEATHS),
    Fault("rows with invalid logits", bad_logits, names("RequestsFailing"), GATEWAY | STARTS),
    Fault("clients that read one message and no more", unread, names("SlowConsumers"),
          SLOW | names("KvCacheFull")),
    Fault("another scheduler takes an executor", taken_over, names("ExecutorFenced"),
          STARTS | names("ExecutorLost", "ExecutorRefused", "ExecutorSilent")),
    Fault("calls with a wrong token", strangers, names("CallersUnknown")),
    Fault("a certificate of three days", certificate(3), names("CertificateExpiresSoon")),
    Fault("a certificate of half a day", certificate(0.5),
          names("CertificateExpiresSoon", "CertificateExpiresToday")),
    Fault("a new key that is none", broken_key, names("FileReloadFailed")),
    Fault("the scheduler is killed and stays away", scheduler_gone,
          names("SchedulerDown", "GatewayErrors", "GatewayNoScheduler"), RESTART | OUTAGE),
)  # fmt: skip

NOT_CAUSED = {
    "TandemOutOfMemorySteps": "needs a device without memory",
    "TandemInternalErrors": "needs a bug",
    "TandemIntegrityFailure": "needs a bug",
}
"""Alerts that no fault here causes; promtool alone plays their series."""
