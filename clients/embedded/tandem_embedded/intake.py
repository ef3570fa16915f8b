"""Intake of requests: from the caller's prompt and parameters to the core's request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import Any

import numpy as np

from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.frontend.request.lengths import DEFAULT_MAX_TOKENS
from scheduler_svc.frontend.request.validation import (
    check_tenant,
    check_token_ids,
    check_tokenizer_fits,
)
from tandem.errors import TandemError
from tandem_embedded.errors import ValidationError, engine_error, engine_errors
from tandem_embedded.ledger import Delivery, Entry
from tandem_embedded.metadata import RequestMetadata
from tandem_embedded.params import GenerationParams, Vocabulary
from tandem_embedded.tokenizer import ChatTokenizer, Tokenizer

Prompt = str | Sequence[int]
"""Text or token ids."""
Messages = Sequence[Mapping[str, str]]
"""A conversation; each message has "role" and "content"."""


class Intake:
    """Checker of requests, which also resolves their parameters; immutable."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocabulary: Vocabulary,
        max_model_len: int,
        metadata: RequestMetadata | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._metadata = metadata or RequestMetadata()

    def prepare(
        self,
        prompt: Prompt | None,
        messages: Messages | None,
        params: GenerationParams,
        delivery: Delivery | None,
    ) -> Entry:
        """
        Check and tokenize a request. The fields of the entry that are known only after acceptance
        (id, time, truncation) are still to be set.

        Raises:
            ValidationError: The message names the mistake.
            ConfigError: The tokenizer makes ids that the model does not have.
        """
        given: Any = params
        if not isinstance(given, GenerationParams):
            message = f"params must be GenerationParams, got {given!r}."
            raise ValidationError(message, reason="INVALID_PARAMETER", field="params")
        params.validate()
        params.check_ids(self._vocabulary.size, self._vocabulary.eos_token_ids)
        self._metadata.check(params)
        self._check_needs(params)
        if (prompt is None) is (messages is None):
            message = "give either a prompt or messages."
            raise ValidationError(message, reason="EMPTY_PROMPT", field="prompt")
        token_ids = self._chat(messages) if prompt is None else self._token_ids(prompt)
        self._check_vocabulary(token_ids, is_ours=prompt is None or isinstance(prompt, str))
        room = max(1, self._max_model_len - len(token_ids))
        is_chat, is_default = messages is not None, params.max_tokens is None
        eos = () if params.ignore_eos else self._vocabulary.eos_token_ids
        return Entry(
            prompt=token_ids,
            params=params.resolved(
                self._vocabulary.defaults, room if is_chat else min(DEFAULT_MAX_TOKENS, room)
            ),
            ends=frozenset({*eos, *params.stop_token_ids}),
            fills_context=is_default and (is_chat or room < DEFAULT_MAX_TOKENS),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            delivery=delivery,
        )

    def new_request(self, entry: Entry) -> NewRequest:
        """Return the core's request for an entry."""
        params = entry.params
        assert params.max_tokens is not None
        sampling = params.row_sampling(entry.seed, entry.ends)
        row_metadata = self._metadata.of_row(params, entry.ends)
        eos = () if params.ignore_eos else self._vocabulary.eos_token_ids
        return NewRequest(
            request_id=str(entry.request_id),
            handle=entry.request_id,
            prompt=np.array(entry.prompt, np.int32),
            sampling=replace(sampling, row_metadata=row_metadata) if row_metadata else sampling,
            max_tokens=params.max_tokens,
            arrival_s=entry.created_at,
            eos_token_ids=frozenset(eos),
            stop_token_ids=frozenset(params.stop_token_ids),
            fills_context=entry.fills_context,
            num_choices=params.n,
            priority=params.priority,
            tenant=params.tenant,
            cache_salt=params.cache_salt.encode(),
        )

    def _check_needs(self, params: GenerationParams) -> None:
        try:
            check_tenant(params.tenant)
        except TandemError as error:
            raise engine_error(error) from error
        if params.stop and self._tokenizer is None:
            message = "stop strings need text: give a tokenizer, or stop_token_ids instead."
            raise ValidationError(message, reason="INVALID_PARAMETER", field="stop")

    def _chat(self, messages: Messages | None) -> list[int]:
        if not messages:
            message = "chat must have at least one message."
            raise ValidationError(message, reason="EMPTY_PROMPT", field="messages")
        for at, one in enumerate(messages):
            if not _is_message(one):
                message = f'messages[{at}] must have a "role", not empty, and a "content".'
                raise ValidationError(message, reason="INVALID_PARAMETER", field="messages")
        tokenizer: object = self._tokenizer
        if not isinstance(tokenizer, ChatTokenizer):
            message = "the tokenizer has no chat template: send the prompt as text or token ids."
            raise ValidationError(message, reason="CHAT_TEMPLATE", field="messages")
        try:
            return tokenizer.encode_chat(messages, max_prompt_len=self._max_model_len)
        except TandemError as error:
            raise engine_error(error) from error

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise ValidationError("the prompt is empty.", reason="EMPTY_PROMPT", field="prompt")
            if self._tokenizer is None:
                message = "the model has no tokenizer.json: give token ids or a tokenizer."
                raise ValidationError(message, reason="INVALID_PARAMETER", field="prompt")
            prompt = self._tokenizer.encode(prompt)
        given: Any = prompt
        try:
            return [index(token) for token in given]
        except TypeError:
            message = f"the prompt must be text or whole numbers, got {prompt!r:.80}."
            raise ValidationError(message, reason="INVALID_PARAMETER", field="prompt") from None

    def _check_vocabulary(self, token_ids: Sequence[int], *, is_ours: bool) -> None:
        """Refuse ids that the model lacks, from the caller or, if `is_ours`, the tokenizer."""
        with engine_errors():
            if is_ours:
                check_tokenizer_fits(token_ids, self._vocabulary.size)
            else:
                check_token_ids(token_ids, self._vocabulary.size, field="prompt")


def _is_message(given: Any) -> bool:
    if not isinstance(given, Mapping):
        return False
    role, content = given.get("role"), given.get("content")
    return isinstance(role, str) and isinstance(content, str) and bool(role)
