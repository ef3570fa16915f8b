"""
Counter-based noise: every random number is a pure function of (seed, position, choice, token id).

Nothing is drawn from a generator, so no state exists that could be lost, shared or advanced by a
neighbour: a row's noise is the same alone or in any batch, on any device, after any restart.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_SPREAD = 19.5
"""Noise lies in [-2.8115, 16.6356]: an id this far below the best scaled logit can never win."""

_WORD = 0xFFFFFFFF
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

# int32 with wrap-around holds the same bits as uint32 at half the memory traffic of int64.
_ID_STEP = 0x9E3779B1 - (1 << 32)
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    Encrypt a 128-bit counter with a 64-bit key: Philox4x32-10 (Salmon et al., SC 2011).

    Args:
        counter: Four words, each int64 in [0, 2**32), equal shapes.
        key: Two such words.

    Returns:
        Four words of the same form.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        high0, low0 = _multiply(c0, _PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _PHILOX_KEY_STEPS[0]) & _WORD
        k1 = (k1 + _PHILOX_KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, in halves so that int64 never overflows."""
    low = x * (factor & 0xFFFF)
    high = x * (factor >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def row_words(seed: Tensor, position: Tensor, choice: Tensor) -> Tensor:
    """
    Philox words of each row: key = seed, counter = (position, choice, 0, 0).

    Args:
        seed: int64[R], the bits of a uint64.
        position: int64[R], index of the drawn token in its whole sequence.
        choice: int64[R].

    Returns:
        int32[4, R], the bits of four uint32.
    """
    zero = torch.zeros_like(position)
    counter = (position & _WORD, choice & _WORD, zero, zero)
    words = philox4x32(counter, (seed & _WORD, (seed >> 32) & _WORD))
    stacked = torch.stack(words)
    return torch.where(stacked >= 1 << 31, stacked - (1 << 32), stacked).to(torch.int32)


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
    Uniform numbers `((h >> 9) + 0.5) / 2**23`, float32, strictly inside (0, 1) and exact.

    Shapes as in `mix32`.
    """
    h = mix32(words, ids)
    h >>= 9
    h &= 0x7FFFFF
    return h.to(torch.float32).add_(0.5).mul_(2.0**-23)


def gumbel(words: Tensor, ids: Tensor) -> Tensor:
    """Gumbel noise `-log(-log(u))`, float32; shapes as in `mix32`."""
    return uniform(words, ids).log_().neg_().log_().neg_()
