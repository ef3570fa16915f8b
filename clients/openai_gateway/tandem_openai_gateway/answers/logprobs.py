"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem_openai_gateway.upstream import PromptLogprobs, TokenLogprobs

LEAST = -9999.0
"""Log probability of a token that cannot be drawn: JSON has no infinity."""


class TopLogprob(msgspec.Struct, kw_only=True):
    """One of the likeliest tokens; `bytes` is null for a token that adds none, as special ones."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct, kw_only=True):
    """A token of a chat's answer and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a chat's answer, token by token."""

    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Log probabilities of a completion, as parallel lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One id at a place of the prompt, as vLLM tells it."""

    logprob: float
    rank: int
    decoded_token: str


def echoed_logprobs(
    prompt: PromptLogprobs, num_top: int, output: Sequence[TokenLogprobs]
) -> CompletionLogprobs:
    """Return the form of completions for prompt and output; the first token has none."""
    told = completion_logprobs(output, sum(map(len, prompt.texts)))
    offset, offsets = 0, []
    for text in prompt.texts:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        tokens=[*prompt.texts, *told.tokens],
        token_logprobs=[
            *(None if one is None else _finite(one.logprob) for one in prompt.logprobs),
            *told.token_logprobs,
        ],
        top_logprobs=[
            *(None if one is None else _by_text(one, num_top) for one in prompt.logprobs),
            *told.top_logprobs,
        ],
        text_offset=[*offsets, *told.text_offset],
    )


def prompt_logprobs(prompt: PromptLogprobs, num_top: int) -> list[dict[str, PromptLogprob] | None]:
    """Return vLLM's form: by id, the token of the prompt and the likeliest at its place."""
    found: list[dict[str, PromptLogprob] | None] = []
    for token_id, one in zip(prompt.token_ids, prompt.logprobs, strict=True):
        if one is None:
            found.append(None)
            continue
        own = PromptLogprob(logprob=_finite(one.logprob), rank=one.rank, decoded_token=one.text)
        top = {
            str(top_id): PromptLogprob(logprob=_finite(value), rank=rank, decoded_token=text)
            for rank, ((top_id, value), text) in enumerate(
                zip(one.top[:num_top], one.top_texts, strict=False), 1
            )
        }
        found.append({str(token_id): own} | top)
    return found


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Return the form of chats."""
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=one.text,
                logprob=_finite(one.logprob),
                bytes=_bytes(one.token_bytes),
                top_logprobs=[
                    TopLogprob(token=text, logprob=_finite(logprob), bytes=_bytes(raw))
                    for (_, logprob), text, raw in zip(
                        one.top, one.top_texts, one.top_token_bytes, strict=False
                    )
                ],
            )
            for one in tokens
        ]
    )


def completion_logprobs(tokens: Sequence[TokenLogprobs], offset: int) -> CompletionLogprobs:
    """Return the form of completions; `offset` is that of the first token in the text."""
    offsets = []
    for one in tokens:
        offsets.append(offset)
        offset += len(one.text)
    return CompletionLogprobs(
        tokens=[one.text for one in tokens],
        token_logprobs=[_finite(one.logprob) for one in tokens],
        top_logprobs=[_by_text(one) for one in tokens],
        text_offset=offsets,
    )


def _by_text(one: TokenLogprobs, num_top: int | None = None) -> dict[str, float]:
    """Return the likeliest tokens and the drawn one; of two with the same text the likelier."""
    found: dict[str, float] = {}
    for (_, logprob), text in zip(one.top[:num_top], one.top_texts, strict=False):
        found.setdefault(text, _finite(logprob))
    if found:
        found.setdefault(one.text, _finite(one.logprob))
    return found


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


def _bytes(raw: bytes) -> list[int] | None:
    return list(raw) or None
