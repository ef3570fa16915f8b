"""Modelled machines: their step times and limits, and the sources of these numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.engine_config import EngineConfig
from tandem_simulator.executor.step_time import StepTime, from_hardware

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """
    Modelled executor.

    Attributes:
        name: Name of the preset.
        about: Model and device that it stands for, in a few words.
        step_time: Parameters of the duration of its steps.
        limits: Limits that it is configured with.
        num_host_blocks: KV blocks that fit in the host memory set aside for swapping.
    """

    name: str
    about: str
    step_time: StepTime
    limits: EngineConfig
    num_host_blocks: int


# Data sheet of the H100 SXM: 989 Tflop/s dense bf16, 3.35 TB/s, PCIe 5.0 x16 63 GB/s one way; large
# matrix products, weight reads and pinned copies reach 60 %, 80 % and 80 % of these.
# Model: the published shape of Llama 3 8B (8.03e9 parameters, 32 layers, 32 query and 8 KV heads of
# 128). KV: 2 MiB per block; 80 GB less weights and 10 GB of workspace leave 25,600 blocks.
_H100_8B = Machine(
    name="h100-8b",
    about="8B Llama shape, bf16, one H100 SXM 80 GB, from its data sheet",
    step_time=from_hardware(
        parameters=8.03e9,
        layers=32,
        heads_dim=32 * 128,
        kv_heads_dim=8 * 128,
        value_bytes=2,
        block_size=_BLOCK_SIZE,
        flops_per_s=0.6 * 989e12,
        bytes_per_s=0.8 * 3.35e12,
        host_bytes_per_s=0.8 * 63e9,
        overhead_s=0.0015,
        link_s=0.00015,
    ),
    limits=EngineConfig(
        block_size=_BLOCK_SIZE,
        max_num_blocks=25_600,
        max_batch_size=256,
        max_num_seqs=100_000,
        max_model_len=8192,
        max_total_tokens=2048,
        memory_threshold=1.0,
    ),
    num_host_blocks=16_384,
)

# The same device and model with the KV memory that a larger model, or a smaller device, would
# leave: 3,000 blocks hold 48,000 tokens, so that policies for a shortage of blocks have work.
_H100_8B_TIGHT = replace(
    _H100_8B,
    name="h100-8b-tight",
    about="as h100-8b with KV memory for 48,000 tokens only",
    limits=replace(_H100_8B.limits, max_num_blocks=3000),
    num_host_blocks=6000,
)

# Measured on two vCPUs (Sapphire Rapids, AMX), bf16, 135M Llama shape (30 layers, 9 query and 3 KV
# heads of 64): the step's matrix products take 23.1, 24.2 and 27.1 ms for 1, 8 and 32 rows, and a
# prompt of 128 tokens is computed at 2,200 tokens/s; the formula gives 23.5, 23.5, 24.5 ms and
# 2,200. Attention and copies are estimated from 20 GB/s of memory bandwidth and 0.5 Tflop/s.
_CPU_135M = Machine(
    name="cpu-135m",
    about="135M Llama shape, bf16, two vCPUs, measured",
    step_time=StepTime(
        overhead_s=0.001,
        weights_s=0.0225,
        token_s=0.00044,
        context_s=2 * 30 * 192 * 2 / 20e9,
        pair_s=4 * 30 * 576 / 0.5e12,
        copy_s=2 * 2 * 30 * 192 * 2 * _BLOCK_SIZE / 20e9,
        swap_s=2 * 2 * 30 * 192 * 2 * _BLOCK_SIZE / 20e9,
        link_s=0.0003,
    ),
    limits=EngineConfig(
        block_size=_BLOCK_SIZE,
        max_num_blocks=1024,
        max_batch_size=32,
        max_num_seqs=10_000,
        max_model_len=2048,
        max_total_tokens=512,
        memory_threshold=1.0,
    ),
    num_host_blocks=1024,
)

MACHINES = {machine.name: machine for machine in (_H100_8B, _H100_8B_TIGHT, _CPU_135M)}
"""Presets by name."""
