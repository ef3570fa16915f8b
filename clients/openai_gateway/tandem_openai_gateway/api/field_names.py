"""Names of fields as users of HTTP type them, for errors that name a field of Tandem's request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tandem.errors import TandemError

_OUTER = ("sampling.", "stopping.", "response.", "response_options.", "chat.", "prompt.")
"""Messages of Tandem's request around fields that HTTP has at its top."""

TYPED: Mapping[str, str] = {
    "text": "prompt",
    "token_ids": "prompt",
    "token_ids.ids": "prompt",
    "chat": "messages",
    "template_args": "chat_template_kwargs",
    "template_args_json": "chat_template_kwargs",
    "include_stop": "include_stop_str_in_output",
    "token_bytes": "logprobs",
    "with_texts": "return_token_strs",
}
"""Fields that have another name in HTTP, in requests of every kind."""

_CALL = r"messages\[\d+\]\.tool_calls\[\d+\]"
_INSIDE = (
    (re.compile(r"^(tools\[\d+\])\.definition_json"), r"\1"),
    (re.compile(r"^(messages\[\d+\])\.reasoning\b"), r"\1.reasoning_content"),
    (re.compile(r"^(messages\[\d+\])\.parts\b"), r"\1.content"),
    (re.compile(rf"^({_CALL})\.name\b"), r"\1.function.name"),
    (re.compile(rf"^({_CALL})\.arguments_json\b"), r"\1.function.arguments"),
)
"""Fields of the elements of lists that have another name in HTTP."""

Naming = Callable[[str], str]
"""Function from a field's name that is typed in most requests to the one typed in this request."""


def unchanged(name: str) -> str:
    """Return the name."""
    return name


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Return a path of a field with its beginning replaced where these names have it."""
    for length in (len(name), name.find("["), name.find(".")):
        if length > 0 and name[:length] in names:
            return names[name[:length]] + name[length:]
    return name


def typed_name(field: str, naming: Naming = unchanged) -> str:
    """
    Return what the user of HTTP has typed for a field of Tandem's request.

    Args:
        field: Path of the field.
        naming: Names that requests of one kind have, or one request.
    """
    for outer in _OUTER:
        field = field.removeprefix(outer)
    for pattern, name in _INSIDE:
        field = pattern.sub(name, field)
    return naming(renamed(field, TYPED))


def typed_message(error: TandemError, typed: str) -> str:
    """Return the text of an error about a field, with the name that the user of HTTP has typed."""
    field, message = error.field or "", error.message
    if field in {"", typed}:
        return message
    if "." in field:
        message = re.sub(rf"(?<![\w.]){re.escape(field)}(?!\w)", typed, message)
    name, typed_one = _last_name(field), _last_name(typed)
    if not name or name == typed_one:
        return message
    # A word without an underscore may be anything but a name, unless the text begins with it.
    begin = r"(?<![\w.])" if "_" in name else "^"
    return re.sub(rf"{begin}{re.escape(name)}(?!\w|\.\w)", typed_one, message)


def _last_name(path: str) -> str:
    return path.rpartition(".")[2].partition("[")[0]
