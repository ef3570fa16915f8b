"""
Tensors of a model directory: one model.safetensors, or shards named by
model.safetensors.index.json.

The format is 8 bytes of little-endian header length, a JSON header and the tensors' bytes. We read
pieces of bounded size into one buffer instead of mapping the file: mapped pages count as resident
memory, and a process that copies weights through a map peaks at twice their size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from executor_svc.model.files.json_fields import JsonFields, shown
from executor_svc.parallel.sharding import TensorSlice
from tandem.errors import InvalidModel

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_PIECE_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100 << 20
_MAX_NAME_CHARS = 255
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Place of a tensor in a file: `num_bytes` from `offset` in `file`, row-major."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a model directory by name, and the files that hold them."""

    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]

    @classmethod
    def open(cls, model_dir: Path) -> Checkpoint:
        """
        Read and check all headers.

        Raises:
            InvalidModel: There are no weights, a shard is missing, a file is truncated or corrupt,
                or the index disagrees with its shards.
        """
        index_path = model_dir / INDEX_NAME
        if index_path.is_file():
            return cls._open_shards(model_dir, index_path)
        single = model_dir / SINGLE_NAME
        if single.is_file():
            return cls(_read_header(single), (single,))
        others = sorted(path.name for path in model_dir.glob("*.bin"))
        hint = f" ({others[0]} is not read: convert it to safetensors)" if others else ""
        raise InvalidModel(f"{model_dir} has neither {SINGLE_NAME} nor {INDEX_NAME}{hint}")

    @classmethod
    def _open_shards(cls, model_dir: Path, index_path: Path) -> Checkpoint:
        weight_map = JsonFields.read(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InvalidModel(f"{index_path}: weight_map must map tensor names to file names")
        tensors: dict[str, StoredTensor] = {}
        files = []
        for name, value in weight_map.items():
            if not _is_file_name(value):
                raise InvalidModel(
                    f"{index_path}: tensor {shown(name)} must be in a file beside it, not in "
                    f"{shown(value)}"
                )
        for file_name in sorted(set(weight_map.values())):
            file = model_dir / file_name
            if not file.is_file():
                raise InvalidModel(
                    f"{file} is named by {INDEX_NAME} but is missing: the download is incomplete"
                )
            found = _read_header(file)
            expected = {name for name, value in weight_map.items() if value == file_name}
            for name in sorted(expected ^ set(found)):
                where = "lacks" if name in expected else "holds, but not for this file,"
                raise InvalidModel(
                    f"{file} {where} tensor {shown(name)} that {INDEX_NAME} describes"
                )
            tensors.update(found)
            files.append(file)
        return cls(tensors, tuple(files))


def _is_file_name(value: object) -> bool:
    """Tell whether this is a valid file name without a path."""
    return (
        isinstance(value, str)
        and 0 < len(value.encode("utf-8", "surrogatepass")) <= _MAX_NAME_CHARS
        and value.isprintable()
        and Path(value).name == value != ".."
    )


def read_pieces(
    tensor: StoredTensor,
    handle: BinaryIO,
    *,
    rows: int | None = None,
    part: TensorSlice | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """
    Read a tensor in pieces of whole rows and bounded size.

    Args:
        tensor: The tensor to read.
        handle: Its file, open for reading without buffering.
        rows: Rows of a piece; None for as many as a piece may have.
        part: Rows, or columns of a matrix, to read as if they were the tensor: no other bytes are
            read. None for all.

    Yields:
        The first row's index and the rows, shape ``[rows, *shape[1:]]`` in the stored type; the
        rows are valid only until the next piece is asked for.

    Raises:
        InvalidModel: The file ended early.
    """
    shape = tensor.shape or (1,)
    stride = tensor.num_bytes // max(1, shape[0])
    first, num_rows, skipped, row_bytes = 0, shape[0], 0, stride
    if part is not None and part.dim == 0:
        first, num_rows = part.start, part.stop - part.start
    elif part is not None:
        item_bytes, shape = tensor.dtype.itemsize, (shape[0], part.stop - part.start)
        skipped, row_bytes = part.start * item_bytes, shape[1] * item_bytes
    rows_per_piece = rows or max(1, min(num_rows, _PIECE_BYTES // max(1, row_bytes)))
    buffer = torch.empty(rows_per_piece * row_bytes, dtype=torch.uint8)
    for start in range(0, num_rows, rows_per_piece):
        count = min(rows_per_piece, num_rows - start)
        piece = buffer[: count * row_bytes]
        begin = tensor.offset + (first + start) * stride + skipped
        _read_rows(handle, piece.numpy().data, tensor, begin=begin, stride=stride, count=count)
        yield start, piece.view(tensor.dtype).view(count, *shape[1:])


def _read_rows(
    handle: BinaryIO,
    target: memoryview,
    tensor: StoredTensor,
    *,
    begin: int,
    stride: int,
    count: int,
) -> None:
    """Fill `target` with `count` rows that begin `stride` bytes apart in the file."""
    row_bytes = len(target) // count
    if row_bytes == stride:  # rows follow each other
        handle.seek(begin)
        _read_into(handle, target, tensor)
        return
    for row in range(count):
        handle.seek(begin + row * stride)
        _read_into(handle, target[row * row_bytes : (row + 1) * row_bytes], tensor)


def _read_into(handle: BinaryIO, target: memoryview, tensor: StoredTensor) -> None:
    filled = 0
    while filled < len(target):
        count = handle.readinto(target[filled:])  # type: ignore[attr-defined]  # raw files have it
        if not count:
            raise InvalidModel(f"{tensor.file} is truncated: it ends inside tensor {tensor.name!r}")
        filled += count


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        file_bytes = file.stat().st_size
        with file.open("rb") as handle:
            prefix = handle.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise InvalidModel(
                    f"{file} is truncated or not a safetensors file: it has {file_bytes} bytes and "
                    f"its header claims {header_bytes}"
                )
            header = json.loads(handle.read(header_bytes))
    except OSError as error:
        raise InvalidModel(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{file} is corrupt: its header is not valid JSON") from error
    if not isinstance(header, dict):
        raise InvalidModel(f"{file} is corrupt: its header is not a JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + header_bytes
    tensors = {
        name: _stored_tensor(file, name, entry, data_start) for name, entry in header.items()
    }
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=data_start)
    if end > file_bytes:
        raise InvalidModel(
            f"{file} is truncated: its header describes {end} bytes but it has {file_bytes}; "
            "download it again"
        )
    return tensors


def _stored_tensor(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        shape = tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
        type_name = str(entry["dtype"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidModel(
            f"{file} is corrupt: its header misdescribes tensor {shown(name)}"
        ) from error
    dtype = _DTYPES.get(type_name)
    if dtype is None:
        raise InvalidModel(
            f"{file}: tensor {shown(name)} has type {shown(type_name)}, supported: "
            f"{', '.join(_DTYPES)}"
        )
    num_bytes = math.prod(shape) * dtype.itemsize
    if begin < 0 or min(shape, default=0) < 0 or end - begin != num_bytes:
        raise InvalidModel(
            f"{file} is corrupt: tensor {shown(name)} of shape {shown(list(shape))} needs "
            f"{shown(num_bytes)} bytes but spans {shown(end - begin)}"
        )
    return StoredTensor(
        name=name,
        file=file,
        dtype=dtype,
        shape=shape,
        offset=data_start + begin,
        num_bytes=num_bytes,
    )
