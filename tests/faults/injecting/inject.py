"""The actions that do each kind of fault to a rig."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

import psutil

from scheduler_svc.core.observe.step_log import DECODE_LINE_INTERVAL
from tests.e2e.cluster import paused
from tests.faults.injecting.one_of_several import FLEET_ACTIONS
from tests.faults.injecting.one_rank import RANK_ACTIONS
from tests.faults.injecting.target import Target
from tests.faults.processes.rig import Rig
from tests.faults.proxies.controlled import Controlled
from tests.faults.schedule import Fault, Kind
from tests.faults.workload.load import StormRequest
from tests.faults.workload.marks import BAD_ROW_MARK, POISON_LATER_MARK, POISON_MARK
from tests.faults.workload.streams import Run
from tests.waiting import wait_until

FAILURE_LIMIT_S = 300.0
"""Longest wait in seconds for the failure of a bad request."""
_SLOW_LATENCY_S = 0.04
_SLOW_BYTES_PER_S = 200_000.0


def inject(fault: Fault, target: Target) -> None:
    """Inject the fault; return when it is over, if it ends by itself or can be ended."""
    _ACTIONS[fault.kind](fault, target)


def _reset(_: Fault, target: Target) -> None:
    _reset_some(target.rig.proxies)


def _reset_some(proxies: list[Controlled]) -> None:
    """Reset all connections; if there is none at the moment, wait for the first that comes back."""
    wait_until(lambda: sum(proxy.ask("reset")["reset"] for proxy in proxies), "a connection")


def _blackhole(fault: Fault, target: Target) -> None:
    for proxy in target.rig.proxies:
        proxy.ask("flow", on=False)
    time.sleep(fault.lasts_s)
    for proxy in target.rig.proxies:
        proxy.ask("flow", on=True)


def _slow_link(fault: Fault, target: Target) -> None:
    for proxy in target.rig.proxies:
        proxy.ask("slow", latency_s=_SLOW_LATENCY_S, bytes_per_s=_SLOW_BYTES_PER_S)
    time.sleep(fault.lasts_s)
    for proxy in target.rig.proxies:
        proxy.ask("slow", latency_s=0.0, bytes_per_s=1e9)


def _damage(how: str) -> Callable[[Fault, Target], None]:
    def act(fault: Fault, target: Target) -> None:
        way = "up" if fault.is_upward else "down"
        for proxy in target.rig.proxies:
            proxy.ask("damage", kind=how, way=way, draw=fault.draw)

    return act


def _make_unreachable(_: Fault, target: Target) -> None:
    """Drop all packets of the executor that works until another works; then let them pass."""
    executor = target.rig.working_executor()
    proxy = target.rig.proxies[target.rig.executors.index(executor)]
    _until_another_works(target, lambda: proxy.ask("flow", on=False))
    proxy.ask("flow", on=True)


def _reset_clients(_: Fault, target: Target) -> None:
    assert target.rig.client_proxy is not None
    _reset_some([target.rig.client_proxy])


def _kill_executor(fault: Fault, target: Target) -> None:
    """
    Kill the executor that works, and one time in two its successor too, at some point of its start.
    """
    executor = target.rig.working_executor()
    executor.signal(signal.SIGKILL)
    if fault.is_upward:
        time.sleep(fault.draw % 1024 / 1024)
        executor.signal(signal.SIGKILL)


def _stop_executor(_: Fault, target: Target) -> None:
    target.rig.working_executor().signal(signal.SIGTERM)


def _pause_executor(fault: Fault, target: Target) -> None:
    """Pause the executor that works, at least until the scheduler notices."""
    executor = target.rig.working_executor()
    wait_until(target.readiness.is_ready, "readiness")
    executor.signal(signal.SIGSTOP)
    time.sleep(fault.lasts_s)
    wait_until(lambda: not target.readiness.is_ready(), "readiness to turn off")
    executor.signal(signal.SIGCONT)


def _hang_executor(_: Fault, target: Target) -> None:
    """Pause the executor that works until another works; then kill it, as an orchestrator would."""
    executor = target.rig.working_executor()
    _until_another_works(target, lambda: executor.signal(signal.SIGSTOP))
    executor.signal(signal.SIGKILL)


def _hang_step(_: Fault, target: Target) -> None:
    """
    Let a step never return; when another executor works, kill this one, as an orchestrator would.
    """
    executor = target.rig.working_executor()
    order = target.rig.folder / "hang"

    def hang() -> None:
        order.touch()
        wait_until(lambda: not order.exists(), "a step that takes the order to hang")

    _until_another_works(target, hang)
    executor.signal(signal.SIGKILL)


def _until_another_works(target: Target, strike: Callable[[], object]) -> None:
    """Strike the executor that works; wait for a session with another one, and for its tokens."""
    rig = target.rig
    num_before = rig.stats().executor_sessions
    strike()
    wait_until(
        lambda: rig.stats().executor_sessions > num_before, "a session with another executor"
    )
    began_s = time.monotonic()
    wait_until(lambda: target.streams.flows_since(began_s), "another executor's tokens")


def _other_weights(fault: Fault, target: Target) -> None:
    """Run another model in every place of an executor for a while."""
    assert target.other_weights is not None
    rig = target.rig
    for executor in rig.executors:
        with executor.lock:
            right, executor.model = executor.model, target.other_weights
            executor.signal(signal.SIGKILL)
    time.sleep(fault.lasts_s)
    for executor in rig.executors:
        with executor.lock:
            executor.model = right
            executor.signal(signal.SIGKILL)


def _pause(process: Callable[[Rig], psutil.Process]) -> Callable[[Fault, Target], None]:
    def act(fault: Fault, target: Target) -> None:
        with paused(process(target.rig).pid):
            time.sleep(fault.lasts_s)

    return act


def _kill_scheduler(_: Fault, target: Target) -> None:
    killed = target.rig.scheduler
    killed.process.kill()
    target.rig.wait_successor(killed)


def _stop_scheduler(_: Fault, target: Target) -> None:
    scheduler = target.rig.scheduler
    stopped = scheduler.process
    stopped.terminate()
    wait_until(lambda: stopped.poll() is not None, "an orderly end of the scheduler")
    assert stopped.returncode == 0, f"a scheduler told to stop gave {stopped.returncode}"
    target.rig.wait_successor(scheduler)


def _kill_frontend(_: Fault, target: Target) -> None:
    scheduler = target.rig.scheduler
    ended = scheduler.process
    target.rig.frontend().kill()
    wait_until(lambda: ended.poll() is not None, "the end of a scheduler without frontend")
    assert ended.returncode != 0, "a scheduler whose frontend was killed must not exit with 0"
    target.rig.wait_successor(scheduler)


def _raise_in_step(_: Fault, target: Target) -> None:
    order = target.rig.folder / "raise"
    order.touch()
    wait_until(lambda: not order.exists(), "a step that takes the order to raise")


def _bad_row(fault: Fault, target: Target) -> None:
    run = _ask_marked(BAD_ROW_MARK, fault, target)
    assert run.error is not None
    assert run.error.reason == "INVALID_LOGITS", run.error


def _poison(fault: Fault, target: Target) -> None:
    mark = POISON_LATER_MARK if fault.is_upward else POISON_MARK
    run = _ask_marked(mark, fault, target)
    assert run.error is not None
    assert run.error.reason == "POISON_REQUEST", run.error


def _ask_marked(mark: tuple[int, ...], fault: Fault, target: Target) -> Run:
    source = random.Random(fault.draw)
    ids = [*mark, *(source.randrange(100, 250) for _ in range(20))]
    request = StormRequest(
        seed=fault.draw,
        prompt="",
        options={"token_ids": ids, "seed": fault.draw, "max_tokens": 32, "ignore_eos": True},
    )
    return target.streams.ask(request).result(FAILURE_LIMIT_S)


def _fill_disk(fault: Fault, target: Target) -> None:
    """Keep every service from making a file longer for a while."""
    processes = list(target.rig.services().values())
    _limit_files(processes, 0)
    time.sleep(fault.lasts_s)
    _until_logged(target)
    _limit_files(processes, psutil.RLIM_INFINITY)


def _limit_files(processes: list[psutil.Process], size: int) -> None:
    for process in processes:
        process.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))


def _jump_clock(fault: Fault, target: Target) -> None:
    """Set the wall clock to any time within ten years of now."""
    target.rig.set_clock(random.Random(fault.draw).uniform(-3e8, 3e8))
    _until_logged(target)


def _until_logged(target: Target) -> None:
    """Wait for enough steps that the scheduler has logged some of them."""
    num_before = target.rig.stats().steps
    wait_until(
        lambda: target.rig.stats().steps > num_before + 2 * DECODE_LINE_INTERVAL,
        "lines of the log on steps",
    )


_ACTIONS: dict[Kind, Callable[[Fault, Target], None]] = {
    Kind.RESET: _reset,
    Kind.BLACKHOLE: _blackhole,
    Kind.SLOW_LINK: _slow_link,
    Kind.CUT_FRAME: _damage("cut"),
    Kind.CORRUPT_BYTES: _damage("flip"),
    Kind.DUPLICATED: _damage("twice"),
    Kind.REORDERED: _damage("swap"),
    Kind.DROPPED: _damage("drop"),
    Kind.CUT_MESSAGE: _damage("cut"),
    Kind.CORRUPT_MESSAGE: _damage("flip"),
    Kind.UNREACHABLE: _make_unreachable,
    Kind.CLIENT_RESET: _reset_clients,
    Kind.EXECUTOR_KILLED: _kill_executor,
    Kind.EXECUTOR_PAUSED: _pause_executor,
    Kind.EXECUTOR_HUNG: _hang_executor,
    Kind.EXECUTOR_DRAINED: _stop_executor,
    Kind.OTHER_WEIGHTS: _other_weights,
    **FLEET_ACTIONS,
    **RANK_ACTIONS,
    Kind.SCHEDULER_KILLED: _kill_scheduler,
    Kind.SCHEDULER_STOPPED: _stop_scheduler,
    Kind.SCHEDULER_PAUSED: _pause(lambda rig: psutil.Process(rig.scheduler.process.pid)),
    Kind.FRONTEND_PAUSED: _pause(Rig.frontend),
    Kind.FRONTEND_KILLED: _kill_frontend,
    Kind.STEP_RAISES: _raise_in_step,
    Kind.STEP_HANGS: _hang_step,
    Kind.BAD_ROW: _bad_row,
    Kind.POISON: _poison,
    Kind.DISK_FULL: _fill_disk,
    Kind.CLOCK_JUMP: _jump_clock,
}
