"""The executor without a model: its account of idle time, its tokens, its device."""

from __future__ import annotations

import json

import grpc
import numpy as np
import pytest

from executor_svc.model.files.tokenizer_files import TokenizerFile, read_tokenizer_files
from executor_svc.server.server import ExecutorServer
from tandem.errors import InvalidConfig, InvalidModel, ProfileUnsupported, SessionLost
from tandem.executor.v1.executor_service_pb2 import DescribeRequest, ProfileRequest
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.link.batch import Batch
from tandem.link.commands import KvMode
from tandem.link.slots.slot_state import SlotState
from tandem.profile import FEATURE
from tandem_bench.fixed_step.accounting import IdleAccount, StepTimes
from tandem_bench.fixed_step.engine import load_fixed_step
from tandem_bench.fixed_step.runner import FixedStepRunner
from tandem_bench.fixed_step.settings import DEFAULT_TOKENIZER, read_settings
from tandem_bench.fixed_step.tokens import ChainedTokens, vocab_size_of, words_of
from tests.executor_svc.server.harness import DEADLINE_S, refusal, wait_until
from tests.executor_svc.stepping import Row, admission, batch
from tests.link.slots.whole_hash import hash_from_scratch

LONG_STEP_MS = 3_600_000.0
LONG_STEP_NS = int(LONG_STEP_MS * 1e6)
WORDS = np.arange(100, 200, dtype=np.int32)
PROMPT = [65, 66, 67, 68]


def step(start_ns: int, end_ns: int) -> StepTimes:
    return StepTimes(rows=4, start_ns=start_ns, end_ns=end_ns, host_ns=7)


def make_runner(step_ms: float = 0.0) -> tuple[FixedStepRunner, IdleAccount]:
    account = IdleAccount()
    runner = FixedStepRunner(
        SlotState(8, 4, 16, 64),
        ChainedTokens(8, WORDS, 0),
        account,
        boot_id="boot",
        step_ms=step_ms,
    )
    return runner, account


def begin(slot: int = 0, prompt: list[int] = PROMPT) -> Batch:
    return batch(Row(slot, 0, len(prompt)), admits=[admission(slot, prompt, [1 + slot])])


class TestAccount:
    def test_time_between_steps_is_idle(self):
        """
        Idle time is what lies between the end of a step and the start of the next.
        """
        account = IdleAccount()
        account.add(step(100, 200), requests_run=True)
        account.add(step(230, 330), requests_run=True)
        account.add(step(330, 430), requests_run=True)

        report = account.report
        assert (3, 12, 300, 30, 21) == (
            report.steps,
            report.rows,
            report.busy_ns,
            report.idle_ns,
            report.host_ns,
        )
        assert 100 * 30 / 330 == report.idle_percent

    def test_time_without_requests_does_not_count(self):
        """
        After a step that leaves no slot live, and after a reset, waiting is not idle time.
        """
        account = IdleAccount()
        account.add(step(100, 200), requests_run=False)
        account.add(step(5_000, 5_100), requests_run=True)
        account.forget()
        account.add(step(9_000, 9_100), requests_run=True)
        assert 0 == account.report.idle_ns
        assert 0.0 == account.report.idle_percent


class TestTokens:
    def test_token_depends_on_history_not_on_slot(self):
        """
        A sequence gives the same tokens in any slot, and others after another token.
        """
        here, there = make_runner()[0], make_runner()[0]
        one = here.launch(begin(0), 1)().token
        other = there.launch(begin(5), 1)().token
        assert one.tolist() == other.tolist()
        for position in range(4, 12):
            one = here.launch(batch(Row(0, position)), position)().token
            other = there.launch(batch(Row(5, position)), position)().token
            assert one.tolist() == other.tolist()
        changed = make_runner()[0].launch(begin(0, [*PROMPT[:-1], 99]), 1)().token
        assert changed.tolist() != make_runner()[0].launch(begin(0), 1)().token.tolist()

    def test_sequence_that_moves_goes_on_as_it_was(self):
        """
        Prompt and outputs admitted elsewhere give the token that would have come.
        """
        runner = make_runner()[0]
        outputs = runner.launch(begin(), 1)().token.tolist()
        for position in range(4, 9):
            outputs += runner.launch(batch(Row(0, position)), position)().token.tolist()
        moved = make_runner()[0].launch(begin(3, [*PROMPT, *outputs[:-1]]), 1)()
        assert outputs[-1:] == moved.token.tolist()

    def test_words_are_whole_and_of_the_vocabulary(self):
        """
        Tokens to choose from are a space and letters; the bundled tokenizer has hundreds.
        """
        files = read_tokenizer_files(DEFAULT_TOKENIZER)
        vocabulary = json.loads(files[0].content)["model"]["vocab"]
        texts = {number: text for text, number in vocabulary.items()}
        words = words_of(files)
        assert 100 < len(words) == len(set(words.tolist()))
        assert all(texts[word][1:].isalpha() and texts[word][0] == "Ġ" for word in words.tolist())
        assert 4096 == vocab_size_of(files)

    def test_tokenizer_without_words_is_refused(self):
        """
        A tokenizer.json without such words, or none at all, is an invalid model.
        """
        bare = TokenizerFile("tokenizer.json", b'{"model": {"vocab": {"a": 0}}}')
        for files in ((), (bare,)):
            with pytest.raises(InvalidModel, match="byte-level"):
                words_of(files)


class TestDevice:
    def test_steps_launched_ahead_follow_one_another(self):
        """
        A step launched while another runs begins at its end: the device is never idle.
        """
        runner, account = make_runner(LONG_STEP_MS)
        runner.launch(begin(), 1)
        for position in range(4, 7):
            runner.launch(batch(Row(0, position)), position)
        report = account.report
        assert (4, 4 * LONG_STEP_NS, 0) == (report.steps, report.busy_ns, report.idle_ns)

    def test_result_comes_no_sooner_than_the_step_takes(self):
        """
        A result says that its step took at least the fixed time, which a step without rows does not.
        """
        runner, _ = make_runner(2.0)
        assert 2_000_000 <= runner.launch(begin(), 1)().timings.forward_ns
        runner.launch(Batch(), 2)()
        assert 1 == runner.slots.live.sum()

    def test_state_hash_is_that_of_the_slots(self):
        """
        Every batch is applied to slot state as by any executor.
        """
        runner, _ = make_runner()
        runner.launch(begin(), 1)()
        assert runner.state_hash == hash_from_scratch(runner.slots) != 0
        runner.reset()
        assert 0 == runner.state_hash

    def test_suspended_device_takes_no_rows(self):
        """
        While suspended a batch with rows loses the session; RECOMPUTE is refused with live slots.
        """
        runner, _ = make_runner()
        runner.launch(begin(), 1)()
        with pytest.raises(SessionLost):
            runner.suspend(KvMode.RECOMPUTE)
        runner.suspend(KvMode.PERSIST)
        with pytest.raises(SessionLost):
            runner.launch(batch(Row(0, 4)), 2)()
        runner.resume()
        assert 1 == len(runner.launch(batch(Row(0, 4)), 2)().token)


class TestSettings:
    def test_limits_follow_the_rows(self):
        """
        --rows is the largest batch; tokens per step are at least as many.
        """
        settings = read_settings(["--rows", "9000", "--step-ms", "0.6"])
        assert (9000, 9000) == (settings.limits.max_batch_size, settings.limits.max_total_tokens)
        assert 0.6 == settings.step_ms

    @pytest.mark.parametrize(
        "wrong",
        [
            ["--step-ms", "-1"],
            ["--step-ms", "soon"],
            ["--max-inflight-steps", "0"],
            ["--max-inflight-steps", "-1"],
            ["--nothing"],
        ],
        ids=" ".join,
    )
    def test_wrong_flags_are_refused(self, wrong, capsys):
        """
        A flag that makes no sense ends with usage, exit code 2.
        """
        with pytest.raises(SystemExit, match="2"):
            read_settings(wrong)
        assert wrong[0] in capsys.readouterr().err

    def test_limits_that_contradict_each_other_are_refused(self):
        """
        Engine limits have their usual rules.
        """
        with pytest.raises(InvalidConfig, match="block_size"):
            read_settings(["--block-size", "0"])


def test_profile_is_refused():
    """
    An executor without a model offers no profiles and refuses one that is asked for.
    """
    settings = read_settings(["--listen=127.0.0.1:0"])
    server = ExecutorServer(
        lambda boot_id: load_fixed_step(settings, boot_id, IdleAccount()), lambda _: None
    )
    server.listen(settings.listen)
    server.load()
    try:
        with grpc.insecure_channel(server.address) as channel:
            stub = ExecutorServiceStub(channel)
            wait_until(lambda: server._service.engine is not None)
            about = stub.Describe(DescribeRequest(), timeout=DEADLINE_S)
            assert FEATURE not in about.features
            error = refusal(lambda: list(stub.Profile(ProfileRequest(), timeout=DEADLINE_S)))
        assert isinstance(error, ProfileUnsupported)
    finally:
        server.stop()
