import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import structlog

from scheduler_svc.executor_client import link
from scheduler_svc.ipc import snapshot
from tandem.errors import SessionHeld
from tandem.link.codec.checksum import seal
from tandem.link.session import SchedulerId
from tests.ports import free_port
from tests.scheduler_svc.service.fakes.arithmetic_runner import GEOMETRY
from tests.scheduler_svc.service.fakes.grpc_executor import GrpcExecutor
from tests.scheduler_svc.service.service_bench import DEADLINE_S
from tests.scheduler_svc.service.three_requests import (
    NUM_PROMPT_TOKENS,
    PROMPTS,
    assert_all_complete,
    start,
)

NEXT = SchedulerId(name="next", incarnation="1")


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def make_executor(address) -> Iterator[Callable[..., GrpcExecutor]]:
    executors: list[GrpcExecutor] = []

    def make(**changes) -> GrpcExecutor:
        executors.append(GrpcExecutor(address, **changes).start())
        return executors[-1]

    yield make
    for executor in executors:
        executor.kill()


@pytest.fixture
def bench(make_bench, address):
    return make_bench(has_real_link=True, executor=address, lease_ms=1000, window=2)


class TestTurns:
    def test_results_bring_the_next_steps_without_the_core_thread(self, bench, make_executor):
        """
        The thread that reads results makes every turn that is needed once steps are in flight.
        """
        executor = make_executor()
        bench.real_link.turn_with(bench.loop.turns.turn_now)
        frontend = bench.frontend()
        bench.until(lambda: frontend.availabilities[-1].executor_attached)
        with executor.computing:  # no result comes as long as this thread turns
            for stream_id, prompt in enumerate(PROMPTS):
                frontend.submit(stream_id, prompt, 40)
            bench.until(lambda: len(frontend.accepted) == len(PROMPTS) and bench.session._in_flight)
        deadline_s = time.monotonic() + DEADLINE_S
        while len(frontend.ended) < len(PROMPTS) and time.monotonic() < deadline_s:
            if not frontend.read():
                time.sleep(0.001)
        assert_all_complete(bench, frontend)
        assert threading.get_ident() != bench.loop.turns.made_by


class TestConnecting:
    def test_waits_for_an_executor_that_starts_later(self, bench, make_executor):
        """A scheduler without an executor keeps trying and serves as soon as there is one."""
        frontend = bench.frontend()
        for _ in range(20):
            bench.turn()
        assert not frontend.availabilities[-1].executor_attached
        make_executor()
        assert_all_complete(bench, start(bench, frontend))

    def test_tokenizer_files_are_fetched_once(self, bench, make_executor):
        """Frontends find the files in a directory; a second session of one model reuses them."""
        executor = make_executor(files={"tokenizer.json": b'{"a": 1}', "chat.jinja": b"x" * 9})
        frontend = start(bench)
        (model,) = frontend.models
        folder = bench.path.parents[1] / "models"
        (found,) = folder.iterdir()
        assert str(found) == model.tokenizer_dir
        assert {"tokenizer.json": b'{"a": 1}', "chat.jinja": b"x" * 9} == {
            file.name: file.read_bytes() for file in found.iterdir()
        }
        executor.kill()
        bench.until(lambda: not bench.session.is_attached)
        again = make_executor(boot_id="boot-2")
        assert_all_complete(bench, frontend)
        assert (1, 0) == (executor.num_tokenizer_calls, again.num_tokenizer_calls)

    @pytest.mark.parametrize(
        ("odd", "text"),
        [
            ({"protocol_version": 99}, "step protocol 99"),
            ({"geometry": replace(GEOMETRY, num_slots=0)}, "num_slots 0"),
            ({"sha256": "0" * 64}, "does not match its checksum"),
            ({"files": {"../evil": b"x"}}, "a file named '../evil'"),
        ],
        ids=["protocol", "geometry", "checksum", "file-name"],
    )
    def test_odd_executor_is_left_alone(self, make_bench, make_executor, odd, text):
        """
        An executor that cannot be used is logged with the reason, and no session is opened on it.
        """
        executor = make_executor(**odd)
        assert text in _refusal(make_bench(has_real_link=True, executor=executor.address))
        assert 0 == executor.num_sessions

    @pytest.mark.parametrize(
        ("setting", "text"),
        [
            ({"block_size": 16}, "block_size is set to 16 (flag), but the executor has 4"),
            ({"max_num_blocks": 65}, "max_num_blocks is set to 65 (flag)"),
            ({"max_model_len": 65}, "max_model_len is set to 65 (flag)"),
        ],
        ids=["block-size", "num-blocks", "model-len"],
    )
    def test_contradicting_limit_is_not_ignored(self, make_bench, make_executor, setting, text):
        """A limit set here that the executor cannot keep refuses that executor."""
        executor = make_executor()
        bench = make_bench(has_real_link=True, executor=executor.address, **setting)
        assert text in _refusal(bench)
        assert 0 == executor.num_sessions


def _refusal(bench) -> str:
    """Return the logged reason why the executor was refused; the service is not ready then."""
    with structlog.testing.capture_logs() as logs:
        frontend = bench.frontend()
        bench.until(lambda: any("reason" in entry for entry in logs))
    logs = [entry for entry in logs if "reason" in entry]
    assert not frontend.availabilities[-1].ready
    assert logs[0]["reason"] == "INCOMPATIBLE_EXECUTOR"
    return logs[0]["message"]


class TestHeldSession:
    @pytest.mark.slow
    def test_waits_for_the_lease_and_never_takes_over(self, bench, make_executor):
        """Another scheduler's live session is left alone; when its lease ends, ours begins."""
        executor = make_executor(holder="other", holder_lease_s=500.0)
        with structlog.testing.capture_logs() as logs:
            frontend = bench.frontend()
            bench.until(lambda: any(log.get("reason") == "SESSION_HELD" for log in logs))
        (held,) = [log for log in logs if log.get("reason") == "SESSION_HELD"]
        assert held["holder"] == "other"
        assert int(held["age_ms"]) >= 0
        assert not frontend.availabilities[-1].ready
        executor.lead_s += 501.0
        bench.until(lambda: frontend.availabilities[-1].ready)
        assert "scheduler-1" == executor.end.holder.name

    def test_stop_leaves_a_short_lease(self, make_bench, make_executor, monkeypatch):
        """Another scheduler has to wait a second after an orderly stop, not the whole lease."""
        monkeypatch.setattr(link, "RELEASE_DEADLINE_S", DEADLINE_S)
        executor = make_executor()
        bench = make_bench(has_real_link=True, executor=executor.address, lease_ms=60_000)
        start(bench)
        executor.stopped_s = executor.now()
        bench.real_link.stop(release=True)
        bench.has_real_link = False
        with pytest.raises(SessionHeld):
            executor.end.open_session(NEXT, False, 10.0, executor.now())
        executor.lead_s += 1.1
        assert executor.end.open_session(NEXT, False, 10.0, executor.now())


class TestBreaking:
    @pytest.mark.parametrize("window", [1, 2, 4, 16])
    def test_cut_stream_is_attached_again(self, make_bench, make_executor, address, window):
        """
        A broken stream is opened again within the session: no token is lost or repeated, and
        neither a step nor a prompt token is computed twice.
        """
        executor = make_executor()
        bench = make_bench(has_real_link=True, executor=address, window=window, run_ahead=window)
        frontend = start(bench)
        for num_cuts in range(1, 4):
            executor.cut()
            bench.until(lambda n=num_cuts: bench.session.counts.executor_reattachments == n)
        assert_all_complete(bench, frontend)
        assert 1 == executor.num_sessions
        bench.until(lambda: not bench.session._in_flight)
        assert executor.end.last_completed_step_id == executor.runner.num_steps
        stats = snapshot.decode_stats(bench.reply(frontend, "stats").result)
        assert (NUM_PROMPT_TOKENS, 0) == (stats.prefill_tokens, stats.recomputed_tokens)

    def test_restarted_executor_goes_on_with_all_requests(self, bench, make_executor):
        """A killed executor's successor gets every request again, each at its next token."""
        executor = make_executor()
        frontend = start(bench)
        for boot in (2, 3):
            executor.kill()
            bench.until(lambda: not bench.session.is_attached)
            executor = make_executor(boot_id=f"boot-{boot}")
            bench.until(lambda b=boot: bench.session.counts.executor_sessions == b)
        assert_all_complete(bench, frontend)
        assert {} == frontend.failed

    def test_garbage_on_the_stream_opens_a_new_session(self, bench, make_executor):
        """A message that cannot be decoded ends the session; the next one goes on."""
        executor = make_executor()
        frontend = start(bench)
        executor.garbage = seal(b"\xff\xff\xff")
        assert_all_complete(bench, frontend)
        assert 2 == executor.num_sessions

    def test_message_changed_on_the_way_is_sent_again(self, bench, make_executor):
        """A message that does not match its checksum costs the stream, not the session."""
        executor = make_executor()
        frontend = start(bench)
        executor.garbage = b"\xff\xff\xff"
        assert_all_complete(bench, frontend)
        assert 1 == executor.num_sessions
        assert 1 == bench.session.counts.executor_reattachments

    def test_session_lost_by_the_executor_opens_a_new_one(self, bench, make_executor):
        """SESSION_LOST from the executor leads to a new session with the same requests."""
        executor = make_executor()
        frontend = start(bench)
        executor.end.lose("a test")
        executor.cut()
        assert_all_complete(bench, frontend)
        assert 2 == executor.num_sessions
