"""Truncation of a prompt that is too long: one rule for frontends and core."""

from __future__ import annotations


def num_to_drop(prompt_len: int, max_tokens: int, longest: int) -> int:
    """
    Return the number of oldest tokens to drop from a prompt that leaves no room for even one token
    of output; 0 for any other prompt.

    So many are dropped that `max_tokens` has room, up to half of `longest`: an output of one token
    would be of little use.

    Args:
        prompt_len: Tokens of the prompt, at least 1.
        max_tokens: Output tokens asked for, at least 1.
        longest: Most tokens of prompt and output together, at least 2.
    """
    if prompt_len < longest:
        return 0
    return prompt_len - (longest - min(max_tokens, longest // 2))
