"""Fields of a message, set from the values of a caller; errors name the path of the field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from tandem.errors import InvalidParameter

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
"""Ranges of the integer fields of a message; the server may allow less."""


def set_field(message: Any, path: str, name: str, value: Any) -> None:
    """
    Set a field, of whichever kind, from a plain value.

    Raises:
        InvalidParameter: The field cannot hold the value; the error has the path.
    """
    try:
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            getattr(message, name).extend(value)
        elif isinstance(value, Mapping):
            getattr(message, name).update(value)
        else:
            setattr(message, name, value)
    except UnicodeError as error:
        raise InvalidParameter(f"{name} is not valid UTF-8 text", field=path) from error
    except (TypeError, ValueError, AttributeError) as error:
        why = _range_left(message, name, value) or f"{name} cannot be sent: {error}"
        raise InvalidParameter(why, field=path) from error


def listed(name: str, values: Any, *, path: str) -> list[Any]:
    """
    Return the values of an option that must be a list.

    Raises:
        InvalidParameter: It is not one.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidParameter(f"{name} must be a list, not {type(values).__name__}", field=path)
    return list(values)


def json_object(name: str, value: Any, *, path: str) -> str:
    """
    Return a mapping as the text of a JSON object, with its keys in their order.

    Raises:
        InvalidParameter: It is no mapping, or JSON cannot hold what is in it.
    """
    if not isinstance(value, Mapping):
        raise InvalidParameter(f"{name} must be a dict, not {type(value).__name__}", field=path)
    try:
        return json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParameter(f"{name} cannot be sent as JSON: {error}", field=path) from error


def _range_left(message: Any, name: str, value: Any) -> str | None:
    """Return a sentence with the range of an integer field if the value is outside it, or None."""
    bounds = _INTEGERS.get(message.DESCRIPTOR.fields_by_name[name].cpp_type)
    if not isinstance(value, int) or bounds is None or bounds[0] <= value <= bounds[1]:
        return None
    return f"{name} must be in {bounds[0]} to {bounds[1]}, not {value}"
