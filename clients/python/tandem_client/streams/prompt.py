"""Prompts that a stream tells in parts, put together."""

from __future__ import annotations

from collections.abc import Iterable

from tandem_client.events import PromptLogprobs


def joined_prompt(parts: Iterable[PromptLogprobs]) -> PromptLogprobs | None:
    """Join the parts of a prompt, of which some may have come twice; None without any."""
    found: PromptLogprobs | None = None
    for part in parts:
        if found is None or part.first_position == 0:
            found = part
            continue
        kept = part.first_position
        found = PromptLogprobs(
            first_position=0,
            token_ids=found.token_ids[:kept] + part.token_ids,
            texts=found.texts[:kept] + part.texts,
            logprobs=found.logprobs[:kept] + part.logprobs,
        )
    return found
