"""Kernels that the first requests would else compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from executor_svc.model.weights import DecoderWeights
from executor_svc.parallel.sharding import sum_chunks
from executor_svc.step.warm_up import undivided_tokens, warm_up_batches
from kernels.layer_stack import LayerWeights
from kernels.linear.tuning import linear_tuning, rows_to_join, splits
from kernels.sampling.tuning import Cut
from tandem_bench.device.sizes import MODEL_SIZES, ModelSizes

OTHER_STEPS = (65,)
"""Most tokens of the steps that are there for other kernels."""


@pytest.mark.parametrize("vocab_size", [256, 49152, 151936])
@pytest.mark.parametrize("max_rows", [1, 16, 40, 64, 65, 300])
def test_every_cut_of_drawing_is_among_the_steps_of_a_warm_up(max_rows: int, vocab_size: int):
    """
    A step of the warm-up has drawn tokens cut like those of a step of any number of rows.
    """
    batches = warm_up_batches(100, 16, max_rows, compiles=True)
    warm = {Cut.of(len(step.row_slot), vocab_size) for step in batches if len(step.row_slot)}
    assert {Cut.of(num_rows, vocab_size) for num_rows in range(1, max_rows + 1)} == warm


@dataclass(frozen=True)
class Product:
    """A product of a layer, whose inner dimension is cut into chunks."""

    num_columns: int
    width: int
    num_chunks: int = 1

    def is_split(self, num_rows: int, dtype: torch.dtype) -> bool:
        tuning = linear_tuning(self.width // self.num_chunks, dtype)
        return splits(
            tuning, num_rows=num_rows, num_columns=self.num_columns, num_chunks=self.num_chunks
        )


def products_of(sizes: ModelSizes) -> list[Product]:
    heads, inner = sizes.num_heads * sizes.head_dim, sizes.intermediate_size
    return [
        Product(heads + 2 * sizes.num_kv_heads * sizes.head_dim, sizes.hidden_size),
        Product(2 * inner, sizes.hidden_size),
        Product(sizes.hidden_size, heads, sum_chunks(heads)),
        Product(sizes.hidden_size, inner, sum_chunks(inner)),
    ]


def weights_of(products: Sequence[Product], dtype: torch.dtype) -> DecoderWeights:
    """Make a layer that takes no memory."""
    qkv, gate_up, output, down = (
        torch.empty(each.num_columns, each.width, dtype=dtype, device="meta") for each in products
    )
    none = torch.empty(0, device="meta")
    layer = LayerWeights(
        input_norm=none,
        qkv=qkv,
        qkv_bias=None,
        qk_norm=None,
        output=output,
        output_bias=None,
        mlp_norm=none,
        gate_up=gate_up,
        gate_up_bias=None,
        down=down,
        down_bias=None,
    )
    return DecoderWeights(embedding=none, layers=(layer,), norm=none, lm_head=none)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("max_model_len", [512, 1024, 2048, 16384])
@pytest.mark.parametrize("max_step_tokens", [16, 300, 2048, 8192])
@pytest.mark.parametrize("model", ["tiny", "llama-135m", "llama-1b", "llama-8b", "qwen3-4b"])
def test_every_cut_of_an_invariant_product_is_among_the_steps_of_a_warm_up(
    model: str, max_step_tokens: int, max_model_len: int, dtype: torch.dtype
):
    """
    A step of the warm-up has its products divided like those of a step of any number of tokens, of
    one prompt or several. No step has more tokens than may be, nor a prompt more than it may have.
    """
    products = products_of(MODEL_SIZES[model])
    tokens = min(max_step_tokens, undivided_tokens(weights_of(products, dtype)))
    batches = warm_up_batches(
        max_model_len, 16, 16, compiles=True, step_tokens=tokens, num_blocks=1024
    )
    steps = [step for step in batches if len(step.row_slot)]
    warm = {int(step.row_num_tokens.sum()) for step in steps}
    for product in products:
        needed = {product.is_split(each, dtype) for each in (1, max_step_tokens)}
        assert needed <= {product.is_split(each, dtype) for each in warm}
    assert max(warm) <= max(max_step_tokens, *OTHER_STEPS)
    assert max(max(step.row_num_tokens) for step in steps) <= max_model_len


@pytest.mark.parametrize("num_columns", [1, 128, 129, 576, 2048, 40000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_are_joined_from_the_number_of_rows_that_is_told(
    num_columns: int, dtype: torch.dtype
):
    """
    From `rows_to_join` on a product of one chunk has no part with a program of its own; one row
    fewer, if there can be, and it has.
    """
    product, rows = Product(num_columns, 8192), rows_to_join(num_columns, dtype)
    assert not any(product.is_split(each, dtype) for each in (rows, rows + 1, 10 * rows))
    assert rows == 1 or product.is_split(rows - 1, dtype)
