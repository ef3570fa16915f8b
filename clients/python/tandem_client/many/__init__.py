"""Many completions at once: the prompts that callers may give, and the outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tandem.errors import InvalidParameter, TandemError
from tandem_client.events import Completion
from tandem_client.params import GenerateOptions
from tandem_client.request import build_request

DEFAULT_CONCURRENCY = 16

Item = str | Mapping[str, Any]
"""A prompt's text, or the options of one request with its `prompt`."""

Outcome = Completion | TandemError
"""Result of one prompt: its completion, or the error that it failed with."""


def check_options(options: GenerateOptions, concurrency: int) -> None:
    """
    Check the options that hold for every prompt.

    Raises:
        TypeError: An option has an unknown name.
        InvalidParameter: An option cannot be sent, or is the prompt of one request.
    """
    if concurrency < 1:
        raise InvalidParameter(
            f"concurrency must be at least 1, not {concurrency}", field="concurrency"
        )
    build_request("", options)


def options_of(item: Item, options: GenerateOptions) -> tuple[str | None, GenerateOptions]:
    """Return the text of a prompt, None if it has none, and the options of its request."""
    if not isinstance(item, Mapping):
        return item, options
    given = {**options, **item}
    return given.pop("prompt", None), cast("GenerateOptions", given)


def refused(item_error: TypeError) -> InvalidParameter:
    """Return the outcome of a prompt whose options have an unknown name."""
    return InvalidParameter(str(item_error), field="prompts")
