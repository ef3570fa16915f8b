"""Several runners of a real, tiny model in one engine."""

from __future__ import annotations

import pytest
import torch

from executor_svc.device import memory_probe
from executor_svc.device.memory_probe import Reading
from scheduler_svc.core.request.options import Routing
from tandem.engine_config import EngineConfig
from tandem_embedded import ConfigError, CoreOptions, InferenceEngine
from tests.clients.embedded.parallel.fleet import PROMPTS, SEEDED, answer_of, answers, build, by_id
from tests.model_zoo import llama_mha


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return llama_mha(tmp_path_factory.mktemp("models") / "llama_mha")


@pytest.fixture(scope="module")
def alone(model_dir):
    """Answers of one runner."""
    return answers(build(model_dir))


class TestTokens:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "settings",
        [
            {"dp_size": 2},
            {"dp_size": 3, "window": 2},
            {"device": ["cpu", "cpu"], "options": CoreOptions(routing=Routing.LONGEST_PREFIX)},
            {"dp_size": 2, "cpu_extension": "off"},
        ],
        ids=["two", "three-window2", "prefix", "torch"],
    )
    def test_they_are_those_of_one_runner(self, model_dir, alone, settings):
        """
        Greedy and seeded tokens, choices, penalties, log probabilities and stop strings are those
        of one runner, and all runners compute.
        """
        with build(model_dir, **settings) as engine:
            assert alone == answers(engine)
            assert all(count > 10 for count in engine.get_metrics().steps_by_runner)
            assert 0 == engine.get_memory_stats().used_blocks
            engine.check_integrity()

    @pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
    def test_they_are_the_same_across_a_suspension(self, model_dir, mode):
        """
        All runners give their KV memory back as the mode says, and take it again.
        """
        wanted = [answer_of(build(model_dir).complete(prompt, SEEDED)) for prompt in PROMPTS]
        with build(model_dir, dp_size=2, kv_cache_management_mode=mode) as engine:
            for prompt in PROMPTS:
                engine.submit_request(prompt, SEEDED)
            for _ in range(12):
                engine.step()
            memories = [backend.runner._kv for backend in engine._backends]
            num_bytes = memories[0].device_bytes
            engine.suspend()
            left = num_bytes if mode == "persist" else 0
            assert [left] * 2 == [memory.device_bytes for memory in memories]
            engine.resume()
            assert wanted == [answer_of(request) for request in by_id(engine.run())]

    def test_chat_and_streams(self, model_dir):
        """
        Several answers of a stream are those of one runner.
        """
        texts = []
        for size in (1, 2):
            with build(model_dir, dp_size=size) as engine:
                pieces: dict[int, str] = {}
                for text, _, choice in engine.stream(PROMPTS[0], SEEDED):
                    pieces[choice] = pieces.get(choice, "") + text
                texts.append(pieces)
        assert texts[0] == texts[1]


class TestMemory:
    def test_runners_of_one_device_share_weights_and_have_kv_of_their_own(self, model_dir):
        """
        The model is held once; each runner has all blocks of the config.
        """
        with build(model_dir, dp_size=2) as engine:
            first, second = (backend.runner for backend in engine._backends)
            assert first._model is second._model
            assert 128 == first._kv.num_blocks == second._kv.num_blocks
            addresses = [one._kv.layers[0].data_ptr() for one in (first, second)]
            assert addresses[0] != addresses[1]
            assert 256 == engine.get_memory_stats().total_blocks

    def test_default_memory_is_shared_out(self, model_dir, monkeypatch):
        """
        Without limits, runners of one device get equal parts of the memory that one would get.
        """

        class Meter(memory_probe.HostMeter):
            def read(self) -> Reading:
                return Reading(total=1 << 30, free=64 << 20, used=0)

        monkeypatch.setattr(memory_probe, "meter_of", Meter)
        whole = InferenceEngine(None, model_dir, dtype="float32").config.max_num_blocks
        with InferenceEngine(None, model_dir, dtype="float32", dp_size=2) as engine:
            assert whole > 1.5 * engine.config.max_num_blocks
            assert 2 * engine.config.max_num_blocks == engine.get_memory_stats().total_blocks
            assert engine.complete(PROMPTS[0], SEEDED).success

    def test_threads_are_shared_out(self, model_dir):
        """
        Runners on the CPU divide the threads, at least one each.
        """
        before = torch.get_num_threads()
        try:
            for given, each in ((4, 2), (1, 1)):
                build(model_dir, dp_size=2, num_threads=given).close()
                assert each == torch.get_num_threads()
        finally:
            torch.set_num_threads(before)

    def test_device_that_is_not_there_is_refused(self, model_dir):
        """
        Each name of a list is checked before anything is loaded.
        """
        with pytest.raises(ConfigError, match="device must be"):
            InferenceEngine(EngineConfig(), model_dir, device=["cpu", "tpu"])
