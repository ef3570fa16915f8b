"""Measurement of the memory that the heaviest steps need beside weights and KV."""

from __future__ import annotations

import numpy as np
import structlog

from executor_svc.device.memory_probe import MemoryMeter
from executor_svc.memory.activations import prompt_lengths
from executor_svc.memory.kv_memory import KvMemory
from executor_svc.model.loader import LoadedModel
from executor_svc.step.runner import ModelRunner
from tandem.engine_config import EngineConfig
from tandem.errors import OutOfMemory
from tandem.link.batch import ROW_SAMPLES, Admission, Batch, Int32Column
from tandem.sampling_params import SamplingParams

_log = structlog.get_logger(__name__)

_SAMPLING = SamplingParams(temperature=1.0, top_k=0, top_p=0.9, seed=0)
"""Sampling with top_p, the sampler's longest path."""


def measure_activations(
    model: LoadedModel,
    limits: EngineConfig,
    meter: MemoryMeter,
    *,
    num_slots: int,
    batch_invariant: bool = False,
) -> int:
    """
    Measure a step of `max_total_tokens` prompt tokens, with as many sampling rows as possible, and
    a decode of `max_batch_size` rows at full length, before any KV is allocated.

    The steps write into a scratch cache of one layer, which is not counted. Memory that a runner
    holds (token histories, rotations, static decode steps on a GPU) is counted.

    Returns:
        Most bytes needed beyond those in use before.

    Raises:
        OutOfMemory: Not even such a step fits.
    """
    prompts = prompt_lengths(limits)
    scratch = _scratch_blocks(limits, prompts)
    try:
        kv = KvMemory(
            model.rank_config,
            scratch,
            limits.block_size,
            model.dtype,
            model.device,
            shares_layers=True,
        )
        peak = meter.peak_of(
            lambda: _run_heaviest_steps(
                model, limits, kv, prompts, num_slots, batch_invariant=batch_invariant
            )
        )
    except OutOfMemory as error:
        raise OutOfMemory(
            "No available memory for the cache blocks. Beside the weights not even the heaviest "
            f"step fits on {model.device}, {sum(prompts)} prompt tokens or {limits.max_batch_size} "
            "sequences: lower max_total_tokens or max_batch_size"
        ) from error
    _log.info("activations_measured", bytes=peak, prompt_tokens=sum(prompts))
    return peak


def _run_heaviest_steps(
    model: LoadedModel,
    limits: EngineConfig,
    kv: KvMemory,
    prompts: list[int],
    num_slots: int,
    *,
    batch_invariant: bool,
) -> None:
    runner = ModelRunner(
        model,
        kv,
        num_slots=num_slots,
        max_model_len=limits.max_model_len,
        boot_id="profile",
        batch_invariant=batch_invariant,
        kv_knob="gpu_memory_utilization",
        static_rows=static_rows(model, limits),
    )
    runner.execute(_prefill(prompts, limits.block_size), 0)
    runner.reset()
    runner.execute(_decode(limits), 0)


def static_rows(model: LoadedModel, limits: EngineConfig) -> int:
    """
    Return the most rows of static decode steps: none on a CPU, and none of a model of several
    stages, because a static step computes from tokens to tokens.
    """
    is_whole = model.groups.pipeline is None
    return limits.max_batch_size if model.device.type == "cuda" and is_whole else 0


def _scratch_blocks(limits: EngineConfig, prompts: list[int]) -> int:
    for_prompts = sum(_blocks(length, limits.block_size) for length in prompts)
    for_decodes = _blocks(limits.max_model_len, limits.block_size) + limits.max_batch_size
    return max(for_prompts, for_decodes)


def _prefill(prompts: list[int], block_size: int) -> Batch:
    admits, first = [], 1
    for slot, length in enumerate(prompts):
        num_blocks = _blocks(length, block_size)
        blocks = np.arange(first, first + num_blocks, dtype=np.int32)
        admits.append(_admission(slot, length, 0, blocks))
        first += num_blocks
    return _batch(admits, np.array(prompts, np.int32), np.zeros(len(prompts), np.int32))


def _decode(limits: EngineConfig) -> Batch:
    """Make a batch of rows at full length that share all blocks but the last, which each writes."""
    rows = min(limits.max_batch_size, limits.max_total_tokens)
    cached = limits.max_model_len - 1
    num_shared = cached // limits.block_size
    shared = np.arange(1, num_shared + 1, dtype=np.int32)
    admits = [
        _admission(slot, cached + 1, cached, np.append(shared, np.int32(num_shared + 1 + slot)))
        for slot in range(rows)
    ]
    return _batch(admits, np.ones(rows, np.int32), np.full(rows, cached, np.int32))


def _admission(slot: int, num_tokens: int, num_cached: int, blocks: Int32Column) -> Admission:
    return Admission(
        slot=slot,
        generation=1,
        token_ids=np.zeros(num_tokens, np.int32),
        num_prompt_tokens=num_tokens,
        num_cached_tokens=num_cached,
        block_ids=blocks,
        sampling=_SAMPLING,
    )


def _batch(admits: list[Admission], num_tokens: Int32Column, start: Int32Column) -> Batch:
    return Batch(
        admits=tuple(admits),
        row_slot=np.arange(len(admits), dtype=np.int32),
        row_num_tokens=num_tokens,
        row_start=start,
        row_flags=np.full(len(admits), ROW_SAMPLES, np.uint8),
    )


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
