"""Backend of an embedded engine: the runner that computes its steps, and the runner's limits."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from executor_svc.device.idle_threads import let_idle_threads_sleep
from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.engine_config import EngineConfig
from tandem.errors import InvalidConfig
from tandem.link.batch import Batch
from tandem.link.commands import KvMode
from tandem.link.results import StepResult
from tandem.sampling_params import SamplingParams, params_with_defaults
from tandem.wording import GIB, gib
from tandem_embedded.params import Vocabulary

if TYPE_CHECKING:
    from executor_svc.device.memory_probe import Reading
    from executor_svc.memory.kv_memory import KvMemory
    from executor_svc.model.loader import LoadedModel
    from executor_svc.step.runner import ModelRunner


class Runner(Protocol):
    """Interface of a runner, which computes batches in order."""

    @property
    def state_hash(self) -> int:
        """Hash of the slot state after the last batch."""

    def execute(self, batch: Batch, step_id: int) -> StepResult:
        """Apply and compute one batch."""

    def reset(self) -> None:
        """Clear all slots, and end a suspension."""

    def suspend(self, mode: KvMode) -> None:
        """Release KV memory until `resume`; with RECOMPUTE no slot is live at this time."""

    def resume(self) -> None:
        """End a suspension; raise OutOfMemory, and stay suspended, if the memory is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """
    A runner and its limits.

    Attributes:
        num_slots: Number of slots of the runner.
        max_positions: Length in tokens of the longest sequence that the model supports.
        vocab_size: Size of the vocabulary; token ids are in [0, vocab_size).
        eos_token_ids: Ids that end a sequence.
        defaults: Sampling defaults for requests that set none.
        num_host_blocks: Number of host blocks that preempted requests can be swapped to.
    """

    runner: Runner
    num_slots: int
    max_positions: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingParams = field(default_factory=SamplingParams)
    num_host_blocks: int = 0

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary and defaults that requests are checked with."""
        return Vocabulary(
            size=self.vocab_size, eos_token_ids=self.eos_token_ids, defaults=self.defaults
        )

    def geometry(self, config: EngineConfig) -> ExecutorGeometry:
        """Return the geometry that the scheduler core plans with under these limits."""
        found = geometry_of(config)
        return replace(found, num_slots=self.num_slots, num_host_blocks=self.num_host_blocks)


def geometry_of(config: EngineConfig) -> ExecutorGeometry:
    """Return the geometry of an executor with these limits."""
    return ExecutorGeometry(
        num_blocks=config.max_num_blocks,
        block_size=config.block_size,
        num_slots=config.max_batch_size,
        max_batch_size=config.max_batch_size,
        max_total_tokens=config.max_total_tokens,
        max_model_len=config.max_model_len,
    )


def load_backend(
    config: EngineConfig | None,
    model_dir: Path,
    *,
    dtype: str,
    device: str,
    num_threads: int | None,
    collect_margins: bool,
    batch_invariant: bool = False,
    swap_space_gb: float = 0.0,
    buffer_size_gb: float | None = None,
    cpu_extension: str = "auto",
) -> tuple[EngineConfig, Backend]:
    """
    Load a model and allocate its KV blocks.

    Returns:
        The limits in force, and the backend. Without `config` they are an executor's defaults: the
        model's context length, KV by the free memory or `buffer_size_gb`. With it, a default
        max_model_len is lowered to that length, and `buffer_size_gb` sets the number of blocks.

    Raises:
        InvalidModel, InvalidConfig or OutOfMemory: The message says what to do.
    """
    let_idle_threads_sleep(os.environ)
    # These import PyTorch, which must follow the change of the environment; --help needs none.
    import torch  # noqa: PLC0415

    from executor_svc.device.choice import choose_kernels, resolve_device  # noqa: PLC0415
    from executor_svc.device.memory_probe import meter_of  # noqa: PLC0415
    from executor_svc.memory import kv_memory  # noqa: PLC0415
    from executor_svc.model.loader import load_model  # noqa: PLC0415

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    choose_kernels(resolve_device(device), cpu_extension)
    meter = meter_of(resolve_device(device))
    before = meter.read()
    model = load_model(model_dir, dtype=dtype, device=device, packs=True)
    if config is None:
        config = _default_limits(model, model_dir, buffer_size_gb, before, meter.read())
        buffer_size_gb = None
    config = _fit_length(config, model.config.context_len)
    per_block = kv_memory.kv_bytes_per_block(model.config, config.block_size, model.dtype)
    kv_knob = "max_num_blocks" if buffer_size_gb is None else "buffer_size_gb"
    config = _sized(config, buffer_size_gb, per_block)
    num_host_blocks = kv_memory.host_blocks_within(swap_space_gb, per_block)
    kv = _allocate(model, config, num_host_blocks, kv_knob)
    runner = _runner(
        model, kv, config, collect_margins=collect_margins, batch_invariant=batch_invariant
    )
    return config, Backend(
        runner=runner,
        num_slots=config.max_batch_size,
        max_positions=model.config.context_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        defaults=params_with_defaults(model.config.generation_defaults),
        num_host_blocks=kv.num_host_blocks,
    )


def _allocate(
    model: LoadedModel, config: EngineConfig, num_host_blocks: int, kv_knob: str
) -> KvMemory:
    from executor_svc.memory.kv_memory import KvMemory  # noqa: PLC0415  # PyTorch

    return KvMemory(
        model.config,
        config.max_num_blocks,
        config.block_size,
        model.dtype,
        model.device,
        num_host_blocks=num_host_blocks,
        kv_knob=kv_knob,
    )


def _runner(
    model: LoadedModel,
    kv: KvMemory,
    config: EngineConfig,
    *,
    collect_margins: bool,
    batch_invariant: bool,
) -> ModelRunner:
    """Return a runner, with its CUDA graphs captured if the device has graphs."""
    # These import PyTorch, as in `load_backend`.
    from executor_svc.config.graph_sizes import default_sizes  # noqa: PLC0415
    from executor_svc.step.graphs.plan import device_graphs  # noqa: PLC0415
    from executor_svc.step.runner import ModelRunner  # noqa: PLC0415

    graph_plan = device_graphs(model.device, default_sizes(config.max_batch_size))
    runner = ModelRunner(
        model,
        kv,
        num_slots=config.max_batch_size,
        max_model_len=config.max_model_len,
        boot_id="embedded",
        collect_margins=collect_margins,
        batch_invariant=batch_invariant,
        static_rows=0 if graph_plan is None else config.max_batch_size,
        graph_plan=graph_plan,
    )
    if graph_plan is not None:
        runner.warm_up()
    return runner


def _default_limits(
    model: LoadedModel,
    model_dir: Path,
    buffer_size_gb: float | None,
    before: Reading,
    after: Reading,
) -> EngineConfig:
    """
    Return the limits of an executor without settings: see `tandem.kv_memory.default_size`. `before`
    and `after` are readings of the device's memory before and after the weights were loaded.
    """
    # These import PyTorch, as in `load_backend`.
    from executor_svc.config.limits import fit_limits  # noqa: PLC0415
    from executor_svc.config.settings import load_settings  # noqa: PLC0415
    from executor_svc.memory.plan import Readings, plan_memory  # noqa: PLC0415

    sized = [] if buffer_size_gb is None else [f"--buffer-size-gb={buffer_size_gb}"]
    loaded = load_settings([f"--model={model_dir}", *sized], {})
    limits = fit_limits(loaded, model.config, model.device)
    readings = Readings(before=before, after=after, weight_bytes=model.weight_bytes)
    plan = plan_memory(
        loaded, model.config, limits, model.dtype, readings, device=str(model.device)
    )
    return replace(limits, max_model_len=plan.max_model_len, max_num_blocks=plan.num_blocks)


def _sized(
    config: EngineConfig, buffer_size_gb: float | None, bytes_per_block: int
) -> EngineConfig:
    """Set max_num_blocks to the blocks that fit into so many GiB beside the dummy block."""
    if buffer_size_gb is None:
        return config
    num_blocks = int(buffer_size_gb * GIB) // bytes_per_block - 1
    if num_blocks < 1:
        message = (
            f"buffer_size_gb is {buffer_size_gb:g}, which holds no KV block of {bytes_per_block} "
            f"bytes beside the dummy: it takes at least {gib(2 * bytes_per_block, '.6f')}"
        )
        raise InvalidConfig(message, field="buffer_size_gb")
    return replace(config, max_num_blocks=num_blocks)


def _fit_length(config: EngineConfig, longest: int) -> EngineConfig:
    """Lower a default max_model_len to what the model supports; refuse a larger explicit one."""
    from executor_svc.config.limits import check_block_fits  # noqa: PLC0415  # PyTorch

    check_block_fits(config.block_size, longest)
    if config.max_model_len <= longest:
        return config
    if config.max_model_len != EngineConfig().max_model_len:
        message = (
            f"max_model_len is {config.max_model_len}, but the model supports at most {longest} "
            f"tokens (max_position_embeddings): lower max_model_len to {longest} or less"
        )
        raise InvalidConfig(message, field="max_model_len")
    config = replace(config, max_model_len=longest)
    config.validate()
    return config
