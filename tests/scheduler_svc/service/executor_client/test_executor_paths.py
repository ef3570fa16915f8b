"""Addresses that are silent, and several addresses of one executor."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from scheduler_svc.executor_client.probe import ExecutorProbe
from scheduler_svc.ipc import snapshot
from tests.faults.proxies.tcp_proxy import TcpProxy
from tests.ports import free_port
from tests.scheduler_svc.service.fakes.grpc_executor import GrpcExecutor
from tests.scheduler_svc.service.three_requests import NUM_PROMPT_TOKENS, assert_all_complete, start


class _Silence(grpc.GenericRpcHandler):
    def __init__(self, is_over: threading.Event) -> None:
        self._is_over = is_over

    def service(self, _details):
        return grpc.unary_unary_rpc_method_handler(lambda *_: self._is_over.wait())


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield an address that takes every call and answers none."""
    is_over = threading.Event()
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((_Silence(is_over),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    is_over.set()
    server.stop(grace=None).wait()


@pytest.fixture
def make_executor() -> Iterator[Callable[..., GrpcExecutor]]:
    executors: list[GrpcExecutor] = []

    def make(**changes) -> GrpcExecutor:
        executors.append(GrpcExecutor(f"127.0.0.1:{free_port()}", **changes).start())
        return executors[-1]

    yield make
    for executor in executors:
        executor.kill()


class Path:
    """A path to an executor that can break while others stay."""

    def __init__(self, target: str) -> None:
        self._proxy = TcpProxy(target)
        self.address = f"127.0.0.1:{self._proxy.start()}"

    def refuse(self) -> None:
        """End all connections, and each new one at once."""
        self._proxy._target = "127.0.0.1", free_port()
        self._proxy.reset()

    def swallow(self) -> None:
        """Drop all packets."""
        self._proxy.flow(on=False)


@pytest.fixture
def serve(make_bench):
    """Return a function that serves with executors at these addresses."""

    def make(*addresses: str, **settings):
        first, *others = addresses
        known = {"executor": first, "standby": ",".join(others), "lease_ms": 1000}
        return make_bench(has_real_link=True, **(known | settings))

    return make


def assert_same_session(bench, frontend, executor: GrpcExecutor) -> None:
    """
    Check that all requests end in the one session, with every step and prompt token computed once.
    """
    assert_all_complete(bench, frontend)
    assert 1 == executor.num_sessions
    bench.until(lambda: not bench.session._in_flight)
    assert executor.end.last_completed_step_id == executor.runner.num_steps
    stats = snapshot.decode_stats(bench.reply(frontend, "stats").result)
    assert (NUM_PROMPT_TOKENS, 0) == (stats.prefill_tokens, stats.recomputed_tokens)


class TestProbe:
    def test_leaving_it_ends_its_calls_without_a_word(self, caplog):
        """Calls of a probe are ended when the probe is left, and nothing is logged."""
        before = set(threading.enumerate())
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            with ExecutorProbe([address], deadline_s=3600.0) as probe:
                probe._ask_next()
                readers = set(threading.enumerate()) - before
            assert readers
            for reader in readers:  # of its connection, on which calls end
                reader.join()
        assert [] == caplog.records


class TestSilentAddress:
    def test_first_session_does_not_wait_for_it(self, serve, silent, make_executor):
        """
        A living executor is found beside an address that never answers, however long that takes.
        """
        executor = make_executor()
        bench = serve(silent, executor.address)
        assert_all_complete(bench, start(bench))
        assert executor.address == bench.session.address

    @pytest.mark.slow
    def test_work_moves_past_it(self, serve, silent, make_executor):
        """
        Work of a dead executor moves to a living one though an address between them is silent.
        """
        dead, living = make_executor(boot_id="a"), make_executor(boot_id="b")
        bench = serve(dead.address, silent, living.address)
        frontend = start(bench)
        dead.kill()
        assert_all_complete(bench, frontend)
        assert living.address == bench.session.address

    def test_executor_that_comes_back_where_it_was_is_found(self, serve, silent, make_executor):
        """A new session with the preferred address does not wait for a silent one behind it."""
        executor = make_executor()
        bench = serve(executor.address, silent)
        frontend = start(bench)
        executor.end.lose("a test")
        executor.cut()
        assert_all_complete(bench, frontend)
        assert 2 == executor.num_sessions


@pytest.mark.usefixtures("one_by_one")
class TestOtherPath:
    @pytest.mark.slow
    def test_broken_path_keeps_the_session(self, serve, make_executor):
        """
        A session goes on at another address of the same executor when its own address refuses.
        """
        executor = make_executor()
        path = Path(executor.address)
        bench = serve(path.address, executor.address)
        frontend = start(bench)
        path.refuse()
        assert_same_session(bench, frontend, executor)
        assert executor.address == bench.session.address

    def test_silent_path_is_left_before_the_executor_is_given_up(self, serve, make_executor):
        """A path that swallows all packets is left for the other path at the first new stream."""
        executor = make_executor()
        path = Path(executor.address)
        bench = serve(path.address, executor.address)
        frontend = start(bench)
        path.swallow()
        bench.let_pass(6.0)
        assert_same_session(bench, frontend, executor)
        assert executor.address == bench.session.address

    @pytest.mark.slow
    def test_same_executor_goes_before_another(self, serve, make_executor):
        """Work does not move to another executor while its own answers at some address."""
        executor, other = make_executor(boot_id="a"), make_executor(boot_id="b")
        path = Path(executor.address)
        bench = serve(path.address, other.address, executor.address)
        frontend = start(bench)
        path.refuse()
        assert_same_session(bench, frontend, executor)
        assert 0 == other.num_sessions

    @pytest.mark.slow
    def test_path_is_found_back(self, serve, make_executor):
        """Each of two paths is used again when the other one breaks."""
        executor = make_executor()
        first, second = Path(executor.address), Path(executor.address)
        bench = serve(first.address, second.address)
        frontend = start(bench)
        first.refuse()
        bench.until(lambda: bench.session.counts.executor_reattachments == 1)
        first._proxy._target = tuple(_split(executor.address))
        second.refuse()
        bench.until(lambda: bench.session.counts.executor_reattachments == 2)
        assert first.address == bench.session.address
        assert 1 == executor.num_sessions
        assert {} == frontend.failed

    def test_silence_does_not_move_work_to_another_executor(self, serve, make_executor):
        """
        An executor that is silent for less than lost_after_s keeps its work, though another is
        free.
        """
        executor, other = make_executor(boot_id="a"), make_executor(boot_id="b")
        path = Path(executor.address)
        bench = serve(path.address, other.address)
        frontend = start(bench)
        path.swallow()
        bench.let_pass(6.0)
        path._proxy.flow(on=True)
        assert_same_session(bench, frontend, executor)
        assert 0 == other.num_sessions


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
