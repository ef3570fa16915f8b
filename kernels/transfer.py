"""Tensors of the host on their way to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """
    The tensor on a device, in order with the device's work; itself where it is there already.

    The host does not wait: to CUDA it goes through page-locked memory, without which every copy
    would wait for all work before it.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
