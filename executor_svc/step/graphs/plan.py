"""The plan of graphs that an executor captures, by its settings and device."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
import torch

from executor_svc.config.graph_sizes import graph_sizes
from executor_svc.config.settings import LoadedSettings
from executor_svc.start_warnings import warn
from executor_svc.step.graphs.capture import GraphDevice
from executor_svc.step.graphs.cuda import CudaGraphs
from executor_svc.step.graphs.shapes import GraphShape, graph_shapes
from tandem.engine_config import EngineConfig

_SETTINGS = (
    "num_cuda_graphs",
    "cuda_graph_mixed_prefill_count",
    "use_cuda_graphs_for_non_decode_steps",
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """
    The graphs that a runner is to capture.

    Attributes:
        device: Device that captures.
        sizes: Numbers of rows of decode steps, as in `executor_svc.config.graph_sizes`.
        mixed: Shapes of steps with prompts, as in `executor_svc.step.graphs.shapes`.
    """

    device: GraphDevice
    sizes: tuple[int, ...]
    mixed: tuple[GraphShape, ...] = ()


def plan_graphs(
    loaded: LoadedSettings, limits: EngineConfig, device: torch.device
) -> GraphPlan | None:
    """
    Return the steps to capture, or None if all steps run eagerly. On a CPU they always do: a step
    there is over when its last call returns, so that graphs would save nothing.

    Log the shapes, or warn of a setting that has no effect here.

    Args:
        loaded: The settings.
        limits: Limits in force for the model.
        device: The model's device.
    """
    settings = loaded.settings
    if device.type != "cuda":
        _tell_without_effect(loaded, device)
        return None
    sizes = graph_sizes(settings.num_cuda_graphs, limits.max_batch_size)
    shapes = graph_shapes(
        sizes,
        max_requests=limits.max_batch_size,
        max_sequence_length=limits.max_model_len,
        mixed_prefill_count=settings.cuda_graph_mixed_prefill_count,
        captures_prefills=settings.use_cuda_graphs_for_non_decode_steps,
    )
    mixed = tuple(shape for shape in shapes if shape.num_prefills)
    _log.info(
        "graphs_planned",
        num_cuda_graphs=settings.num_cuda_graphs,
        rows=list(sizes),
        with_prompts=[[each.num_tokens, each.num_prefills, each.num_decodes] for each in mixed],
    )
    return device_graphs(device, sizes, mixed)


def device_graphs(
    device: torch.device, sizes: tuple[int, ...], mixed: tuple[GraphShape, ...] = ()
) -> GraphPlan | None:
    """Return a plan of these sizes and shapes; None if there are no sizes or it is not CUDA."""
    if device.type != "cuda" or not sizes:
        return None
    return GraphPlan(device=CudaGraphs(device), sizes=sizes, mixed=mixed)


def _tell_without_effect(loaded: LoadedSettings, device: torch.device) -> None:
    asked = {name: getattr(loaded.settings, name) for name in _SETTINGS if loaded.is_set(name)}
    for name, value in asked.items():
        if value not in {"none", 0, None}:
            setting = f"{name}={value} ({loaded.places[name]})"
            warn(
                "setting_without_effect",
                f"{setting} has no effect: the device is {device}, where steps run eagerly",
                setting=setting,
            )
