"""The heaviest steps, the memory they need, and an executor sized by them."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.config.settings import load_settings
from executor_svc.device.memory_probe import Reading
from executor_svc.engine import load_engine
from executor_svc.memory.activations import (
    estimate_activations,
    prompt_lengths,
    scored_positions,
)
from executor_svc.memory.decode_bytes import decode_scratch_bytes, static_step_bytes
from executor_svc.memory.kv_memory import KvMemory
from executor_svc.model.decoder import Decoder
from executor_svc.model.loader import load_model
from executor_svc.step import heaviest_steps
from executor_svc.step.heaviest_steps import measure_activations
from executor_svc.step.runner import ModelRunner
from tandem.engine_config import EngineConfig
from tandem.errors import OutOfMemory
from tandem.link.batch import Batch
from tests.executor_svc.model.test_load_memory import CONFIG, write_zeros

Zoo = Callable[[str], Path]
MIB = 2**20


class CountingMeter:
    """A device of given size on which work needs `peak` bytes; keeps the order of what was asked."""

    def __init__(self, total: int = 64 * MIB, free: int = 64 * MIB, peak: int = 5 * MIB) -> None:
        self.reading = Reading(total=total, free=free, used=0)
        self.peak = peak
        self.asked: list[str] = []

    def read(self) -> Reading:
        self.asked.append("read")
        return self.reading

    def peak_of(self, work: Callable[[], None]) -> int:
        self.asked.append("peak")
        work()
        return self.peak


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Return the list of every batch that a runner executes from here on."""
    seen: list[Batch] = []
    execute = ModelRunner.execute

    def spy(self: ModelRunner, batch: Batch, step_id: int):
        seen.append(batch)
        return execute(self, batch, step_id)

    monkeypatch.setattr(ModelRunner, "execute", spy)
    return seen


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Turn off the collector of reference cycles: what is in one is not freed meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class TestHeaviestSteps:
    @given(rows=st.integers(1, 40), tokens=st.integers(1, 4000), longest=st.integers(1, 900))
    def test_prompts_fill_the_step(self, rows: int, tokens: int, longest: int):
        """
        The heaviest prompts, as many as a step may have and none over the longest, fill the step or
        are all full.
        """
        limits = EngineConfig(
            max_batch_size=rows, max_total_tokens=tokens, max_model_len=longest, block_size=1
        )
        found = prompt_lengths(limits)
        assert min(rows, tokens) == len(found)
        assert 1 <= min(found) <= max(found) <= longest
        assert min(tokens, len(found) * longest) == sum(found)
        assert found == sorted(found, reverse=True)

    def test_prefill_and_decode_at_the_limits_are_run(self, zoo: Zoo, steps: list[Batch]):
        """
        One step computes max_total_tokens, one decodes max_batch_size rows at full length; all sample.
        """
        model = load_model(zoo("llama_gqa_llama3_rope"), dtype="float32", device="cpu")
        limits = EngineConfig(
            block_size=8, max_batch_size=5, max_total_tokens=100, max_model_len=61
        )
        meter = CountingMeter()
        assert 5 * MIB == measure_activations(model, limits, meter, num_slots=10)
        prefill, decode = steps
        assert [61, 36, 1, 1, 1] == prefill.row_num_tokens.tolist()
        assert [1] * 5 == decode.row_num_tokens.tolist()
        assert [60] * 5 == decode.row_start.tolist()
        assert prefill.row_flags.all()
        assert decode.row_flags.all()

    def test_nothing_that_was_measured_with_outlives_the_measurement(
        self, zoo: Zoo, monkeypatch: pytest.MonkeyPatch, uncollected: None
    ):
        """
        The scratch cache and the runner's buffers are freed at once, static steps' as well, so that what is read next on the device has room for the KV.
        """
        model = load_model(zoo("llama_mha"), dtype="float32", device="cpu")
        limits = EngineConfig(max_batch_size=4, max_total_tokens=100, max_model_len=61)
        monkeypatch.setattr(heaviest_steps, "static_rows", lambda *_: 4)
        scratch: list[weakref.ref[torch.Tensor]] = []
        build = KvMemory.__init__

        def spy(self: KvMemory, *args: object, **kwargs: object) -> None:
            build(self, *args, **kwargs)
            scratch.append(weakref.ref(self.layers[0]))

        monkeypatch.setattr(KvMemory, "__init__", spy)
        measure_activations(model, limits, CountingMeter(), num_slots=8)
        assert [None] == [layer() for layer in scratch]

    def test_step_that_does_not_fit_is_refused_before_kv(
        self, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
    ):
        """
        An executor without room for its heaviest step names the settings that make it smaller.
        """
        model = load_model(zoo("llama_mha"), dtype="float32", device="cpu")
        limits = EngineConfig(max_batch_size=5, max_total_tokens=100, max_model_len=61)
        monkeypatch.setattr(Decoder, "forward", lambda *_: torch.empty(2**50))
        with pytest.raises(OutOfMemory) as caught:
            measure_activations(model, limits, CountingMeter(), num_slots=10)
        assert caught.value.message.startswith("No available memory for the cache blocks. ")
        assert "100 prompt tokens or 5 sequences: lower max_total_tokens or max_batch_size" in (
            caught.value.message
        )

    def test_estimate_grows_with_every_limit(self, zoo: Zoo):
        """
        More tokens, rows, slots or bytes per number never need less.
        """
        config = load_model(zoo("llama_mha"), dtype="float32", device="cpu").config
        config = replace(config, vocab_size=100_000)

        def estimate(
            num_slots: int = 8,
            dtype: torch.dtype = torch.float32,
            on_gpu: bool = False,
            **limits: int,
        ) -> int:
            return estimate_activations(
                config, EngineConfig(**limits), num_slots=num_slots, dtype=dtype, on_gpu=on_gpu
            )

        assert estimate() < estimate(max_total_tokens=8192)
        assert estimate(max_batch_size=64) < estimate(max_batch_size=4096)
        assert estimate() < estimate(num_slots=9)
        assert estimate(dtype=torch.float16) < estimate(dtype=torch.float32)
        assert estimate() < estimate(on_gpu=True) < estimate(on_gpu=True, max_batch_size=512)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_estimate_has_room_for_parts_of_sums(self, zoo: Zoo, dtype: torch.dtype):
        """
        Ranks need memory for sums in float32.
        """
        config = load_model(zoo("llama_mha"), dtype="float32", device="cpu").config
        config = replace(config, vocab_size=8)  # so that layers need the most
        limits = EngineConfig(max_batch_size=4, max_total_tokens=4096)
        alone, shared = (
            estimate_activations(config, limits, num_slots=8, dtype=dtype, tp_size=tp_size)
            for tp_size in (1, 2)
        )
        assert shared - alone >= 4096 * config.hidden_size * 4

    def test_ranks_divide_the_logits(self, zoo: Zoo):
        """
        Where logits are the most of an estimate, two ranks need half each: none has those of the
        other.
        """
        config = load_model(zoo("llama_mha"), dtype="float32", device="cpu").config
        config = replace(config, vocab_size=100_000)
        limits = EngineConfig(max_batch_size=64, max_total_tokens=64)
        alone, shared = (
            estimate_activations(config, limits, num_slots=2, dtype=torch.float32, tp_size=tp_size)
            for tp_size in (1, 2)
        )
        assert shared < 0.6 * alone

    def test_estimate_has_room_for_scores_of_prompts(self, zoo: Zoo):
        """
        Where few rows sample, the logits that score a prompt, a bounded number, are the most of it.
        """
        config = load_model(zoo("llama_mha"), dtype="float32", device="cpu").config
        config = replace(config, vocab_size=100_000)
        few = EngineConfig(max_batch_size=1, max_total_tokens=256)
        estimate = estimate_activations(config, few, num_slots=2, dtype=torch.float32)
        positions = scored_positions(config.vocab_size, on_gpu=False)
        assert 1 < positions < 256
        assert positions * config.vocab_size * 4 < estimate
        whole = EngineConfig(max_batch_size=1, max_total_tokens=512)
        more = estimate_activations(config, whole, num_slots=2, dtype=torch.float32)
        assert more - estimate < config.vocab_size * 4

    @pytest.mark.parametrize("family", ["llama_gqa_llama3_rope", "qwen2_window"])
    def test_static_buffers_are_counted_to_the_byte(self, zoo: Zoo, family: str):
        """
        The bytes that decode steps on a GPU hold are known before they are allocated.
        """
        model = load_model(zoo(family), dtype="float32", device="cpu")
        limits = EngineConfig(block_size=8, max_batch_size=12, max_model_len=61)
        kv = KvMemory(model.config, 4, 8, model.dtype, model.device)
        runner = ModelRunner(model, kv, num_slots=24, max_model_len=61, boot_id="b", static_rows=12)
        assert runner._static is not None
        expected = static_step_bytes(
            model.config, limits, num_slots=24, max_rows=12, bytes_per_number=4
        )
        assert expected == runner._static.step.num_bytes

    def test_scratch_is_that_of_the_most_rows_that_are_split(self, zoo: Zoo):
        """
        Decode attention's scratch grows with the rows of a step up to where rows are not split any more.
        """
        config = load_model(zoo("llama_mha"), dtype="float32", device="cpu").config
        found = [decode_scratch_bytes(config, rows, torch.bfloat16) for rows in (1, 8, 494, 9999)]
        per_row = config.num_heads * 64 * (config.head_dim + 2) * 4
        assert [per_row, 8 * per_row, 494 * per_row, 494 * per_row] == found


class TestSizedExecutor:
    def load(self, directory: Path, meter: CountingMeter, *flags: str):
        argv = ["--model", str(directory), "--device=cpu", "--dtype=float32", "--num-threads=1"]
        settings = load_settings([*argv, "--max-model-len=64", *flags], {})
        return load_engine(settings, "boot", lambda _device: meter)

    def test_utilization_measures_before_kv_is_allocated(self, zoo: Zoo):
        """
        Memory is read before the weights, the heaviest steps are measured after them, and what both leave is KV.
        """
        meter = CountingMeter(peak=20 * MIB)
        about = self.load(
            zoo("llama_mha"), meter, "--gpu-memory-utilization=0.5", "--max-total-tokens=64"
        ).description
        assert ["read", "peak", "read"] == meter.asked
        model = load_model(zoo("llama_mha"), dtype="float32", device="cpu", packs=True)
        left = 32 * MIB - 20 * MIB - model.weight_bytes
        assert left // about.kv_bytes_per_block - 1 == about.num_blocks

    @pytest.mark.parametrize(
        ("flag", "budget"),
        [("--buffer-size-gb=0.0078125", 8 * MIB), ("--mem-fraction-static=0.25", 16 * MIB)],
    )
    def test_other_knobs_measure_nothing(self, zoo: Zoo, flag: str, budget: int):
        """
        A buffer or a static share is divided without a step being run for it.
        """
        meter = CountingMeter()
        about = self.load(zoo("llama_mha"), meter, flag).description
        assert ["read", "read"] == meter.asked
        assert budget // about.kv_bytes_per_block - 1 == about.num_blocks

    def test_refusal_names_the_setting(self, zoo: Zoo):
        """
        An executor that cannot be sized as told does not start, and says which setting to turn.
        """
        meter = CountingMeter(free=16 * MIB)
        with pytest.raises(OutOfMemory, match=r"^Free memory on device \(0\.02/0\.06 GiB\)"):
            self.load(zoo("llama_mha"), meter, "--gpu-memory-utilization=0.5")
        with pytest.raises(OutOfMemory, match="lower buffer_size_gb"):
            self.load(zoo("llama_mha"), meter, "--buffer-size-gb=1")

    @pytest.mark.slow
    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's counters")
    def test_process_stays_within_its_share(self, tmp_path: Path):
        """
        A process sized by the memory it may use runs its heaviest steps and stays within that, the interpreter and
        libraries that it started with aside.
        """
        write_zeros(tmp_path, "F32", 4)
        program = PROGRAM.format(limit=1400 * MIB)
        share = 0.5
        ran = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), str(share)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        found = json.loads(ran.stdout.splitlines()[-1])
        budget = share * 1400 * MIB
        assert found["activations"] > 20 * MIB
        assert 0.5 * budget < found["grown"] <= budget + 48 * MIB
        assert CONFIG["num_hidden_layers"] * 16 * 256 * 2 * 4 == found["kv_bytes_per_block"]


PROGRAM = """
import json, sys
from structlog.testing import capture_logs
from executor_svc.device import memory_probe
from executor_svc.config.settings import load_settings
from executor_svc.engine import load_engine
from executor_svc.device.memory_probe import HostMeter, Reading
from executor_svc.memory.activations import prompt_lengths
from executor_svc.step import heaviest_steps
from executor_svc.step.heaviest_steps import _decode, _prefill
from executor_svc.config.limits import fit_limits

class Limited(HostMeter):
    def read(self):
        found = super().read()
        return Reading(total={limit}, free={limit}, used=found.used)

settings = load_settings(["--model", sys.argv[1], "--device=cpu", "--dtype=float32", "--num-threads=1",
    "--gpu-memory-utilization", sys.argv[2], "--max-total-tokens=512", "--max-model-len=512"], {{}})
before = memory_probe._rss()
memory_probe._reset_peak()
with capture_logs() as events:
    engine = load_engine(settings, "boot", Limited)
runner = engine.runner
for layer in runner._kv.layers:
    layer.fill_(1.0)
limits = settings.limits
runner.execute(_prefill(prompt_lengths(limits), limits.block_size), 1)
runner.reset()
runner.execute(_decode(limits), 2)
(planned,) = [event for event in events if event["event"] == "memory_planned"]
print(json.dumps({{
    "grown": memory_probe._peak() - before,
    "activations": planned["activation_bytes"],
    "kv_bytes_per_block": engine.description.kv_bytes_per_block,
}}))
"""
