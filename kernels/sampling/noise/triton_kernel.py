"""The arithmetic of `noise.reference` and `sampling.reference.scale` inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sampling import reference
from kernels.sampling.noise import reference as noise

MAX_SPREAD = tl.constexpr(noise.MAX_SPREAD)

_ID_STEP = tl.constexpr(0x9E3779B1)
_MIX_1 = tl.constexpr(0x7FEB352D)
_MIX_2 = tl.constexpr(0x846CA68B)
_UNIT = tl.constexpr(2.0**-23)
_MIN_TEMPERATURE = tl.constexpr(reference.MIN_TEMPERATURE)


@triton.jit
def random_bits(
    seed: tl.tensor, position: tl.tensor, choice: tl.tensor, ids: tl.tensor
) -> tl.tensor:
    """Compute `noise.mix32` as uint32; seed, position and choice are one row's int64, ids int32."""
    w0, w1, w2, w3 = tl.philox(seed, position.to(tl.int32), choice.to(tl.int32), 0, 0)
    x = ids.to(tl.uint32) * _ID_STEP + w0
    x = ((x ^ (x >> 16)) * _MIX_1) ^ w1
    x = (x ^ (x >> 15)) * _MIX_2 + w2
    return x ^ (x >> 16) ^ w3


@triton.jit
def gumbel(bits: tl.tensor) -> tl.tensor:
    """Compute `noise.gumbel`, float32, of uint32 bits; logarithms must be accurate next to 1."""
    u = ((bits >> 9).to(tl.int32).to(tl.float32) + 0.5) * _UNIT
    return -tl.log(-tl.log(u))


@triton.jit
def scale(logits: tl.tensor, best: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Compute `reference.scale`, with the same bits."""
    return tl.div_rn(logits - best, tl.maximum(temperature, _MIN_TEMPERATURE))
