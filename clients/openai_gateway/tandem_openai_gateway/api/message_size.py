"""Sizes of messages for the schedulers, checked here: gRPC refuses a large one as if overloaded."""

from __future__ import annotations

from google.protobuf.message import Message

from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.upstream import Prompt

TOKEN_ID_BYTES = 4


def check_prompt_fits(prompt: Prompt, max_bytes: int | None) -> None:
    """
    Check a prompt of a text or of ids before its message is built, which would take the memory.

    Args:
        prompt: The prompt.
        max_bytes: Size of the largest message that the schedulers take; None = not known.

    Raises:
        ApiError: Its message would be larger.
    """
    # A character takes one byte or more.
    least = len(prompt.text or "") + TOKEN_ID_BYTES * len(prompt.token_ids or ())
    if max_bytes is not None and least > max_bytes:
        raise _too_large(max_bytes)


def check_fits(message: Message, max_bytes: int | None) -> None:
    """
    Check that the schedulers take a message.

    Raises:
        ApiError: It is larger than `max_bytes`; None = their limit is not known.
    """
    if max_bytes is not None and message.ByteSize() > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"the message for the scheduler is larger than {max_bytes} bytes: a token id is "
        f"{TOKEN_ID_BYTES}",
        code="request_too_large",
    )
