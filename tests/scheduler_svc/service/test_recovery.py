from dataclasses import replace

import pytest
import structlog

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.executor_client.link_events import ConnectFailed, StreamMessage
from scheduler_svc.ipc import snapshot
from tandem.errors import IncompatibleExecutor, SessionLost, TandemError
from tandem.link.results import StepFailed
from tests.scheduler_svc.service.fakes.arithmetic_runner import GEOMETRY, expected_outputs

PROMPTS = [[5, 6, 7], [8], list(range(20, 40))]


def _start(bench, *, num_tokens: int = 40, until: int = 5):
    """Submit three requests and wait until the first has some output."""
    frontend = bench.frontend()
    for stream_id, prompt in enumerate(PROMPTS):
        frontend.submit(stream_id, prompt, num_tokens)
    bench.until(lambda: len(frontend.tokens.get(0, [])) >= until)
    return frontend


def _assert_all_complete(bench, frontend, num_tokens: int = 40) -> None:
    bench.until(lambda: len(frontend.ended) == len(PROMPTS))
    for stream_id, prompt in enumerate(PROMPTS):
        assert expected_outputs(prompt, num_tokens) == frontend.tokens[stream_id]
    bench.until(lambda: not bench.link.runner.slots.live.any())


class TestBrokenStream:
    @pytest.mark.parametrize("window", [1, 2, 4])
    def test_is_attached_again_and_nothing_is_recomputed(self, make_bench, window):
        """
        A cut stream costs no token and no second session; results that were missed come again.
        """
        bench = make_bench(window=window)
        bench.link.boot("boot-1")
        frontend = _start(bench)
        for _ in range(3):
            bench.link.cut()
            for _ in range(3):
                bench.turn()
        _assert_all_complete(bench, frontend)
        assert 1 == bench.link.commands.count("connect")
        metrics = snapshot.decode_metrics(bench.reply(frontend, "metrics").result)
        assert (1, 3) == (metrics.stats.executor_sessions, metrics.stats.executor_reattachments)
        prompt_tokens = sum(len(prompt) for prompt in PROMPTS)
        assert prompt_tokens == metrics.stats.prefill_tokens

    def test_steps_that_did_not_arrive_are_sent_again(self, bench):
        """A step computed while detached is not computed twice, and its result comes again."""
        frontend = _start(bench)
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        bench.link.cut()
        bench.link.compute()
        bench.link.is_holding = False
        _assert_all_complete(bench, frontend)
        assert bench.link.num_replayed >= 1


class TestLostSession:
    @pytest.mark.parametrize("window", [1, 2, 4])
    def test_new_boot_goes_on_with_the_same_streams(self, make_bench, window):
        """
        Every request continues at its next token after an executor died, and no token is repeated.
        """
        bench = make_bench(window=window)
        bench.link.boot("boot-1")
        frontend = _start(bench)
        for boot in range(2, 5):
            bench.link.kill()
            bench.turn()
            bench.link.boot(f"boot-{boot}")
            for _ in range(4):
                bench.turn()
        _assert_all_complete(bench, frontend)
        assert {} == frontend.failed

    def test_failed_step_opens_a_new_session(self, bench):
        """StepFailed ends the session; requests are admitted again in a new one."""
        frontend = _start(bench)
        bench.link.is_holding = True
        bench.until(lambda: bench.link._pending)
        step = bench.link._pending[0]
        bench.link._pending.clear()
        failed = StepFailed(
            boot_id="boot-1", step_id=step.step_id, reason="INTERNAL", message="a test"
        )
        bench.link.post(StreamMessage(stream=bench.link._stream, message=failed))
        bench.link.is_holding = False
        _assert_all_complete(bench, frontend)
        assert ["connect", "attach"] * 2 == bench.link.commands

    def test_session_lost_by_the_executor(self, bench):
        """An executor that gives the session up is asked for a new one."""
        frontend = _start(bench)
        bench.link.cut(SessionLost("a test"))
        _assert_all_complete(bench, frontend)
        assert ["connect", "attach"] * 2 == bench.link.commands

    def test_request_ended_while_away_is_not_admitted_again(self, bench):
        """A request that ends during recovery ends at once and never runs again."""
        frontend = _start(bench)
        bench.link.kill()
        bench.turn()
        frontend.end(0)
        bench.until(lambda: 0 in frontend.ended)
        frontend.submit(3, [9], 9, deadline_s=0.0)
        bench.until(lambda: 3 in frontend.ended)
        assert FinishReason.DEADLINE == frontend.ended[3].reason
        bench.link.boot("boot-2")
        bench.until(lambda: len(frontend.ended) == 4)
        assert expected_outputs(PROMPTS[1], 40) == frontend.tokens[1]
        assert len(frontend.tokens[0]) < 40

    def test_new_requests_wait_for_recovery(self, bench):
        """Requests that arrive while the executor is away are served when it is back."""
        frontend = _start(bench)
        bench.link.kill()
        bench.until(lambda: not frontend.availabilities[-1].executor_attached)
        frontend.submit(7, [77], 5)
        bench.until(lambda: 7 in frontend.accepted)
        bench.link.boot("boot-2")
        bench.until(lambda: 7 in frontend.ended)
        assert expected_outputs([77], 5) == frontend.tokens[7]


class TestReplacedExecutor:
    def test_other_model_fails_running_requests(self, bench):
        """Requests never continue on another model; new ones run on it."""
        frontend = _start(bench)
        bench.link.kill()
        bench.turn()
        bench.link.boot("boot-2", fingerprint="e" * 64)
        bench.until(lambda: len(frontend.failed) == 3)
        assert {"MODEL_CHANGED"} == {failed.reason for failed in frontend.failed.values()}
        frontend.submit(7, [77], 5)
        bench.until(lambda: 7 in frontend.ended)
        assert ["f" * 64, "e" * 64] == [model.revision for model in frontend.models]

    def test_request_tokenized_for_another_model_is_refused(self, bench):
        """Token ids of one model never run on another, even when they were on the way."""
        frontend = bench.frontend()
        frontend.submit(1, [5], 1, model_revision="e" * 64)
        frontend.submit(2, [5], 1, model_revision="f" * 64)
        bench.until(lambda: 1 in frontend.refused and 2 in frontend.ended)
        assert frontend.refused[1].reason == "MODEL_CHANGED"

    def test_less_memory_fails_only_what_no_longer_fits(self, bench):
        """Requests that fit a smaller executor go on, and the others fail with NEVER_FITS."""
        frontend = bench.frontend()
        frontend.submit(0, [5], 8)
        frontend.submit(1, [6], 60)
        bench.until(lambda: len(frontend.tokens.get(1, [])) >= 2)
        bench.link.kill()
        bench.turn()
        bench.link.boot("boot-2", geometry=replace(GEOMETRY, num_blocks=4))
        bench.until(lambda: 0 in frontend.ended and 1 in frontend.failed)
        assert expected_outputs([5], 8) == frontend.tokens[0]
        assert frontend.failed[1].reason == "NEVER_FITS"


class TestGivingUp:
    def test_requests_fail_when_recovery_takes_too_long(self, make_bench):
        """Requests fail after recovery_timeout_s without an executor, and new ones are refused."""
        bench = make_bench(recovery_timeout_s=50.0)
        bench.link.boot("boot-1")
        frontend = _start(bench)
        bench.link.kill()
        bench.turn()
        bench.let_pass(49.0)
        assert {} == frontend.failed
        bench.let_pass(1.5)
        bench.until(lambda: len(frontend.failed) == 3)
        assert {"EXECUTOR_LOST"} == {failed.reason for failed in frontend.failed.values()}
        frontend.submit(7, [7], 1)
        bench.until(lambda: 7 in frontend.refused)
        assert frontend.refused[7].reason == "EXECUTOR_LOST"
        bench.link.boot("boot-2")
        bench.until(lambda: frontend.availabilities[-1].ready)
        frontend.submit(8, [7], 1)
        bench.until(lambda: 8 in frontend.ended)


class TestReadiness:
    def test_turns_off_when_heartbeats_stop_and_on_again(self, make_bench):
        """A silent executor makes the service unready after ready_grace_s, no earlier."""
        bench = make_bench(ready_grace_s=4.0)
        bench.link.boot("boot-1")
        frontend = bench.frontend()
        bench.until(lambda: frontend.availabilities[-1].ready)
        bench.link.is_stopped = True
        bench.let_pass(3.5)
        assert frontend.availabilities[-1].ready
        bench.let_pass(1.0)
        assert not frontend.availabilities[-1].ready
        bench.link.go_on()
        bench.link.beat()
        bench.until(lambda: frontend.availabilities[-1].ready)

    def test_any_message_is_a_sign_of_life(self, make_bench):
        """
        Results count as heartbeats do: an executor that is too busy for heartbeats is not silent.
        """
        bench = make_bench(ready_grace_s=1.0)
        bench.link.boot("boot-1")
        frontend = bench.frontend()
        bench.until(lambda: frontend.availabilities[-1].ready)
        num_told = len(frontend.availabilities)
        for stream_id in range(8):
            bench.let_pass(0.5)
            frontend.submit(stream_id, [5], 1)
            bench.until(lambda n=stream_id: n in frontend.ended)
        assert num_told == len(frontend.availabilities)

    def test_own_absence_is_not_taken_for_the_executors(self, make_bench):
        """A scheduler that was itself stopped for a minute does not find its executor silent."""
        bench = make_bench()
        bench.link.boot("boot-1")
        frontend = bench.frontend()
        bench.until(lambda: frontend.availabilities[-1].ready)
        bench.lead_s += 60.0
        bench.turn()
        bench.link.beat()
        bench.turn()
        assert frontend.availabilities[-1].ready
        assert [True] == [one.ready for one in frontend.availabilities[-1:]]
        assert ["connect", "attach"] == bench.link.commands

    def test_reason_is_logged(self, make_bench):
        """Turning unready is a warning that says why; turning ready is information."""
        bench = make_bench(ready_grace_s=3.0)
        bench.link.boot("boot-1")
        with structlog.testing.capture_logs() as logs:
            frontend = bench.frontend()
            bench.until(lambda: frontend.availabilities[-1].ready)
            bench.link.is_stopped = True
            bench.let_pass(3.5)
            assert not frontend.availabilities[-1].ready
        changes = [entry for entry in logs if entry["event"] == "availability_changed"]
        assert ("info", "the executor is attached and alive") == (
            changes[-2]["log_level"],
            changes[-2]["why"],
        )
        assert ("warning", "the executor is attached but silent") == (
            changes[-1]["log_level"],
            changes[-1]["why"],
        )

    def test_late_step_is_no_progress(self, bench):
        """A step that computes for longer than it may makes the service unready."""
        frontend = bench.frontend()
        bench.link.is_holding = True
        frontend.submit(1, [5], 5)
        bench.until(lambda: bench.link._pending)
        bench.link.beat(elapsed_ms=10_001)
        bench.until(lambda: not frontend.availabilities[-1].progressing)
        assert not frontend.availabilities[-1].ready
        bench.link.is_holding = False
        bench.link.compute()
        bench.link.beat()
        bench.until(lambda: frontend.availabilities[-1].ready)

    def test_refused_executor_leaves_the_service_unready(self, make_bench):
        """An executor that must not be used is not attached, and clients can be told the reason."""
        bench = make_bench()
        frontend = bench.frontend()
        error = IncompatibleExecutor("block_size is set to 16, but the executor has 4")
        bench.link.post(ConnectFailed(error=error, retry_in_s=2.0))
        bench.until(lambda: frontend.availabilities[-1].refusal == error.message)
        assert not frontend.availabilities[-1].ready
        silent = TandemError("nobody answers")
        bench.link.post(ConnectFailed(error=silent, retry_in_s=2.0))
        bench.until(lambda: not frontend.availabilities[-1].refusal)
