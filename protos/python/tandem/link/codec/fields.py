"""Fields of the step link's messages: columns as bytes and back, and the error for a bad field."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from tandem.errors import SessionLost

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message that either end accepts, also the limit of gRPC channels and servers."""

INT32 = np.dtype("<i4")
UINT32 = np.dtype("<u4")
UINT8 = np.dtype("u1")
FLOAT32 = np.dtype("<f4")

_EMPTY: dict[np.dtype[Any], NDArray[Any]] = {
    dtype: np.frombuffer(b"", dtype) for dtype in (INT32, UINT32, UINT8, FLOAT32)
}
"""Empty columns by type; most columns of most messages are empty."""

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Kind = TypeVar("_Kind", bound=enum.Enum)


def parsed(message: Any, raw: bytes) -> Any:
    """Parse a message from its bytes and return it, or raise `SessionLost`."""
    if len(raw) > MAX_MESSAGE_BYTES:
        problem = f"has {len(raw)} bytes, at most {MAX_MESSAGE_BYTES} are taken"
        raise malformed(message.DESCRIPTOR.name, problem)
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise malformed(message.DESCRIPTOR.name, f"does not parse: {error}") from error
    return message


def raw_column(column: NDArray[_Scalar], dtype: np.dtype[Any]) -> bytes:
    """Serialize a column; raise TypeError if its type would have to be narrowed."""
    if column.dtype is dtype:  # the usual case, as numpy has one object per native type
        return column.tobytes()
    return column.astype(dtype, casting="safe", copy=False).tobytes()


def read_column(raw: bytes, dtype: np.dtype[_Scalar], field: str) -> NDArray[_Scalar]:
    """Return a read-only view of bytes as a column, shape ``[N]``, or raise `SessionLost`."""
    if not raw:
        empty: NDArray[_Scalar] = _EMPTY[dtype]
        return empty
    if len(raw) % dtype.itemsize:
        raise malformed(field, f"has {len(raw)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(raw, dtype)


def check_length(column: NDArray[Any], expected: int, field: str) -> None:
    """Refuse a column that is not as long as its group."""
    if len(column) != expected:
        raise malformed(field, f"has {len(column)} entries where its group has {expected}")


def known_kind(kinds: type[_Kind], value: int, field: str) -> _Kind:
    """Return the enum member of a number, or raise `SessionLost` if there is none."""
    try:
        return kinds(value)
    except ValueError as error:
        raise malformed(field, f"is {value}, which is no known kind") from error


def malformed(field: str, problem: str) -> SessionLost:
    """Build the error that names a malformed field."""
    return SessionLost(
        f"malformed message on the step link: {field} {problem}", metadata={"field": field}
    )
