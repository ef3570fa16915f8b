"""Upload of integer columns from the host to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.transfer import to_device


def upload(column: NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    """
    Copy integers to a device as int64, for torch's indexing; the host does not wait for the copy.
    """
    return to_device(torch.from_numpy(column.astype(np.int64, copy=False)), device)
