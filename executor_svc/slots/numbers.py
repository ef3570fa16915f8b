"""Columns with a number for each slot, on the host and the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.device.upload import upload
from executor_svc.slots.metadata import DTYPES, MetadataType
from tandem.link.batch import Int32Column


class SlotNumbers:
    """
    Numbers of the requests in slots: a column for each metadata type, with a number for each slot.

    A request keeps its slot while it runs and its numbers stay in the slot's row, so that batches
    may take any slots in any order. The host has all columns, and the device those that are to lie
    on it.
    """

    def __init__(self, num_slots: int, types: Iterable[MetadataType], device: torch.device) -> None:
        self._device = device
        self._on_host: dict[str, NDArray[Any]] = {}
        self._on_device: dict[str, Tensor] = {}
        for one in types:
            self._on_host[one.label] = np.zeros(num_slots, DTYPES[one.dtype])
            if one.on_gpu:
                dtype: torch.dtype = getattr(torch, one.dtype)
                self._on_device[one.label] = torch.zeros(num_slots, dtype=dtype, device=device)

    @property
    def labels(self) -> Iterable[str]:
        """Labels of the columns."""
        return self._on_host.keys()

    def put(self, slot: int, numbers: Mapping[str, float]) -> None:
        """Replace a slot's numbers by those of its next request; a label that lacks gets 0."""
        for label, column in self._on_host.items():
            column[slot] = numbers.get(label, 0)
        for label, on_device in self._on_device.items():
            on_device[slot] = numbers.get(label, 0)  # a kernel's argument: nothing is uploaded

    def of(self, label: str, slot: Int32Column) -> NDArray[Any]:
        """Return the numbers of slots, ``[R]`` on the host."""
        return self._on_host[label][slot]

    def rows(self, label: str, slot: Int32Column) -> Tensor:
        """Return the numbers of slots, ``[R]``, where the label's type says."""
        on_device = self._on_device.get(label)
        if on_device is None:
            return torch.from_numpy(self._on_host[label][slot])
        return on_device.index_select(0, upload(slot, self._device))
