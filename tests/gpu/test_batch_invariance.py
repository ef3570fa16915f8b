"""A row's bits on a device are the same alone, in any batch and at any place in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_svc.step.graphs.cuda import CudaGraphs
from executor_svc.step.graphs.shapes import GraphShape
from kernels.paged_attention import (
    AttentionShape,
    PagedSequences,
    paged_attention,
    plan_paged_attention,
)
from kernels.rms_norm import rms_norm
from kernels.sampling import SamplingColumns, sample
from kernels.silu_mul import silu_mul
from tandem_bench.device.shapes import SHAPES
from tests.executor_svc.stepping import Row, admission, batch, forward_logits, random_tokens
from tests.gpu.models import BLOCK_SIZE, FILTERED, GREEDY, NOISY, make_runner
from tests.gpu.rounded import numbers

HEADS = (8, 2, 64)
LENGTHS = [(1, 1), (1, 300), (40, 40), (1, 77), (20, 90), (1, 513), (1, 16)]
"""New positions and all positions of each row."""


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class TestAttention:
    def test_rows_have_the_bits_they_have_alone(self, device):
        """
        A row's attention, among decodes and chunks in two orders, is bit for bit that of the row alone.
        """
        num_heads, num_kv_heads, head_dim = HEADS
        of = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=BLOCK_SIZE,
            dtype=dtype_on(device),
            device=device,
            batch_invariant=True,
        )
        held = [-(-total // BLOCK_SIZE) for _, total in LENGTHS]
        blocks = np.random.default_rng(0).permutation(sum(held)).astype(np.int32) + 1
        tables = np.split(blocks, np.cumsum(held)[:-1])
        cache_shape = (sum(held) + 1, BLOCK_SIZE, 2, num_kv_heads, head_dim)
        cache = numbers(*cache_shape, dtype=of.dtype, device=device)
        queries = [
            numbers(query_len, num_heads, head_dim, dtype=of.dtype, device=device, seed=row)
            for row, (query_len, _) in enumerate(LENGTHS)
        ]

        def attend(rows: list[int]) -> list[Tensor]:
            table = np.zeros((len(rows), max(held)), np.int32)
            for place, row in enumerate(rows):
                table[place, : held[row]] = tables[row]
            sequences = PagedSequences(
                query_len=np.array([LENGTHS[row][0] for row in rows], np.int32),
                seq_len=np.array([LENGTHS[row][1] for row in rows], np.int32),
                block_table=table,
            )
            plan = plan_paged_attention(sequences, of)
            query = torch.cat([queries[row] for row in rows])
            out = paged_attention(query, cache, plan, head_dim**-0.5)
            return list(out.split([LENGTHS[row][0] for row in rows]))

        alone = [attend([row])[0] for row in range(len(LENGTHS))]
        for order in (list(range(len(LENGTHS))), [5, 2, 6, 0, 4, 3, 1]):
            for row, found in zip(order, attend(order), strict=True):
                assert torch.equal(alone[row], found), (order, row)


class TestRowByRow:
    def test_norm_and_gate_have_the_bits_they_have_alone(self, device):
        """
        A normalised and a gated row are bit for bit those of the row alone.
        """
        dtype = dtype_on(device)
        x = numbers(33, 1536, dtype=dtype, device=device)
        weight = numbers(1536, dtype=dtype, device=device, seed=1)
        normed, gated = rms_norm(x, weight, 1e-5), silu_mul(x.clone())
        for row in (0, 17, 32):
            assert torch.equal(normed[row : row + 1], rms_norm(x[row : row + 1], weight, 1e-5))
            assert torch.equal(gated[row : row + 1], silu_mul(x[row : row + 1].clone()))

    def test_draws_are_those_of_the_row_alone(self, device):
        """
        A drawn token depends on its own row's logits and parameters alone.
        """
        logits = numbers(21, 5000, dtype=torch.float32, device=device, spread=2.5)
        columns = SamplingColumns(
            temperature=torch.tensor([0.0, 1.0, 0.7]).repeat(7),
            top_k=torch.tensor([0, 50, 0], dtype=torch.int32).repeat(7),
            top_p=torch.tensor([1.0, 1.0, 0.9]).repeat(7),
            seed=torch.arange(21),
            position=torch.arange(21) + 5,
            choice=torch.zeros(21, dtype=torch.int64),
        )
        together = sample(logits, columns).token
        alone = [
            sample(logits[n : n + 1], columns.select(slice(n, n + 1))).token for n in range(21)
        ]
        assert torch.equal(together, torch.cat(alone))


class TestWholeModel:
    @pytest.mark.parametrize("sampling", [GREEDY, NOISY, FILTERED], ids=["greedy", "noisy", "cut"])
    def test_sequence_has_the_logits_and_tokens_it_has_alone(self, sampling, device):
        """
        With `batch_invariant` a sequence's logits have the same bits, and its tokens are the same, alone and among others; on a
        GPU from captured steps of other sizes.
        """
        config = replace(SHAPES["tiny"], tied_embeddings=False, head_dim=64)
        own = random_tokens(30, 9, config.vocab_size)
        found = []
        for others, graphs in ((0, [32, 1]), (5, [256, 6])):
            runner = make_runner(
                config,
                dtype_on(device),
                device,
                num_slots=6,
                max_model_len=96,
                batch_invariant=True,
                **captures(device),
            )
            admits = [
                admission(
                    slot,
                    random_tokens(11 * slot, slot, config.vocab_size) if slot else own,
                    range(1 + slot * 6, 1 + (slot + 1) * 6),
                    sampling=sampling,
                )
                for slot in range(others + 1)
            ]
            rows = [Row(slot, 0, 11 * slot or 30) for slot in range(others + 1)]
            rows = [*rows[1:], rows[0]]
            tokens = []
            for step in range(5):
                result = runner.execute(batch(*rows, admits=admits), step)
                assert result.graph == (graphs[min(step, 1)] if device.type == "cuda" else 0)
                tokens.append(result.token[-1])
                rows = [Row(row.slot, row.start + row.num_tokens) for row in rows]
                admits = []
            found.append((tokens, forward_logits(runner, batch(*rows))[-1]))
        (alone, logits), (among, other_logits) = found
        assert alone == among
        assert torch.equal(logits, other_logits)


def captures(device: torch.device) -> dict[str, object]:
    """
    Return what a runner on a GPU captures: small steps and large ones, of decodes and with prompts.
    """
    if device.type == "cpu":
        return {}
    return {
        "graphs": CudaGraphs(device),
        "sizes": (6, 1),
        "mixed": (GraphShape(256, 6, 0), GraphShape(32, 6, 0)),
    }
