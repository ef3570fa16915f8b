"""An executor's memory plan, from its settings and a memory meter, for start and `--dry-run`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from executor_svc.config.graph_sizes import graph_sizes
from executor_svc.config.limits import fit_limits, limit_warnings, may_shorten, num_slots_for
from executor_svc.config.settings import LoadedSettings
from executor_svc.device.choice import choose_kernels, dtype_name, resolve_device, resolve_dtype
from executor_svc.device.memory_probe import MemoryMeter, Reading, SharedMeter, meter_of
from executor_svc.memory.activations import estimate_activations
from executor_svc.memory.decode_bytes import graph_pool_bytes
from executor_svc.memory.kv_memory import host_blocks_within, kv_bytes_per_block
from executor_svc.model.config import ModelConfig, read_model_config
from executor_svc.model.loader import check_weights_fit, open_checkpoint
from executor_svc.model.shares import rank_config, sharding_of
from executor_svc.model.weights import weight_bytes
from tandem.engine_config import EngineConfig
from tandem.kv_memory.budget import (
    KvSize,
    MemoryPlan,
    MemoryProbe,
    RankMemory,
    plan_kv,
)
from tandem.kv_memory.default_size import default_kv_size
from tandem.wording import gib


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """A device's memory before and after loading the weights; `after` may be a forecast."""

    before: Reading
    after: Reading
    weight_bytes: int

    @property
    def other_bytes(self) -> int:
        """Bytes by which used memory grew beside the weights."""
        return max(0, self.after.used - self.before.used - self.weight_bytes)


def plan_memory(
    loaded: LoadedSettings,
    config: ModelConfig,
    limits: EngineConfig,
    dtype: torch.dtype,
    readings: Readings,
    *,
    device: str,
    measured: int | None = None,
    tp_size: int = 1,
    is_last_stage: bool = True,
    all_ranks: Callable[[RankMemory], Sequence[RankMemory]] = lambda own: (own,),
) -> MemoryPlan:
    """
    Size the KV memory as the settings say, on every rank alike: each plans for the rank that has
    room for the fewest blocks.

    Args:
        loaded: The settings, and which of them sizes the KV memory.
        config: The model, or the geometry of this rank.
        limits: Limits in force for this model.
        dtype: Type of weights and KV.
        readings: Memory before and after loading the weights.
        device: Name of the device for messages; it starts with "cuda" if it is a GPU.
        measured: Bytes of activations, if they were measured. The estimate is used if it is larger:
            the measured steps then reused memory that the process already had. On a GPU the memory
            of captured graphs is added to either.
        tp_size: Number of ranks that share each layer.
        is_last_stage: False for a stage of the model that does not sample.
        all_ranks: Returns the memory of all ranks from this rank's, the same list on each.

    Raises:
        OutOfMemory: The KV memory does not fit; names the setting to change.
    """
    own = _rank_memory(
        loaded,
        config,
        limits,
        dtype,
        readings,
        device=device,
        measured=measured,
        tp_size=tp_size,
        is_last_stage=is_last_stage,
    )
    return _plan_of(loaded, limits, all_ranks(own), on_gpu=device.startswith("cuda"))


def _rank_memory(
    loaded: LoadedSettings,
    config: ModelConfig,
    limits: EngineConfig,
    dtype: torch.dtype,
    readings: Readings,
    *,
    device: str,
    measured: int | None = None,
    tp_size: int,
    is_last_stage: bool,
) -> RankMemory:
    """Return the memory of one rank; arguments are those of `plan_memory`."""
    on_gpu = device.startswith("cuda")
    estimated = estimate_activations(
        config,
        limits,
        num_slots=num_slots_for(limits),
        dtype=dtype,
        on_gpu=on_gpu,
        tp_size=tp_size,
        is_last_stage=is_last_stage,
    )
    captured = _captured_bytes(loaded, config, limits, dtype) if on_gpu else 0
    probe = MemoryProbe(
        device=device,
        total_bytes=readings.before.total,
        free_before_bytes=readings.before.free,
        free_after_bytes=readings.after.free,
        weight_bytes=readings.weight_bytes,
        activation_bytes=max(estimated, measured or 0) + captured,
        other_bytes=readings.other_bytes,
        is_measured=measured is not None,
    )
    return RankMemory(block_bytes=kv_bytes_per_block(config, limits.block_size, dtype), probe=probe)


def _plan_of(
    loaded: LoadedSettings, limits: EngineConfig, ranks: Sequence[RankMemory], *, on_gpu: bool
) -> MemoryPlan:
    return plan_kv(
        min((_kv_size(loaded, limits, each, on_gpu=on_gpu) for each in ranks), key=_value),
        ranks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        may_shorten=may_shorten(loaded),
    )


def _captured_bytes(
    loaded: LoadedSettings, config: ModelConfig, limits: EngineConfig, dtype: torch.dtype
) -> int:
    """Return the memory that captured graphs take on a GPU."""
    sizes = graph_sizes(loaded.settings.num_cuda_graphs, limits.max_batch_size)
    return graph_pool_bytes(config, max(sizes, default=0), dtype)


def forecast(
    loaded: LoadedSettings,
    meters: Callable[[torch.device], MemoryMeter] = meter_of,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
) -> dict[str, object]:
    """
    Plan the memory without loading weights or computing, for `--dry-run`. With more than one rank,
    it is that of the rank that has room for the fewest blocks; on a CPU all ranks are taken to be
    on this machine.

    Raises:
        InvalidConfig, InvalidModel or OutOfMemory: As at the start.
    """
    settings = loaded.settings
    config = read_model_config(settings.model)
    sharding_of(config, size=tp_size, pipeline_size=pp_size)  # refuses the sizes
    device = resolve_device(settings.device)
    choose_kernels(device, settings.cpu_extension)
    dtype = resolve_dtype(settings.dtype, config.checkpoint_dtype, device)
    config, _ = open_checkpoint(settings.model, config, dtype)
    limits = fit_limits(loaded, config, device)
    stages = [
        sharding_of(config, size=tp_size, pipeline_rank=stage, pipeline_size=pp_size)
        for stage in range(pp_size)
    ]
    needed = [weight_bytes(config, dtype, sharding=share) for share in stages]
    all_needed = max(needed) if device.type == "cuda" else tp_size * sum(needed)
    check_weights_fit(settings.model, all_needed, dtype, device)
    before = meter_of_rank(meters(device), device, tp_size * pp_size).read()
    ranks = [
        _rank_memory(
            loaded,
            rank_config(config, share),
            limits,
            dtype,
            _forecast_readings(before, num_bytes),
            device=str(device),
            tp_size=tp_size,
            is_last_stage=share.stage.is_last,
        )
        for share, num_bytes in zip(stages, needed, strict=True)
    ]
    plan = _plan_of(loaded, limits, ranks, on_gpu=device.type == "cuda")
    block_bytes = max(rank.block_bytes for rank in ranks)
    return {
        "dtype": dtype_name(dtype),
        "max_batch_size": limits.max_batch_size,
        "max_total_tokens": limits.max_total_tokens,
        **described(plan),
        "num_host_blocks": host_blocks_within(settings.swap_space_gb, block_bytes),
        "warnings": [*limit_warnings(limits), *plan.warnings()],
    }


def _forecast_readings(before: Reading, weight_bytes: int) -> Readings:
    free = max(0, before.free - weight_bytes)
    after = Reading(total=before.total, free=free, used=before.used + weight_bytes)
    return Readings(before=before, after=after, weight_bytes=weight_bytes)


def meter_of_rank(meter: MemoryMeter, device: torch.device, num_here: int) -> MemoryMeter:
    """Return the meter of one of `num_here` ranks of a host: they share its memory, not GPUs."""
    return meter if device.type == "cuda" or num_here == 1 else SharedMeter(meter, num_here)


def described(plan: MemoryPlan) -> dict[str, object]:
    """Return the plan as names and numbers, for the start-up log event and for programs."""
    probe = plan.rank.probe
    return {
        "device": probe.device,
        "total_bytes": probe.total_bytes,
        "free_bytes": probe.free_before_bytes,
        "weight_bytes": probe.weight_bytes,
        "activation_bytes": probe.activation_bytes,
        "activations": "measured" if probe.is_measured else "estimated",
        "other_bytes": probe.other_bytes,
        "kv_bytes": plan.kv_bytes,
        "kv_bytes_per_block": plan.rank.block_bytes,
        "num_blocks": plan.num_blocks,
        "block_size": plan.block_size,
        "tokens": plan.num_blocks * plan.block_size,
        "max_model_len": plan.max_model_len,
        "wanted_model_len": plan.wanted_len or plan.max_model_len,
        "sized_by": plan.size.knob,
        "sized_by_value": plan.size.value,
        "sized_by_place": plan.size.place,
        **{knob: _rounded_up(value) for knob, value in plan.equivalents().items()},
    }


def as_text(forecasted: dict[str, object]) -> str:
    """Format a forecast for users."""
    facts = {
        name: f"{gib(value, '.3f')} GiB"
        for name, value in forecasted.items()
        if name.endswith("bytes") and isinstance(value, int)
    }
    about = {**forecasted, **facts}
    lines = [
        "memory plan for {device}: {total_bytes}, {free_bytes} free",
        "  weights      {weight_bytes}, {dtype}",
        "  activations  {activation_bytes}, {activations}, of {max_total_tokens} tokens in a step",
        "  other        {other_bytes}",
        "  KV memory    {kv_bytes}, {num_blocks} blocks of {block_size} tokens and a dummy",
        "  swap space   {num_host_blocks} host blocks",
        "  holds        {tokens} tokens, max_model_len is {max_model_len}",
        "sized by {sized_by} {sized_by_value:g} ({sized_by_place}); the same size as",
        "  max_num_blocks = {max_num_blocks}",
        "  buffer_size_gb = {buffer_size_gb}",
        "  mem_fraction_static = {mem_fraction_static}",
        "  gpu_memory_utilization = {gpu_memory_utilization}",
    ]
    warnings = forecasted["warnings"]
    assert isinstance(warnings, list)
    lines += [f"warning: {warning}" for warning in warnings]
    return "\n".join(lines).format_map(about) + "\n"


def as_json(forecasted: dict[str, object]) -> str:
    """Format a forecast for programs, as one line of JSON."""
    return json.dumps(forecasted) + "\n"


def _kv_size(
    loaded: LoadedSettings, limits: EngineConfig, rank: RankMemory, *, on_gpu: bool
) -> KvSize:
    knob = loaded.kv_size_knob
    if knob is None:
        return default_kv_size(limits, rank, on_gpu=on_gpu, may_shorten=may_shorten(loaded))
    return KvSize(knob=knob, value=getattr(loaded.settings, knob), place=loaded.places[knob])


def _value(size: KvSize) -> float:
    return size.value


def _rounded_up(value: float) -> float:
    """Round up to six decimals, so that the printed value asks for no less memory."""
    return value if isinstance(value, int) else -(-value * 10**6 // 1) / 10**6
