"""Transfer of tensors from the host to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """
    Copy a tensor to a device, in order with the device's work; return it as it is if it is there.

    The host does not wait: a copy to CUDA goes through page-locked memory, without which it would
    wait for all earlier work.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
