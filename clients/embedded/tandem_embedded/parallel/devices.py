"""Devices of an engine's runners."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from tandem.errors import InvalidConfig
from tandem_embedded.parallel.sizes import ParallelSizes

if TYPE_CHECKING:
    import torch

    from executor_svc.parallel.process_groups import ProcessGroups


def with_runners_of(
    sizes: ParallelSizes, device: str | Sequence[str], backends: Sequence[object]
) -> ParallelSizes:
    """
    Return the sizes with one runner for each device of a list, and for each backend that is given.

    Raises:
        InvalidConfig: The list is empty, or another number of runners is given.
    """
    if not isinstance(device, str):
        if not device:
            message = "device must be a name, or a list of at least one name, got an empty list"
            raise InvalidConfig(message, field="device")
        sizes = sizes.with_runners(len(device), "devices")
    return sizes.with_runners(len(backends), "backends") if backends else sizes


def devices_of(
    device: str | Sequence[str], num_runners: int, groups: ProcessGroups | None
) -> list[torch.device]:
    """
    Return the device of each runner.

    A list names them all. On "cuda" without a number runners take the visible GPUs in turn, and a
    rank takes the current one, as `torch.cuda.set_device` has set it.

    Raises:
        InvalidConfig: A device does not exist.
    """
    # These import PyTorch, which must follow a change of the environment: see `load_backends`.
    import torch  # noqa: PLC0415

    from executor_svc.device.choice import resolve_device  # noqa: PLC0415  # PyTorch

    if not isinstance(device, str):
        return [resolve_device(name) for name in device]
    found = resolve_device(device)
    if found.type != "cuda" or ":" in device:
        return [found] * num_runners
    if groups is not None:
        return [torch.device("cuda", torch.cuda.current_device())]
    count = torch.cuda.device_count()
    return [torch.device("cuda", number % count) for number in range(num_runners)]


def on_device(device: str) -> AbstractContextManager[object]:
    """
    Return a context in which kernels of this thread run on a device, whichever thread it is.

    PyTorch's operations go by their tensors; Triton launches on the thread's current device.
    """
    if not device.startswith("cuda"):
        return nullcontext()
    import torch  # noqa: PLC0415  # the backend has imported it

    return torch.cuda.device(device)
