"""Suspending an embedded engine, as programs do that train the model in between."""

from __future__ import annotations

import pytest

from tandem.engine_config import EngineConfig
from tandem.errors import OutOfMemory
from tandem_embedded import EngineMemoryError, GenerationParams, InferenceEngine, SchedulerError
from tests.clients.embedded.fake_backend import engine_and_runner, expected
from tests.clients.embedded.parallel.fleet import check_all, fleet, submit_all
from tests.model_zoo import llama_mha

MODES = ["persist", "offload", "recompute"]
PROMPTS = ["The quick brown fox", "jumps over the lazy dog " * 4]
SEEDED = GenerationParams(max_tokens=40, temperature=0.8, top_p=1.0, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return llama_mha(tmp_path_factory.mktemp("models") / "llama_mha")


def build(model_dir, mode: str = "persist", **settings) -> InferenceEngine:
    config = EngineConfig(block_size=8, max_model_len=256, max_total_tokens=64)
    settings = {"dtype": "float32", "num_threads": 1} | settings
    return InferenceEngine(config, model_dir, kv_cache_management_mode=mode, **settings)


class TestRealModel:
    @pytest.mark.parametrize("mode", MODES)
    def test_output_is_the_same_across_a_suspension(self, model_dir, mode):
        """
        An engine that is suspended while one request decodes and another's prompt is in part
        computed gives KV memory back as its mode says, and both get the tokens that they would have
        had.
        """
        plain = build(model_dir)
        wanted = [plain.complete(prompt, SEEDED).output_tokens for prompt in PROMPTS]
        engine = build(model_dir, mode)
        memory = engine._backends[0].runner._kv
        engine.submit_request(PROMPTS[0], SEEDED)
        engine.step()
        engine.submit_request(PROMPTS[1], SEEDED)
        engine.step()
        num_bytes = memory.device_bytes
        engine.suspend()
        assert (num_bytes if mode == "persist" else 0) == memory.device_bytes
        engine.resume()
        assert num_bytes == memory.device_bytes
        completed = sorted(engine.run(), key=lambda request: request.request_id)
        assert wanted == [request.output_tokens for request in completed]
        assert 0 == engine.get_memory_stats().used_blocks
        engine.check_integrity()

    def test_memory_can_be_sized_in_gigabytes(self, model_dir):
        """
        The number of blocks is what the bytes hold, the dummy block counted.
        """
        per_block = build(model_dir)._backends[0].runner._kv.bytes_per_block
        engine = build(model_dir, buffer_size_gb=10.5 * per_block / 2**30)
        assert (9, 9) == (engine.config.max_num_blocks, engine.get_memory_stats().total_blocks)


class TestSuspension:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("window", [1, 3])
    def test_requests_wait_and_go_on(self, mode, window):
        """
        Requests that ran, and those that came meanwhile, have their tokens after the resumption;
        a second suspension and a second resumption do nothing.
        """
        engine, _ = engine_and_runner(window=window, kv_cache_management_mode=mode)
        engine.submit_request("abc", GenerationParams(max_tokens=8))
        for _ in range(4):
            engine.step()
        engine.suspend()
        engine.suspend()
        assert engine.is_suspended
        engine.submit_request("abcd", GenerationParams(max_tokens=8))
        with pytest.raises(SchedulerError, match="call resume"):
            engine.step()
        with pytest.raises(SchedulerError, match="call resume"):
            engine.complete("x")
        engine.resume()
        engine.resume()
        assert not engine.is_suspended
        first, second = sorted(engine.run(), key=lambda request: request.request_id)
        assert expected("abc", 8) == first.output_tokens
        assert expected("abcd", 8) == second.output_tokens
        engine.check_integrity()

    def test_an_aborted_request_is_delivered_while_suspended(self):
        """
        A request that is aborted during a suspension is delivered without a step.
        """
        engine, _ = engine_and_runner()
        request_id = engine.submit_request("abc")
        engine.suspend()
        engine.abort(request_id)
        assert [request_id] == [request.request_id for request in engine.run()]

    def test_a_running_request_that_is_aborted_is_delivered_while_suspended(self):
        """
        A request that ran is delivered too, by a step and not by what cannot go on, though its slot
        is released on the resumption.
        """
        engine, _ = engine_and_runner()
        request_id = engine.submit_request("abc")
        engine.step()
        engine.suspend()
        engine.abort(request_id)
        for drive in (engine.run, lambda: engine.complete("x")):
            with pytest.raises(SchedulerError, match="call resume"):
                drive()
        assert request_id in [request.request_id for request in engine.step()]
        engine.resume()
        assert [] == engine.run()
        assert 0 == engine.get_memory_stats().used_blocks

    def test_memory_that_others_took_is_said_and_can_be_had_later(self, monkeypatch):
        """
        A resumption without memory fails with a memory error and changes nothing; a later one works.
        """
        engine, runner = engine_and_runner(kv_cache_management_mode="offload")
        engine.submit_request("abc", GenerationParams(max_tokens=8))
        engine.step()
        engine.suspend()

        def refuse() -> None:
            raise OutOfMemory("others have it")

        with monkeypatch.context() as patched:
            patched.setattr(runner, "resume", refuse)
            with pytest.raises(EngineMemoryError, match="others have it"):
                engine.resume()
        assert engine.is_suspended
        engine.resume()
        assert expected("abc", 8) == engine.run()[0].output_tokens

    def test_bug_on_the_way_out_of_a_suspension_is_raised_and_the_engine_goes_on(self):
        """
        An error that no step should raise reaches the caller of a resumption, and what ran is
        computed again.
        """
        engine, runner = engine_and_runner()
        engine.submit_request("abc", GenerationParams(max_tokens=8))
        engine.step()
        engine.suspend()
        runner.fail_next = [ValueError("a bug")]
        with pytest.raises(ValueError, match="a bug"):
            engine.resume()
        assert not engine.is_suspended
        (completed,) = [request for _ in range(20) for request in engine.step()]
        assert expected("abc", 8) == completed.output_tokens

    def test_a_suspension_that_fails_where_memory_is_gone_goes_on_elsewhere(self, monkeypatch):
        """
        Where one runner cannot be suspended, and another's memory was taken meanwhile, the error
        has both reasons, and the engine is suspended until a resumption.
        """
        engine, runners = fleet(kv_cache_management_mode="offload")
        submit_all(engine)
        engine.step()

        def refuse(*_given: object) -> None:
            raise OutOfMemory(f"no memory of the {'host' if _given else 'device'}")

        with monkeypatch.context() as patched:
            patched.setattr(runners[1], "suspend", refuse)
            patched.setattr(runners[0], "resume", refuse)
            with pytest.raises(EngineMemoryError, match="no memory of the device") as caught:
                engine.suspend()
        assert "no memory of the host" in str(caught.value.__cause__.__cause__)
        assert engine.is_suspended
        engine.resume()
        check_all(engine)

    def test_a_second_suspension_takes_back_a_resumption_that_was_refused(self, monkeypatch):
        """
        Where one runner came back and another's memory was taken, a suspension suspends the first
        again; one that fails leaves both as they were.
        """
        engine, runners = fleet(kv_cache_management_mode="offload")
        submit_all(engine)
        engine.step()
        engine.suspend()

        def refuse(*_given: object) -> None:
            raise OutOfMemory("others have it")

        with monkeypatch.context() as patched:
            patched.setattr(runners[1], "resume", refuse)
            with pytest.raises(EngineMemoryError):
                engine.resume()
            assert [False, True] == [runner.executor.is_suspended for runner in runners]
            patched.setattr(runners[0], "suspend", refuse)
            with pytest.raises(EngineMemoryError):
                engine.suspend()
            assert [False, True] == [runner.executor.is_suspended for runner in runners]
            assert engine.is_suspended
        engine.suspend()
        assert [True, True] == [runner.executor.is_suspended for runner in runners]
        engine.resume()
        assert [False, False] == [runner.executor.is_suspended for runner in runners]
        check_all(engine)

    def test_a_suspension_that_fails_computes_on(self, monkeypatch):
        """
        A suspension fails, and says so, when the host has no room for the KV memory; the engine is
        not suspended, and what ran is computed again.
        """
        engine, runner = engine_and_runner(kv_cache_management_mode="offload")
        engine.submit_request("abc", GenerationParams(max_tokens=8))
        engine.step()

        def refuse(mode) -> None:
            raise OutOfMemory("no host memory")

        monkeypatch.setattr(runner, "suspend", refuse)
        with pytest.raises(EngineMemoryError, match="no host memory"):
            engine.suspend()
        assert not engine.is_suspended
        assert expected("abc", 8) == engine.run()[0].output_tokens

    def test_a_step_that_fails_on_the_way_to_a_suspension_suspends_nothing(self):
        """
        A suspension fails when slots must be given back first and that fails; the engine is not
        suspended, and what ran is computed again.
        """
        engine, runner = engine_and_runner(kv_cache_management_mode="recompute")
        engine.submit_request("abc", GenerationParams(max_tokens=8))
        engine.step()
        runner.fail_next.append(OutOfMemory("the device is full"))
        with pytest.raises(EngineMemoryError, match="the device is full"):
            engine.suspend()
        assert not engine.is_suspended
        assert expected("abc", 8) == engine.run()[0].output_tokens
        engine.check_integrity()
