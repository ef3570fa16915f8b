"""What an executor captures, by its settings and device."""

from __future__ import annotations

import structlog
import torch

from executor_svc.config import LoadedSettings
from executor_svc.graphs.cuda import CudaGraphs
from executor_svc.graphs.decode import GraphPlan
from executor_svc.graphs.sizes import graph_sizes

_log = structlog.get_logger(__name__)


def plan_graphs(
    loaded: LoadedSettings, max_batch_size: int, device: torch.device
) -> GraphPlan | None:
    """
    The decode steps to capture; None where all steps run eagerly, which is always so on a CPU: a
    step there is over when its last call is back, so that there is nothing to save.

    Logs the sizes, or that a setting has no effect here.

    Args:
        loaded: The settings.
        max_batch_size: Most rows of a step.
        device: Of the model.
    """
    chosen = loaded.settings.num_cuda_graphs
    plan = device_graphs(device, graph_sizes(chosen, max_batch_size))
    if device.type != "cuda":
        if loaded.is_set("num_cuda_graphs") and chosen != "none":
            _log.warning(
                "setting_without_effect",
                setting=f"num_cuda_graphs={chosen} ({loaded.places['num_cuda_graphs']})",
                why=f"the device is {device}: steps run eagerly",
            )
    else:
        rows = [] if plan is None else list(plan.sizes)
        _log.info("graphs_planned", num_cuda_graphs=chosen, rows=rows)
    return plan


def device_graphs(device: torch.device, sizes: tuple[int, ...]) -> GraphPlan | None:
    """Steps of so many rows to capture, on a device that can; None where there are none."""
    if device.type != "cuda" or not sizes:
        return None
    return GraphPlan(device=CudaGraphs(device), sizes=sizes)
