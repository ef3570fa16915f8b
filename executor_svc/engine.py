"""Makes a warm runner from settings, with the limits that settings and model together allow."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import structlog
import torch

from executor_svc.config.limits import fit_limits, may_shorten, num_slots_for
from executor_svc.config.settings import ExecutorSettings, LoadedSettings
from executor_svc.device.choice import choose_kernels, is_sticky, resolve_device
from executor_svc.device.memory_probe import MemoryMeter, Reading, meter_of
from executor_svc.device.precision import use_full_precision
from executor_svc.device.threads import use_threads
from executor_svc.memory.kv_memory import KvMemory, host_blocks_within, kv_bytes_per_block
from executor_svc.memory.plan import Readings, described, meter_of_rank, plan_memory
from executor_svc.model.files.tokenizer_files import TokenizerFile, read_tokenizer_files
from executor_svc.model.loader import LoadedModel, load_model
from executor_svc.model.weights import weight_bytes
from executor_svc.parallel.agreement import check_agreement
from executor_svc.parallel.collectives import AllRanks
from executor_svc.parallel.process_groups import SINGLE, ProcessGroups
from executor_svc.profile.torch_recorder import TorchRecorder
from executor_svc.server.loaded import (
    DEPTH,
    HEARTBEAT_INTERVAL_S,
    Engine,
    credit,
)
from executor_svc.start_warnings import kept_warnings, warn
from executor_svc.step.graphs.plan import plan_graphs
from executor_svc.step.heaviest_steps import measure_activations, static_rows
from executor_svc.step.runner import ModelRunner
from kernels.cpu_features import vector_features
from kernels.packed_linear import can_pack
from tandem.engine_config import EngineConfig
from tandem.executor.v1.executor_service_pb2 import DescribeResponse, GenerationDefaults
from tandem.kv_memory.budget import MemoryPlan
from tandem.link import PROTOCOL_VERSION
from tandem.profile import FEATURE
from tandem.wording import GIB

_log = structlog.get_logger(__name__)


def load_engine(
    loaded: LoadedSettings,
    boot_id: str,
    meters: Callable[[torch.device], MemoryMeter] = meter_of,
    groups: ProcessGroups = SINGLE,
) -> Engine:
    """
    Load the model, size and allocate KV memory, warm up, and log what was chosen. The engine's
    description holds the warnings given on the way.

    The ranks of a model call it together. Each loads its share; all have the same limits, slots and
    blocks afterwards, and the description is that of the whole model but for memory, which is the
    rank's.

    Args:
        loaded: The settings.
        boot_id: Id of this process, put into every answer.
        meters: Returns the memory meter of a device.
        groups: The ranks of the model.

    Raises:
        InvalidConfig: This model or machine does not allow a limit, device or setting, so many
            ranks cannot hold the model, or they differ in what they compute with.
        InvalidModel: The model directory cannot be used.
        OutOfMemory: Weights or KV blocks do not fit.
    """
    with kept_warnings() as warnings:
        engine = _load(loaded, boot_id, meters, groups)
    engine.description.warnings.extend(warnings)
    return engine


def _load(
    loaded: LoadedSettings,
    boot_id: str,
    meters: Callable[[torch.device], MemoryMeter],
    groups: ProcessGroups,
) -> Engine:
    settings, ranks = loaded.settings, AllRanks(groups)
    tokenizer_files = _tokenizer_files(settings.model)
    num_here = ranks.all_of(platform.node()).count(platform.node())
    use_threads(settings.num_threads, num_processes=num_here)
    device = resolve_device(settings.device)
    choose_kernels(device, settings.cpu_extension)
    use_full_precision(device)
    meter = meter_of_rank(meters(device), device, num_here)
    before = ranks.all_of(meter.read())[groups.rank]  # until all have read, none loads
    model = load_model(
        settings.model, dtype=settings.dtype, device=str(device), packs=True, groups=groups
    )
    if settings.batch_invariant and not model.sharding.has_bits_of_one_rank:
        warn(
            "bits_depend_on_ranks",
            f"with tp_size {groups.tensor_size} this model's results differ in their last bits "
            f"from those of one rank: batch_invariant holds for tp_size {groups.tensor_size} alone",
            tp_size=groups.tensor_size,
        )
    limits = fit_limits(loaded, model.config, model.device)
    check_agreement(ranks.all_of(_facts(settings, model, limits)))
    plan = _plan(loaded, model, limits, before, meter)
    limits = replace(limits, max_model_len=plan.max_model_len)
    kv = _allocate(loaded, model, limits, plan)
    num_slots = num_slots_for(limits)
    runner = ModelRunner(
        model,
        kv,
        num_slots=num_slots,
        max_model_len=limits.max_model_len,
        boot_id=boot_id,
        collect_margins=settings.collect_margins,
        batch_invariant=settings.batch_invariant,
        kv_knob=plan.size.knob,
        static_rows=static_rows(model, limits),
        # Collectives were never captured: ranks run every step eagerly.
        graph_plan=plan_graphs(loaded, limits, device) if groups.world is None else None,
    )
    started = time.monotonic()
    runner.warm_up(max_step_tokens=limits.max_total_tokens)
    _log.info("warmed_up", seconds=round(time.monotonic() - started, 3))
    return Engine(
        runner=runner,
        description=_describe(loaded, model, kv, limits, num_slots=num_slots, boot_id=boot_id),
        tokenizer_files=tokenizer_files,
        num_threads=torch.get_num_threads(),
        is_sticky=is_sticky,
        recorder=lambda options: TorchRecorder(runner, model.device, options),
        depth=DEPTH - 1 + groups.pipeline_size,
        checksum=runner.checksum,
        compare_ranks=runner.compare_ranks,
    )


def _facts(settings: ExecutorSettings, model: LoadedModel, limits: EngineConfig) -> dict[str, str]:
    """Return what ranks must have in common to compute the same steps with the same rounding."""
    return {
        "the model": model.fingerprint,
        "the device": model.device.type,
        "the number type": model.dtype_name,
        "Tandem": version("tandem-serve"),
        "PyTorch": torch.__version__,
        "use of the C++ kernels": str(can_pack(torch.float32, model.device)),
        "the processor": vector_features() if model.device.type == "cpu" else "any",
        "batch_invariant": str(settings.batch_invariant),
        "the size of swap space": str(settings.swap_space_gb),
        "the limits": str(limits),
    }


def _tokenizer_files(model_dir: Path) -> tuple[TokenizerFile, ...]:
    """
    Read the tokenizer's files before the weights, which take far longer: a damaged file is then
    reported early.
    """
    if not model_dir.is_dir():
        return ()  # `load_model` refuses it and says what a model directory should hold
    files = read_tokenizer_files(model_dir)
    if not any(file.name == "tokenizer.json" for file in files):
        warn(
            "tokenizer_missing",
            "the model has no tokenizer.json: prompts must be token ids, and output has no text",
            model=str(model_dir),
        )
    return files


def _plan(
    loaded: LoadedSettings,
    model: LoadedModel,
    limits: EngineConfig,
    before: Reading,
    meter: MemoryMeter,
) -> MemoryPlan:
    """
    Size the KV memory, on all ranks alike; steps are run to measure it only if their need decides
    the size.
    """
    measured = None
    default_knob = "gpu_memory_utilization" if model.device.type == "cuda" else None
    if (loaded.kv_size_knob or default_knob) == "gpu_memory_utilization":
        measured = measure_activations(
            model,
            _measurable(loaded, model, limits, meter),
            meter,
            num_slots=num_slots_for(limits),
            batch_invariant=loaded.settings.batch_invariant,
        )
    plan = plan_memory(
        loaded,
        model.rank_config,
        limits,
        model.dtype,
        Readings(before=before, after=meter.read(), weight_bytes=model.weight_bytes),
        device=_device_name(model.device),
        measured=measured,
        tp_size=model.groups.tensor_size,
        is_last_stage=model.sharding.stage.is_last,
        all_ranks=AllRanks(model.groups).all_of,
    )
    _log.info("memory_planned", **described(plan))
    for warning in plan.warnings():
        warn("unusual_setting", warning)
    return plan


def _allocate(
    loaded: LoadedSettings, model: LoadedModel, limits: EngineConfig, plan: MemoryPlan
) -> KvMemory:
    config = model.rank_config
    block_bytes = kv_bytes_per_block(config, limits.block_size, model.dtype)
    host_blocks = host_blocks_within(loaded.settings.swap_space_gb, block_bytes)
    kv = KvMemory(
        config,
        plan.num_blocks,
        limits.block_size,
        model.dtype,
        model.device,
        num_host_blocks=min(AllRanks(model.groups).all_of(host_blocks)),
        keeps_addresses=loaded.settings.static_kv_memory_pointers,
        kv_knob=plan.size.knob,
    )
    _log.info(
        "kv_allocated",
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        tokens=kv.num_blocks * kv.block_size,
        gib=round(kv.device_bytes / GIB, 3),
        num_host_blocks=kv.num_host_blocks,
        max_total_tokens=limits.max_total_tokens,
        max_model_len=limits.max_model_len,
        max_model_len_from=_source_of_length(loaded, plan),
    )
    return kv


def _measurable(
    loaded: LoadedSettings, model: LoadedModel, limits: EngineConfig, meter: MemoryMeter
) -> EngineConfig:
    """Return the limits with a default max_model_len cut to what all free memory could hold."""
    if not may_shorten(loaded):
        return limits
    per_block = kv_bytes_per_block(model.rank_config, limits.block_size, model.dtype)
    own = meter.read().free // per_block * limits.block_size
    fitting = min(AllRanks(model.groups).all_of(own))
    longest = max(limits.block_size, min(limits.max_model_len, fitting))
    return replace(limits, max_model_len=longest)


def _source_of_length(loaded: LoadedSettings, plan: MemoryPlan) -> str:
    if plan.wanted_len is not None:
        return f"KV memory (without its bound {plan.wanted_len})"
    if plan.max_model_len == loaded.settings.max_model_len:
        return loaded.places["max_model_len"]
    return "model"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return str(device)


def _features(settings: ExecutorSettings) -> list[str]:
    optional = {"margins": settings.collect_margins, "batch_invariant": settings.batch_invariant}
    return ["suspend", FEATURE, *(name for name, is_on in optional.items() if is_on)]


def _describe(
    loaded: LoadedSettings,
    model: LoadedModel,
    kv: KvMemory,
    limits: EngineConfig,
    *,
    num_slots: int,
    boot_id: str,
) -> DescribeResponse:
    defaults = GenerationDefaults()
    for name, value in model.config.generation_defaults.items():
        setattr(defaults, name, value)
    return DescribeResponse(
        protocol_version=PROTOCOL_VERSION,
        boot_id=boot_id,
        model_fingerprint=model.fingerprint,
        model_name=loaded.model_name,
        architecture=model.config.architecture,
        dtype=model.dtype_name,
        vocab_size=model.config.vocab_size,
        max_model_len=limits.max_model_len,
        block_size=kv.block_size,
        num_blocks=kv.num_blocks,
        num_slots=num_slots,
        num_host_blocks=kv.num_host_blocks,
        max_batch_size=limits.max_batch_size,
        max_total_tokens=limits.max_total_tokens,
        max_inflight_steps=credit(model.groups.pipeline_size),
        num_stages=model.groups.pipeline_size,
        kv_bytes_per_block=kv.bytes_per_block,
        eos_token_ids=np.asarray(model.config.eos_token_ids, "<i4").tobytes(),
        generation_defaults=defaults,
        device=_device_name(model.device),
        num_parameters=weight_bytes(model.config, model.dtype) // model.dtype.itemsize,
        num_threads=torch.get_num_threads(),
        features=_features(loaded.settings),
        heartbeat_interval_ms=int(HEARTBEAT_INTERVAL_S * 1000),
    )
