"""
C++ kernels over tensors of more than 2**31 elements, next to the same numbers side by side.

The functions are run in a process of their own, because a wrong address may end the process. Pages that
are never touched take no memory.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.packed_linear import PackedWeight
from kernels.packed_linear import cpu_extension as product
from kernels.paged_attention import AttentionShape, PagedSequences
from kernels.paged_attention import cpu_extension as attention
from kernels.rms_norm import cpu_extension as norm
from kernels.rope_kv_write import cpu_extension as rope
from kernels.sampling import SamplingColumns
from kernels.sampling import cpu_extension as sampling
from kernels.silu_mul import cpu_extension as gate

STRIDE = 1_100_000_000
"""Elements from row to row: the third row begins behind 2**31."""

assert 2 * STRIDE > 2**31


def far(near: Tensor) -> Tensor:
    """Return the same rows, `STRIDE` elements apart."""
    num_rows, width = near.shape
    memory = torch.empty((num_rows - 1) * STRIDE + width, dtype=near.dtype)
    rows = memory.as_strided((num_rows, width), (STRIDE, 1))
    return rows.copy_(near)


def numbers(*shape: int) -> Tensor:
    """Return normal numbers in bfloat16, the same ones in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def norms_and_gates() -> None:
    """Normalise and gate rows."""
    x, weight = numbers(3, 64), numbers(64)
    assert torch.equal(norm.rms_norm(x, weight, 1e-5), norm.rms_norm(far(x), weight, 1e-5))
    assert torch.equal(gate.silu_mul(x), gate.silu_mul(far(x)))


def products() -> None:
    """Multiply rows with a packed weight."""
    packed = PackedWeight.of(numbers(40, 64))
    x = numbers(3, 64)
    found = product.packed_linear(far(x), packed.data, 40, None, None, 1, x.dtype)
    assert torch.equal(product.packed_linear(x, packed.data, 40, None, None, 1, x.dtype), found)


def rotary_positions_and_writes() -> None:
    """Rotate rows and store them in the last block of a cache."""
    qkv, position = numbers(3, 3 * 64), torch.tensor([3, -1, 8])
    rotation = torch.randn(3, 32, 2)
    cache = torch.zeros((1, 16, 2, 1, 64), dtype=torch.bfloat16)
    num_blocks = 2**31 // cache.numel() + 2
    large = torch.empty((num_blocks, *cache.shape[1:]), dtype=torch.bfloat16)
    large[-1] = 0
    behind = torch.where(position < 0, position, position + (num_blocks - 1) * 16)
    queries = [
        rope.rope_kv_write(rows, rotation, place, to, qk_norm=None, norm_eps=0.0)
        for rows, place, to in ((qkv.clone(), position, cache), (far(qkv), behind, large))
    ]
    assert cache.any()
    assert torch.equal(*queries)
    assert torch.equal(cache[0], large[-1])


def attention_to_the_last_blocks() -> None:
    """Attend to blocks at the end of a cache, for a decode and for a chunk of a prompt."""
    shape = AttentionShape(
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        block_size=16,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    query, cache = numbers(4, 2, 64), numbers(5, 16, 2, 1, 64)
    num_blocks = 2**31 // cache[0].numel() + 6
    large = torch.empty((num_blocks, *cache.shape[1:]), dtype=torch.bfloat16)
    large[-5:] = cache
    found = []
    for blocks in (cache, large):
        first = len(blocks) - 5
        sequences = PagedSequences(
            query_len=np.array([1, 3], np.int32),
            seq_len=np.array([30, 40], np.int32),
            block_table=np.array(
                [[first, first + 1, 0], [first + 2, first + 4, first + 3]], np.int32
            ),
        )
        found.append(attention.plan(sequences, shape, None).attend(query, blocks, 0.125))
    assert torch.equal(*found)


def draws_and_log_probabilities() -> None:
    """Draw from rows of logits, and tell their log probabilities."""
    logits = numbers(3, 90)
    whole, real = torch.arange(3), torch.ones(3)
    columns = SamplingColumns(
        temperature=torch.tensor([0.0, 1.0, 0.7]),
        top_k=torch.tensor([0, 20, 0], dtype=torch.int32),
        top_p=real * 0.9,
        seed=whole,
        position=whole,
        choice=whole,
        min_p=None,
    )
    near, wide = (
        sampling.sample(rows, columns, num_logprobs=torch.tensor([2, 0, 3]))
        for rows in (logits, far(logits))
    )
    assert near.valid.all()
    assert torch.equal(near.token, wide.token)
    assert near.logprobs is not None
    assert wide.logprobs is not None
    assert torch.equal(near.logprobs.chosen, wide.logprobs.chosen)
    assert torch.equal(near.logprobs.top, wide.logprobs.top)
