"""Loads the runners of an engine, each with KV memory of its own."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from executor_svc.device.idle_threads import let_idle_threads_sleep
from tandem.engine_config import EngineConfig
from tandem.errors import InvalidConfig
from tandem.sampling_params import params_with_defaults
from tandem_embedded.backend import Backend
from tandem_embedded.metadata import RequestMetadata
from tandem_embedded.parallel.devices import devices_of, on_device

if TYPE_CHECKING:
    import torch

    from executor_svc.memory.kv_memory import KvMemory
    from executor_svc.memory.plan import Readings
    from executor_svc.model.loader import LoadedModel
    from executor_svc.parallel.process_groups import ProcessGroups
    from executor_svc.step.runner import ModelRunner

# Functions here import PyTorch themselves: it must follow a change of the environment, and an
# engine over another backend needs none.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """Settings of an engine's runners; `InferenceEngine` says what they mean."""

    dtype: str = "auto"
    device: str | Sequence[str] = "cpu"
    num_threads: int | None = None
    collect_margins: bool = False
    batch_invariant: bool = False
    swap_space_gb: float = 0.0
    buffer_size_gb: float | None = None
    cpu_extension: str = "auto"
    metadata: RequestMetadata = field(default_factory=RequestMetadata)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model on one device, and the part of its memory that each runner there may have."""

    model: LoadedModel
    readings: Readings


def load_backends(
    config: EngineConfig | None,
    model_dir: Path,
    settings: RunnerSettings,
    *,
    num_runners: int = 1,
    groups: ProcessGroups | None = None,
    arguments: object = None,
) -> tuple[EngineConfig, list[Backend]]:
    """
    Load a model, once on each device, and allocate the KV blocks of each runner.

    Runners of one device share the model's weights, and divide memory and threads unless a setting
    says how much each gets. The ranks of a model call this together, and load a share each.

    Args:
        config: Limits of each runner, or None.
        model_dir: Directory of the model.
        settings: Settings of all runners.
        num_runners: Number of runners in this process.
        groups: The ranks that share the model; None for a whole one.
        arguments: Further arguments that ranks must have in common.

    Returns:
        The limits in force, and the runners. Without `config` the limits are an executor's
        defaults: the model's context length, KV by the free memory or `buffer_size_gb`. With it, a
        default max_model_len is lowered to that length, and `buffer_size_gb` sets the number of
        blocks.

    Raises:
        InvalidModel, InvalidConfig or OutOfMemory: The message says what to do.
    """
    _check_hook(settings, groups)
    let_idle_threads_sleep(os.environ)
    from executor_svc.memory import kv_memory  # noqa: PLC0415  # PyTorch
    from executor_svc.parallel.collectives import AllRanks  # noqa: PLC0415
    from tandem_embedded.loading import facts, limits  # noqa: PLC0415

    devices = devices_of(settings.device, num_runners, groups)
    _divide_threads(settings.num_threads, devices)
    loaded = {
        device: _load(model_dir, settings, device, count, groups)
        for device, count in Counter(devices).items()
    }
    model, buffer_size_gb = loaded[devices[0]].model, settings.buffer_size_gb
    if groups is not None:
        facts.check_ranks_agree(model, (config, settings, arguments))
    if config is None:
        config = limits.least_limits(
            limits.default_limits(one.model, model_dir, buffer_size_gb, one.readings)
            for one in loaded.values()
        )
        buffer_size_gb = None
    config = limits.fit_length(config, model.config.context_len)
    per_block = kv_memory.kv_bytes_per_block(model.rank_config, config.block_size, model.dtype)
    largest = max(AllRanks(model.groups).all_of(per_block))  # stages may differ by a layer
    config = limits.sized_limits(config, buffer_size_gb, largest)
    kv_knob = "max_num_blocks" if buffer_size_gb is None else "buffer_size_gb"
    return config, [_backend(loaded[device].model, config, settings, kv_knob) for device in devices]


def _check_hook(settings: RunnerSettings, groups: ProcessGroups | None) -> None:
    """Refuse a logits hook where processes share the model: none of them has all logits."""
    if groups is not None and settings.metadata.hook is not None:
        raise InvalidConfig(
            "logits_hook needs a model that is whole in this process, where all logits are; "
            f"{groups.size} processes share this one",
            field="logits_hook",
        )


def _divide_threads(num_threads: int | None, devices: Sequence[torch.device]) -> None:
    """Set the number of threads of one operation: runners that compute on a CPU divide them."""
    import torch  # noqa: PLC0415  # PyTorch

    num_on_cpu = sum(device.type == "cpu" for device in devices)
    if num_on_cpu > 1:
        torch.set_num_threads(max(1, (num_threads or torch.get_num_threads()) // num_on_cpu))
    elif num_threads is not None:
        torch.set_num_threads(num_threads)


def _load(
    model_dir: Path,
    settings: RunnerSettings,
    device: torch.device,
    num_runners: int,
    groups: ProcessGroups | None,
) -> _Loaded:
    """Load the model onto a device for so many runners."""
    from executor_svc.device.choice import choose_kernels  # noqa: PLC0415  # PyTorch
    from executor_svc.device.memory_probe import SharedMeter, meter_of  # noqa: PLC0415
    from executor_svc.device.precision import warn_of_tf32  # noqa: PLC0415
    from executor_svc.memory.plan import Readings, meter_of_rank  # noqa: PLC0415
    from executor_svc.model.loader import load_model  # noqa: PLC0415
    from executor_svc.parallel.collectives import AllRanks  # noqa: PLC0415
    from executor_svc.parallel.process_groups import SINGLE  # noqa: PLC0415

    choose_kernels(device, settings.cpu_extension)
    ranks = AllRanks(groups or SINGLE)
    num_here = ranks.all_of(platform.node()).count(platform.node())
    meter = meter_of_rank(meter_of(device), device, num_here)
    if num_runners > 1:
        meter = SharedMeter(meter, num_runners)
    # Until all ranks have read, none loads.
    before = ranks.all_of(meter.read())[0 if groups is None else groups.rank]
    with on_device(str(device)):
        model = load_model(
            model_dir, dtype=settings.dtype, device=str(device), packs=True, groups=groups or SINGLE
        )
    warn_of_tf32(device, model.dtype)
    each = model.weight_bytes // num_runners
    return _Loaded(model, Readings(before=before, after=meter.read(), weight_bytes=each))


def _backend(
    model: LoadedModel, config: EngineConfig, settings: RunnerSettings, kv_knob: str
) -> Backend:
    with on_device(str(model.device)):
        kv = _allocate(model, config, settings.swap_space_gb, kv_knob)
        runner = _runner(model, kv, config, settings)
    return Backend(
        runner=runner,
        num_slots=config.max_batch_size,
        max_positions=model.config.context_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        defaults=params_with_defaults(model.config.generation_defaults),
        num_host_blocks=kv.num_host_blocks,
        device=str(model.device),
        num_stages=model.groups.pipeline_size,
    )


def _allocate(
    model: LoadedModel, config: EngineConfig, swap_space_gb: float, kv_knob: str
) -> KvMemory:
    from executor_svc.memory.kv_memory import (  # noqa: PLC0415  # PyTorch
        KvMemory,
        host_blocks_within,
        kv_bytes_per_block,
    )
    from executor_svc.parallel.collectives import AllRanks  # noqa: PLC0415  # PyTorch

    per_block = kv_bytes_per_block(model.rank_config, config.block_size, model.dtype)
    num_host_blocks = host_blocks_within(swap_space_gb, per_block)
    return KvMemory(
        model.rank_config,
        config.max_num_blocks,
        config.block_size,
        model.dtype,
        model.device,
        num_host_blocks=min(AllRanks(model.groups).all_of(num_host_blocks)),
        kv_knob=kv_knob,
    )


def _runner(
    model: LoadedModel, kv: KvMemory, config: EngineConfig, settings: RunnerSettings
) -> ModelRunner:
    """Return a runner, with its CUDA graphs captured if the device has graphs."""
    from executor_svc.config.graph_sizes import default_sizes  # noqa: PLC0415  # PyTorch
    from executor_svc.slots.logits_hook import LogitsHook  # noqa: PLC0415
    from executor_svc.step.graphs.plan import device_graphs  # noqa: PLC0415
    from executor_svc.step.heaviest_steps import static_rows  # noqa: PLC0415
    from executor_svc.step.runner import ModelRunner  # noqa: PLC0415

    # Collectives were never captured: ranks run every step eagerly.
    sizes = default_sizes(config.max_batch_size) if model.groups.world is None else ()
    graph_plan = device_graphs(model.device, sizes)
    is_gpu, call = model.device.type == "cuda", settings.metadata.hook
    runner = ModelRunner(
        model,
        kv,
        num_slots=config.max_batch_size,
        max_model_len=config.max_model_len,
        boot_id="embedded",
        collect_margins=settings.collect_margins,
        batch_invariant=settings.batch_invariant,
        static_rows=static_rows(model, config),
        graph_plan=graph_plan,
        hook=None if call is None else LogitsHook(call=call, types=settings.metadata.types),
    )
    if is_gpu:
        runner.warm_up(max_step_tokens=config.max_total_tokens)
    return runner
