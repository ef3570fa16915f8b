"""
Counter-based noise: every random number is a pure function of (seed, position, choice, token id).

There is no random generator, so no state exists that could be lost, shared or advanced by another
row: a row's noise is the same alone or in any batch, on any device, after any restart.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_SPREAD = 19.5
"""
Distance below the best scaled logit from which an id can never win: noise lies in [-2.8115,
16.6356].
"""

_WORD = 0xFFFFFFFF
# Two of the four words are multiplied in each round: they are kept together, "even" beside "odd".
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = torch.tensor([[0xD2511F53], [0xCD9E8D57]])
_PHILOX_KEY_STEPS = torch.tensor([[0x9E3779B9], [0xBB67AE85]])

# int32 with wrap-around holds the same bits as uint32 at half the memory traffic of int64.
_ID_STEP = 0x9E3779B1 - (1 << 32)
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """
    Encrypt 128-bit counters with 64-bit keys: Philox4x32-10 (Salmon et al., SC 2011).

    Args:
        counter: int64[4, R], words in [0, 2**32).
        key: int64[2, R], words in [0, 2**32).

    Returns:
        int64[4, R], words in [0, 2**32).
    """
    multipliers = _PHILOX_MULTIPLIERS.to(counter.device)
    rounds = torch.arange(_PHILOX_ROUNDS, device=counter.device)[:, None, None]
    keys = (key + rounds * _PHILOX_KEY_STEPS.to(counter.device)) & _WORD
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        # the product wraps around in int64, and its two words are right all the same
        product = (even * multipliers).flip(0)
        even = ((product >> 32) & _WORD) ^ odd ^ round_key
        odd = product & _WORD
    return torch.stack((even, odd), dim=1).flatten(0, 1)


def row_words(seed: Tensor, position: Tensor, choice: Tensor) -> Tensor:
    """
    Compute the Philox words of each row: key = seed, counter = (position, choice, 0, 0).

    Args:
        seed: int64[R], the bits of a uint64.
        position: int64[R], index of the drawn token in its whole sequence.
        choice: int64[R].

    Returns:
        int32[4, R], the bits of four uint32.
    """
    zero = torch.zeros_like(position)
    counter = torch.stack((position, choice, zero, zero)) & _WORD
    words = philox4x32(counter, torch.stack((seed, seed >> 32)) & _WORD)
    return words.view(torch.int32)[:, 0::2]  # little-endian: the low halves


def mix32(words: Tensor, ids: Tensor) -> Tensor:
    """
    Spread a row's words over token ids: 32 random bits per (row, id).

    In uint32 arithmetic, with w the row's words:

        x = i * 0x9E3779B1 + w0
        x = (x ^ x >> 16) * 0x7FEB352D ^ w1
        x = (x ^ x >> 15) * 0x846CA68B + w2
        h = x ^ x >> 16 ^ w3

    The shifts and the two multipliers are those of the finaliser lowbias32 (C. Wellons, public
    domain); a word of the row enters at every stage, so that no two rows are one sequence shifted.

    Args:
        words: int32[4, ...], as from `row_words`.
        ids: int32, broadcasts against `words[0]`.

    Returns:
        int32 of the broadcast shape, the bits of uint32.
    """
    w0, w1, w2, w3 = words.unbind(0)
    x = ids * _ID_STEP + w0
    x ^= (x >> 16) & 0xFFFF  # the mask makes the arithmetic shift a logical one
    x *= _MIX_1
    x ^= w1
    x ^= (x >> 15) & 0x1FFFF
    x *= _MIX_2
    x += w2
    x ^= (x >> 16) & 0xFFFF
    x ^= w3
    return x


def uniform(words: Tensor, ids: Tensor) -> Tensor:
    """
    Compute uniform numbers `((h >> 9) + 0.5) / 2**23`, float32, strictly inside (0, 1) and exact.

    Shapes are as in `mix32`.
    """
    h = mix32(words, ids)
    h >>= 9
    h &= 0x7FFFFF
    return h.to(torch.float32).add_(0.5).mul_(2.0**-23)


def gumbel(words: Tensor, ids: Tensor) -> Tensor:
    """Compute Gumbel noise `-log(-log(u))`, float32; shapes are as in `mix32`."""
    return uniform(words, ids).log_().neg_().log_().neg_()
