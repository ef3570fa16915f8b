"""Kernels that the first requests would else compile."""

from __future__ import annotations

import pytest
import torch

from executor_svc.parallel.sharding import sum_chunks
from executor_svc.step.warm_up import warm_up_batches
from kernels.linear.tuning import linear_tuning, splits
from kernels.sampling.tuning import Cut
from tandem_bench.device.sizes import MODEL_SIZES


@pytest.mark.parametrize("vocab_size", [256, 49152, 151936])
@pytest.mark.parametrize("max_rows", [1, 16, 40, 64, 65, 300])
def test_every_cut_of_drawing_is_among_the_steps_of_a_warm_up(max_rows: int, vocab_size: int):
    """
    A step of the warm-up has drawn tokens cut like those of a step of any number of rows.
    """
    batches = warm_up_batches(100, 16, max_rows, compiles=True)
    warm = {Cut.of(len(step.row_slot), vocab_size) for step in batches if len(step.row_slot)}
    assert {Cut.of(num_rows, vocab_size) for num_rows in range(1, max_rows + 1)} == warm


@pytest.mark.parametrize("max_step_tokens", [16, 300, 2048, 8192])
@pytest.mark.parametrize("model", ["llama-1b", "llama-8b", "qwen3-0.6b", "qwen3-4b"])
def test_every_cut_of_an_invariant_product_is_among_the_steps_of_a_warm_up(
    model: str, max_step_tokens: int
):
    """
    A step of the warm-up has its products divided like those of a step of any number of tokens.
    """
    sizes = MODEL_SIZES[model]
    heads = sizes.num_heads * sizes.head_dim
    weights = {
        (heads + 2 * sizes.num_kv_heads * sizes.head_dim, sizes.hidden_size, 1),
        (2 * sizes.intermediate_size, sizes.hidden_size, 1),
        (sizes.hidden_size, heads, sum_chunks(heads)),
        (sizes.hidden_size, sizes.intermediate_size, sum_chunks(sizes.intermediate_size)),
    }
    batches = warm_up_batches(16384, 16, 8, compiles=True, invariant_tokens=max_step_tokens)
    warm = {int(step.row_num_tokens.sum()) for step in batches if len(step.row_slot)}
    for num_columns, width, num_chunks in weights:
        tuning = linear_tuning(width // num_chunks, torch.bfloat16)
        shape = {"num_columns": num_columns, "num_chunks": num_chunks}
        needed = {splits(tuning, num_rows=each, **shape) for each in range(1, max_step_tokens + 1)}
        assert needed <= {splits(tuning, num_rows=each, **shape) for each in warm}
