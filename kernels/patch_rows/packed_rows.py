"""Columns of rows in one tensor on a device, and the patches that change them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD_BYTES = 4
_ALIGNMENT = 4
"""Alignment of columns in words: they start at multiples of 16 bytes, for wide loads."""

_NUMPY_DTYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowField:
    """
    The description of a column.

    Attributes:
        name: Name, unique among the columns.
        dtype: int32, int64 or float32.
        width: Entries per row; None for one entry per row and a one-dimensional column.
    """

    name: str
    dtype: torch.dtype
    width: int | None = None

    @property
    def entry_words(self) -> int:
        """Number of words of one entry."""
        return self.dtype.itemsize // _WORD_BYTES

    @property
    def row_words(self) -> int:
        """Number of words of one row."""
        return self.entry_words * (1 if self.width is None else self.width)


class PackedRows:
    """
    Columns of R rows, each contiguous, all in one int32 tensor that never moves.

    Code with fixed addresses, such as a captured graph, reads `column`; the host changes any number
    of rows and columns with one copy and one kernel through `patch`.
    """

    def __init__(self, fields: Iterable[RowField], num_rows: int, device: torch.device) -> None:
        """
        Args:
            fields: The columns; all start as zeros.
            num_rows: Number of rows, R, at least 1.
            device: Device of the columns.

        Raises:
            ValueError: Two fields have one name, a type does not pack into words, a size is below
                1, or there are 2**31 words or more.
        """
        self._num_rows = num_rows
        self._fields: dict[str, RowField] = {}
        self._first: dict[str, int] = {}
        num_words = 0
        for field in fields:
            if field.name in self._fields:
                raise ValueError(f"two columns are named {field.name!r}")
            if field.dtype not in _NUMPY_DTYPES:
                raise ValueError(f"column {field.name!r} of {field.dtype} does not pack into words")
            if num_rows < 1 or field.row_words < 1:
                raise ValueError(f"column {field.name!r} is empty: {num_rows} rows of {field}")
            self._fields[field.name], self._first[field.name] = field, num_words
            num_words += math.ceil(num_rows * field.row_words / _ALIGNMENT) * _ALIGNMENT
        if num_words >= 2**31:
            raise ValueError(f"{num_words} words are too many for one patch to address: 2**31")
        self.words = torch.zeros(num_words, dtype=torch.int32, device=device)

    @property
    def num_rows(self) -> int:
        """Number of rows of every column, R."""
        return self._num_rows

    def column(self, name: str) -> Tensor:
        """Return a view of one column, ``[R]`` or ``[R, width]``, contiguous."""
        field, first = self._fields[name], self._first[name]
        entries = self.words[first : first + self._num_rows * field.row_words].view(field.dtype)
        return entries if field.width is None else entries.view(self._num_rows, field.width)

    def patch(self) -> RowPatch:
        """Begin a patch."""
        return RowPatch(self.words, self._fields, self._first, self._num_rows)


class RowPatch:
    """
    Changes of `PackedRows`, collected on the host. They take effect when the result of `packed` is
    applied by `patch_rows`. No two may change the same entry.
    """

    def __init__(
        self, words: Tensor, fields: dict[str, RowField], first: dict[str, int], num_rows: int
    ) -> None:
        self._device = words.device
        self._fields = fields
        self._first = first
        self._num_rows = num_rows
        self._places: list[NDArray[np.int64]] = []
        self._words: list[NDArray[np.int32]] = []

    def set_rows(
        self, name: str, row: NDArray[np.integer], value: NDArray[np.integer | np.floating]
    ) -> None:
        """
        Change the first entries of some rows of a column.

        Args:
            name: Name of the column.
            row: ``[P]``, in [0, R).
            value: ``[P]``, or ``[P, V]`` with V at most the column's width. Converted to the
                column's type.

        Raises:
            ValueError: A row does not exist, or there are too many entries.
        """
        field = self._fields[name]
        width = 1 if field.width is None else field.width
        entries = value.reshape(len(row), -1) if len(row) else value.reshape(0, 1)
        if entries.shape[1] > width:
            raise ValueError(f"{entries.shape[1]} entries for column {name!r} of {width} per row")
        index = np.arange(entries.shape[1])[None, :]
        self._add(field, np.asarray(row, np.int64)[:, None], index, entries)

    def set_entries(
        self,
        name: str,
        row: NDArray[np.integer],
        index: NDArray[np.integer],
        value: NDArray[np.integer | np.floating],
    ) -> None:
        """
        Change single entries of a column with several per row: entry `index` of `row`, ``[P]``
        each.

        Raises:
            ValueError: A row or entry does not exist.
        """
        field = self._fields[name]
        self._add(field, np.asarray(row, np.int64), np.asarray(index, np.int64), value)

    def packed(self) -> Tensor:
        """
        Copy the changes to the device in the form that `patch_rows` takes, int32 ``[2, N]``; the
        host does not wait for the copy.

        Raises:
            ValueError: Two changes are of one entry.
        """
        is_pinned = self._device.type == "cuda"
        num_words = sum(len(place) for place in self._places)
        packed = torch.empty((2, num_words), dtype=torch.int32, pin_memory=is_pinned)
        if num_words:
            host = packed.numpy()
            np.concatenate(self._places, out=host[0], casting="same_kind")
            np.concatenate(self._words, out=host[1])
            in_order = np.sort(host[0])
            if (in_order[1:] == in_order[:-1]).any():
                raise ValueError("a patch changes an entry twice")
        return packed.to(self._device, non_blocking=True)

    def _add(
        self,
        field: RowField,
        row: NDArray[np.int64],
        index: NDArray[np.int64],
        value: NDArray[np.integer | np.floating],
    ) -> None:
        """Add changes of entry `index` of `row`, broadcast to the shape of `value`."""
        width = 1 if field.width is None else field.width
        if not _is_within(row, self._num_rows) or not _is_within(index, width):
            raise ValueError(
                f"column {field.name!r} has {self._num_rows} rows of {width} entries, a change "
                "lies outside"
            )
        entry_words = field.entry_words
        place = (self._first[field.name] + (row * width + index) * entry_words).reshape(-1, 1)
        values = np.ascontiguousarray(value, _NUMPY_DTYPES[field.dtype])
        self._places.append((place + np.arange(entry_words)).reshape(-1))
        self._words.append(values.reshape(-1).view(np.int32))


def _is_within(places: NDArray[np.int64], end: int) -> bool:
    return not places.size or (int(places.min()) >= 0 and int(places.max()) < end)
