"""Every family against transformers, through the paged path that serving uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import dispatch
from tests.executor_svc.stepping import (
    Bench,
    Row,
    batch,
    forward_logits,
    hugging_face_logits,
    random_tokens,
)
from tests.model_zoo import FAMILIES

TOLERANCE = 1e-4
"""
Room for float32 sums in another order, which differ by about 1e-6 per unit of logit; logits here
reach about 10.
"""

LENGTHS = (37, 3, 90, 64)
"""Sequences of one batch: under and over a query tile of 64, exactly one, and hardly any."""

Zoo = Callable[[str], Path]


@functools.cache
def sequences() -> tuple[list[int], ...]:
    return tuple(random_tokens(length, seed) for seed, length in enumerate(LENGTHS))


@functools.cache
def expected(directory: Path) -> tuple[torch.Tensor, ...]:
    return tuple(hugging_face_logits(directory, tokens) for tokens in sequences())


def prefill_whole(bench: Bench) -> list[torch.Tensor]:
    """Compute all sequences in one step."""
    admits = [bench.admit(slot, tokens) for slot, tokens in enumerate(sequences())]
    rows = [Row(slot, 0, length) for slot, length in enumerate(LENGTHS)]
    logits = forward_logits(bench.runner, batch(*rows, admits=admits))
    return list(logits.split(list(LENGTHS)))


def prefill_in_pieces(bench: Bench) -> list[torch.Tensor]:
    """
    Compute chunks of 1, 13, 1, 29, ... tokens; the sequences start one step apart, so chunks and
    single tokens mix.
    """
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    done = [0] * len(LENGTHS)
    step = 0
    while done != list(LENGTHS):
        rows, admits = [], []
        for slot, length in enumerate(LENGTHS):
            if step < slot or done[slot] == length:
                continue
            if step == slot:
                admits.append(bench.admit(slot, sequences()[slot]))
            size = min(length - done[slot], (1, 13, 1, 29)[(step + slot) % 4])
            rows.append(Row(slot, done[slot], size, samples=done[slot] + size == length))
        rows.sort(key=lambda row: row.num_tokens)
        logits = forward_logits(bench.runner, batch(*rows, admits=admits))
        sizes = [row.num_tokens for row in rows]
        for row, piece in zip(rows, logits.split(sizes), strict=True):
            found[row.slot].append(piece)
            done[row.slot] += row.num_tokens
        step += 1
    return [torch.cat(pieces) for pieces in found]


def assert_close(truth: tuple[torch.Tensor, ...], found: list[torch.Tensor]) -> None:
    for slot, (right, ours) in enumerate(zip(truth, found, strict=True)):
        worst = (right - ours).abs().max().item()
        assert worst <= TOLERANCE, f"sequence {slot} of {LENGTHS[slot]} tokens is off by {worst}"


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_whole_prompts_match_transformers(self, zoo: Zoo, family: str):
        """
        Prompts prefilled together in one step have the logits transformers computes for each alone.
        """
        bench = Bench.build(zoo(family))
        assert_close(expected(zoo(family)), prefill_whole(bench))

    @pytest.mark.parametrize("block_size", [1, 7, 16, 32])
    def test_chunks_and_decodes_match_transformers(self, zoo: Zoo, family: str, block_size: int):
        """
        Chunked prefills and single tokens mixed in one step give the same logits at any block size.
        """
        bench = Bench.build(zoo(family), block_size=block_size, shuffle_seed=block_size)
        assert_close(expected(zoo(family)), prefill_in_pieces(bench))

    def test_decodes_of_many_lengths_match_transformers(self, zoo: Zoo, family: str):
        """
        Decodes of sequences of unlike lengths, computed together, have the logits of each alone.
        """
        bench = Bench.build(zoo(family), block_size=7, shuffle_seed=3)
        whole, truth = sequences()[2], expected(zoo(family))[2]
        lengths = [20 + 3 * slot for slot in range(8)]
        admits = [bench.admit(slot, whole[:length]) for slot, length in enumerate(lengths)]
        rows = [Row(slot, 0, length - 4, samples=False) for slot, length in enumerate(lengths)]
        forward_logits(bench.runner, batch(*rows, admits=admits))
        for back in (4, 3, 2, 1):
            at = [length - back for length in lengths]
            rows = [Row(slot, start, samples=False) for slot, start in enumerate(at)]
            logits = forward_logits(bench.runner, batch(*rows))
            assert (truth[at] - logits).abs().max() <= TOLERANCE

    def test_sixteen_bit_types_stay_near_float32(self, zoo: Zoo, family: str):
        """
        In bfloat16 and float16 logits differ from float32's by no more than these types' rounding.
        """
        for dtype, share in (("bfloat16", 0.06), ("float16", 0.01)):
            found = prefill_in_pieces(Bench.build(zoo(family), dtype=dtype))
            for right, ours in zip(expected(zoo(family)), found, strict=True):
                assert (right - ours).norm() <= share * right.norm(), dtype


class TestReferenceKernels:
    @pytest.mark.parametrize("family", ["mistral_window", "qwen3"])
    def test_definitions_serve_whole_models(
        self, zoo: Zoo, family: str, request: pytest.FixtureRequest
    ):
        """
        With every kernel set to its definition, as on a device without faster ones, the logits are the same.
        """
        names = ("paged_attention", "rms_norm", "rope_kv_write", "silu_mul")
        dispatch.configure(dict.fromkeys(names, dispatch.REFERENCE))
        request.addfinalizer(lambda: dispatch.configure({}))
        bench = Bench.build(zoo(family), block_size=7, shuffle_seed=1)
        assert_close(expected(zoo(family)), prefill_in_pieces(bench))


class TestPhysicalPlaces:
    @pytest.mark.parametrize("family", ["llama_gqa_llama3_rope", "mistral_window"])
    def test_shuffled_blocks_give_identical_logits(self, zoo: Zoo, family: str):
        """
        The choice of the physical blocks that hold a sequence changes no bit of its logits.
        """
        in_order = prefill_in_pieces(Bench.build(zoo(family), block_size=7))
        for seed in (1, 2):
            shuffled = prefill_in_pieces(Bench.build(zoo(family), block_size=7, shuffle_seed=seed))
            for left, right in zip(in_order, shuffled, strict=True):
                assert torch.equal(left, right)
