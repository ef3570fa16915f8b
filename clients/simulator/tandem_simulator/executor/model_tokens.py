"""
Tokens that the modelled executor produces: a pure function of prefix, seed and choice.

A prefix is fingerprinted by a polynomial over its tokens, mod 2^64, so that a chunk of a prompt
folds in by one vector operation and a decoded token by one multiplication. No cryptography: equal
fingerprints of different prefixes are possible, and in practice do not happen.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem.link.batch import Int32Column

UInt64Column: TypeAlias = NDArray[np.uint64]

EOS_ID = 2
FIRST_ID = 3
"""Lowest id of prompts and outputs, so that EOS is never drawn by chance."""
VOCAB_SIZE = 32_000

_BASE = 0x9E3779B97F4A7C15
_CHOICE_MIX = 0x94D049BB133111EB
_FINAL_MIX = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1


def powers_of_base(count: int) -> UInt64Column:
    """Return the weight of each position in a fingerprint, shape ``[count]``."""
    powers = np.full(count, _BASE, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def token_terms(tokens: Int32Column, weights: UInt64Column) -> UInt64Column:
    """Return the terms that tokens add to a fingerprint; all shape ``[N]``."""
    terms: UInt64Column = (tokens.astype(np.uint64) + np.uint64(1)) * weights
    return terms


def choice_term(choice: int) -> int:
    """Return the term that makes the completions of one prompt differ."""
    return choice * _CHOICE_MIX & _MASK


def next_tokens(
    fingerprints: UInt64Column,
    choice_terms: UInt64Column,
    positions: Int32Column,
    end_positions: Int32Column,
) -> Int32Column:
    """
    Sample a token for each row; all shape ``[N]``.

    Args:
        fingerprints: Fingerprints of all tokens before the new one.
        choice_terms: See `choice_term`.
        positions: Index of the new token in its sequence.
        end_positions: Index at which the sequence gets EOS, see `end_position`.
    """
    mixed = fingerprints + choice_terms
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(_FINAL_MIX)
    # The upper half as a fraction of the vocabulary: a division would take several times as long.
    mixed >>= np.uint64(32)
    mixed *= np.uint64(VOCAB_SIZE - FIRST_ID)
    mixed >>= np.uint64(32)
    tokens: Int32Column = mixed.astype(np.int32)
    tokens += FIRST_ID
    tokens[positions == end_positions] = EOS_ID
    return tokens


def end_position(num_prompt_tokens: int, seed: int) -> int:
    """
    Return the index of EOS in a sequence.

    The sampling seed of a modelled request is the number of tokens that it produces.
    """
    return num_prompt_tokens + seed - 1


def unlimited_outputs(
    prompt: Int32Column, output_len: int, max_tokens: int, choice: int = 0
) -> Int32Column:
    """
    Return the tokens of a request with unlimited memory, shape ``[min(output_len, max_tokens)]``.

    This is `next_tokens` a second time, in whole numbers and one token after the other, to compare
    with.
    """
    fingerprint, weight = 0, 1
    for token in prompt.tolist():
        fingerprint = (fingerprint + (token + 1) * weight) & _MASK
        weight = weight * _BASE & _MASK
    outputs: list[int] = []
    for position in range(len(prompt), len(prompt) + min(output_len, max_tokens)):
        mixed = fingerprint + choice_term(choice) & _MASK
        mixed ^= mixed >> 31
        mixed = mixed * _FINAL_MIX & _MASK
        token = FIRST_ID + ((mixed >> 32) * (VOCAB_SIZE - FIRST_ID) >> 32)
        if position == end_position(len(prompt), output_len):
            token = EOS_ID
        outputs.append(token)
        fingerprint = (fingerprint + (token + 1) * weight) & _MASK
        weight = weight * _BASE & _MASK
    return np.array(outputs, np.int32)
