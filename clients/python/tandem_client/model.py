"""Models and tokens of prompts as plain values, without protobuf, and their decoding."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tandem.inference.v1 import model_pb2, tokens_pb2
from tandem_client.params import ResolvedParams, params_from_proto


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCapabilities:
    """
    Abilities of a server for a model; it refuses a request that needs one that is False. Without
    `text` there is no tokenizer: prompts are `token_ids`, and outputs have no text. `chat` stands
    for `messages`; the other fields are named after options of the contract.
    """

    text: bool = False
    chat: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    logprob_token_ids: bool = False
    token_bytes: bool = False
    parse_output: bool = False
    structured_output: bool = False
    allowed_token_ids: bool = False
    include_stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """
    Served model and its limits; `default_params` are those of a text prompt, and their seed has no
    meaning. `max_request_bytes` limits requests, `max_complete_bytes` answers of `complete`.
    """

    name: str
    revision: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    default_params: ResolvedParams
    capabilities: ModelCapabilities
    max_request_bytes: int
    max_complete_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """
    Ids that a request with this prompt would run with, and the most tokens that prompt and output
    may have together. `texts` has the text of each token if it was asked for.
    """

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    max_model_len: int


def model_from_proto(message: model_pb2.Model) -> Model:
    """Decode a model."""
    known = [one.name for one in fields(ModelCapabilities)]
    return Model(
        name=message.name,
        revision=message.revision,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        dtype=message.dtype,
        default_params=params_from_proto(message.default_sampling, message.default_stopping),
        capabilities=ModelCapabilities(
            **{name: getattr(message.capabilities, name) for name in known}
        ),
        max_request_bytes=message.max_request_bytes,
        max_complete_bytes=message.max_complete_bytes,
    )


def tokens_from_proto(response: tokens_pb2.TokenizeResponse) -> PromptTokens:
    """Decode the answer of Tokenize."""
    return PromptTokens(
        token_ids=tuple(response.token_ids),
        texts=tuple(response.token_texts),
        max_model_len=response.max_model_len,
    )
