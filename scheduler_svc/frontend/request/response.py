"""
Responses: what they must tell, checked against what this server supports.

Field paths start at GenerateRequest.
"""

from __future__ import annotations

from tandem.errors import FeatureUnsupported, InvalidParameter
from tandem.inference.v1 import model_pb2, request_pb2
from tandem.inference.v1.inference_service_pb2 import GenerateRequest
from tandem.sampling_params import MAX_LOGPROBS

MAX_DELTA_INTERVAL_S = 10.0
MAX_LOGPROB_IDS = 64
_NEEDS_CAPABILITY = ("parse_output",)
"""Options that have a capability of the same name, which no server of this release has."""


def capabilities(
    *, has_tokenizer: bool, has_chat_template: bool, scores_prompts: bool
) -> model_pb2.ModelCapabilities:
    """Return what this server can do for a model."""
    return model_pb2.ModelCapabilities(
        text=has_tokenizer,
        chat=has_chat_template,
        logprobs=True,
        prompt_logprobs=scores_prompts,
        token_bytes=has_tokenizer,
        logprob_token_ids=True,
        allowed_token_ids=True,
        include_stop=True,
    )


def check_response(request: GenerateRequest) -> None:
    """
    Check what the response must tell, and that nothing is asked for that is not supported.

    Raises:
        FeatureUnsupported: An option, or structured output, is not supported here.
        InvalidParameter: A value is out of range.
    """
    response = request.response
    if request.HasField("structured_output"):
        raise _unsupported("structured_output", "structured_output")
    for option, value in response.ListFields():
        if option.name in _NEEDS_CAPABILITY and value is not False:
            raise _unsupported(option.name, f"response.{option.name}")
    _check_values(response)


def check_text_options(response: request_pb2.ResponseOptions, *, has_tokenizer: bool) -> None:
    """
    Check that nothing is asked for that only a model with a tokenizer can tell.

    Raises:
        FeatureUnsupported: An option needs a tokenizer, and the model has none.
    """
    if response.token_bytes and not has_tokenizer:
        raise _unsupported("token_bytes", "response.token_bytes")


def _check_values(response: request_pb2.ResponseOptions) -> None:
    for name in ("token_bytes", "logprob_token_ids"):
        if getattr(response, name) and not response.HasField("logprobs"):
            raise InvalidParameter(
                f"{name} needs logprobs, which tells the tokens one by one: set it, to 0 at least.",
                field=f"response.{name}",
            )
    if len(response.logprob_token_ids) > MAX_LOGPROB_IDS:
        raise InvalidParameter(
            f"logprob_token_ids must have at most {MAX_LOGPROB_IDS} ids, "
            f"got {len(response.logprob_token_ids)}.",
            field="response.logprob_token_ids",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (num_top := getattr(response, name)) > MAX_LOGPROBS:
            raise InvalidParameter(
                f"{name} must be in [0, {MAX_LOGPROBS}], got {num_top}.", field=f"response.{name}"
            )
    interval_s = response.min_delta_interval_s
    if not 0 <= interval_s <= MAX_DELTA_INTERVAL_S:
        raise InvalidParameter(
            f"min_delta_interval_s must be in [0, {MAX_DELTA_INTERVAL_S:g}], got {interval_s:g}.",
            field="response.min_delta_interval_s",
        )


def _unsupported(name: str, field: str) -> FeatureUnsupported:
    return FeatureUnsupported(
        f"this server does not support {name}: see the capabilities that GetModel tells.",
        field=field,
    )
