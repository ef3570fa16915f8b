"""Common parts of requests for chats and for completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from tandem_openai_gateway.api.field_names import Naming, unchanged
from tandem_openai_gateway.api.refused import refuse_unsupported
from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.upstream import Prompt

MAX_PROMPTS = 256
"""Most prompts of one request, each of which is a Tandem request of its own."""
JSON_SPACE = b" \t\r\n"
SEEDS = 1 << 64
"""Number of seeds; OpenAI's negative ones are counted from the end."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream: with `include_usage` a chunk with the usage precedes the end."""

    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields of OpenAI and of vLLM that say what is generated; each may be left out or null."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the options of the Tandem request that have the same names."""
        options: dict[str, Any] = {name: getattr(self, name) for name in _SAME_NAMES}
        if self.seed is not None:
            options["seed"] = self.seed % SEEDS
        options["include_stop"] = self.include_stop_str_in_output
        return options


_OTHER_NAMES = frozenset(
    {"model", "stream", "stream_options", "return_token_ids", "include_stop_str_in_output"}
)
_SAME_NAMES = tuple(name for name in GenerationFields.__struct_fields__ if name not in _OTHER_NAMES)

Fields = TypeVar("Fields", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """
    One request of the API, checked.

    Attributes:
        model: Name of the model; None = any.
        prompts: Prompts, at least one; each is a Tandem request of its own. Empty ones stand for
            those that are not kept.
        num_choices: Choices of each prompt.
        options: Options of the Tandem requests, by the client's names.
        is_streamed: True for server-sent events.
        includes_usage: True if a stream ends with its usage.
        has_token_ids: True if the ids of the output are told.
        echoes: True if the prompt precedes the output.
        prompt_logprobs: Likeliest tokens to tell with each token of the prompt, in vLLM's form;
            None = not in that form.
        repeated: Fields of the request that the answer repeats.
        naming: Tells how the request names fields, for errors about them.
    """

    model: str | None
    prompts: tuple[Prompt, ...]
    num_choices: int
    options: Mapping[str, Any]
    is_streamed: bool
    includes_usage: bool
    has_token_ids: bool = False
    echoes: bool = False
    prompt_logprobs: int | None = None
    repeated: Mapping[str, Any] = field(default_factory=dict)
    naming: Naming = unchanged

    def without_prompts(self) -> Asked:
        """
        Return what is kept of the request once its messages are built: of the prompts only their
        number, unless the answer repeats them.
        """
        if self.echoes:
            return self
        kept = {"logprobs": self.options.get("logprobs")}
        return replace(self, prompts=(Prompt(),) * len(self.prompts), options=kept)


def read_body(body: bytes, fields: type[Fields]) -> Fields:
    """
    Decode the body of a request.

    Raises:
        ApiError: It is no JSON object, a field has the wrong type, or it asks for what would have
            to be ignored.
    """
    try:
        # Values of keys that are not looked at cost no memory.
        content = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        refuse_unsupported(content, fields.__struct_fields__)
        if "prompt" in fields.__struct_fields__:
            refuse_many_lists(content)
    except msgspec.ValidationError:
        raise ApiError(400, "the body must be a JSON object", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    try:
        return msgspec.json.decode(body, type=fields)
    except msgspec.ValidationError as error:
        raise wrong_type(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


def refuse_many_lists(content: Mapping[str, msgspec.Raw]) -> None:
    """
    Count the lists of a prompt of lists of ids, before they are decoded.

    Raises:
        ApiError: There are more than prompts of a request.
    """
    prompt = bytes(content.get("prompt", b""))
    if prompt.startswith(b"[") and prompt[1:].lstrip(JSON_SPACE).startswith(b"["):
        num_lists = prompt.count(b"[") - 1
        if num_lists > MAX_PROMPTS:
            raise too_many_prompts(num_lists)


def too_many_prompts(num_prompts: int) -> ApiError:
    """Return the answer for a list of more prompts than a request may have."""
    return ApiError(
        400,
        f"prompt may be at most {MAX_PROMPTS} prompts, not {num_prompts}",
        param="prompt",
        code="invalid_parameter",
    )


def wrong_type(error: msgspec.ValidationError) -> ApiError:
    """Return the answer for a field of the wrong type."""
    what, _, where = str(error).partition(" - at `")
    param = where.rpartition("$")[2].strip("`").removeprefix(".") or None
    if param is None and "missing required field" in what:
        param = what.rpartition(" ")[2].strip("`")
    return ApiError(400, f"{param}: {what}" if param else what, param=param, code="invalid_type")


def asked(fields: GenerationFields, prompts: tuple[Prompt, ...], **rest: Any) -> Asked:
    """Return the request that these fields and prompts make; `rest` are attributes of `Asked`."""
    options = fields.sampling() | rest.pop("options", {})
    stream_options = fields.stream_options or StreamOptions()
    return Asked(
        model=fields.model or None,
        prompts=prompts,
        num_choices=1 if fields.n is None else fields.n,
        options=options,
        is_streamed=bool(fields.stream),
        includes_usage=bool(stream_options.include_usage),
        has_token_ids=bool(fields.return_token_ids),
        **rest,
    )
