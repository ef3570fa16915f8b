"""Few sizes of matrix products, and padding that nothing else notices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor_svc.model.row_padding import padded_rows, pads_rows
from tests.executor_svc.stepping import Bench, Row, batch, forward_logits, random_tokens

Zoo = Callable[[str], Path]
_PRODUCTS = ("mm", "addmm", "addmm_", "linear")
_PROMPT_LEN = 4


class _ProductRows(TorchDispatchMode):
    """Notes the rows of every matrix product with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _PRODUCTS:
            self.seen.add(result.shape[0])
        return result


def bench_of(directory: Path, *, dtype: str = "bfloat16", unused: float = float("nan")) -> Bench:
    """A bench of 16 prompts, each computed alone; the cache holds `unused` everywhere else."""
    bench = Bench.build(directory, dtype=dtype, num_slots=16, max_model_len=64)
    for layer in bench.kv.layers:
        layer.fill_(unused)
    for slot in range(16):
        admit = bench.admit(slot, random_tokens(_PROMPT_LEN, seed=slot))
        bench.runner.execute(batch(Row(slot, 0, _PROMPT_LEN), admits=[admit]), slot + 1)
    return bench


def decode_logits(bench: Bench, num_rows: int) -> torch.Tensor:
    """Logits of one decode of the first slots, ``[num_rows, vocab_size]``."""
    return forward_logits(
        bench.runner, batch(*(Row(slot, _PROMPT_LEN) for slot in range(num_rows)))
    )


class TestSizes:
    def test_size_holds_the_rows_and_is_its_own_size(self):
        """
        Padding never cuts rows off, and rows of a size on the ladder get none.
        """
        for num_rows in range(5000):
            assert num_rows <= padded_rows(num_rows) == padded_rows(padded_rows(num_rows))

    def test_few_sizes_with_little_padding(self):
        """
        Steps of 1 to 4096 tokens come to at most 70 sizes, less than an eighth larger beyond 32.
        """
        assert len({padded_rows(num_rows) for num_rows in range(1, 4097)}) <= 70
        assert all(padded_rows(num_rows) - num_rows < num_rows / 8 for num_rows in range(33, 4097))

    def test_only_16_bit_types_on_the_cpu_are_padded(self):
        """
        Float32 on the CPU, and every type on other devices, keep the rows they have.
        """
        cpu, cuda = torch.device("cpu"), torch.device("cuda")
        assert pads_rows(torch.bfloat16, cpu)
        assert not pads_rows(torch.float32, cpu)
        assert not pads_rows(torch.bfloat16, cuda)


class TestSteps:
    def test_products_of_steps_of_any_length_have_sizes_of_the_ladder(self, zoo: Zoo):
        """
        Prompts of 1 to 40 tokens, sampled at their end, multiply in padded numbers of rows.
        """
        lengths = (1, 2, 3, 5, 7, 8, 9, 15, 17, 33, 39, 40)
        bench, rows = bench_of(zoo("llama_mha")), _ProductRows()
        with rows:
            for length in lengths:
                bench.runner.reset()
                admit = bench.admit(0, random_tokens(length, seed=length))
                bench.block_ids += admit.block_ids.tolist()
                bench.runner.execute(batch(Row(0, 0, length), admits=[admit]), length)
        assert {padded_rows(length) for length in lengths} == rows.seen

    def test_products_of_decodes_and_of_their_logits_have_sizes_of_the_ladder(self, zoo: Zoo):
        """
        A decode of 13 rows multiplies 16, in its layers and for its logits.
        """
        bench, rows = bench_of(zoo("llama_mha")), _ProductRows()
        with rows:
            bench.runner.execute(batch(*(Row(slot, _PROMPT_LEN) for slot in range(13))), 20)
        assert {16} == rows.seen

    def test_float32_products_have_the_rows_of_the_step(self, zoo: Zoo):
        """
        Without padding, a decode of 13 rows multiplies 13.
        """
        bench, rows = bench_of(zoo("llama_mha"), dtype="float32"), _ProductRows()
        with rows:
            bench.runner.execute(batch(*(Row(slot, _PROMPT_LEN) for slot in range(13))), 20)
        assert {13} == rows.seen

    @pytest.mark.parametrize("family", ["llama_mha", "llama_tied_biased", "qwen2"])
    def test_row_has_the_same_bits_beside_any_padding(self, zoo: Zoo, family: str):
        """
        Thirteen rows have equal logits with three rows of padding, two, one, or three live rows.
        """
        expected = decode_logits(bench_of(zoo(family)), 13)
        for num_rows in (14, 15, 16):
            found = decode_logits(bench_of(zoo(family)), num_rows)
            assert torch.equal(expected, found[:13]), num_rows

    @pytest.mark.parametrize("family", ["llama_mha", "llama_tied_biased", "qwen2"])
    def test_padding_reads_and_writes_no_cache(self, zoo: Zoo, family: str):
        """
        A padded step gives the same finite logits over NaN as over zeros, and fills one place of
        the cache per row.
        """
        poisoned = bench_of(zoo(family))
        unused = [torch.isnan(layer).flatten(2).all(2) for layer in poisoned.kv.layers]
        found = decode_logits(poisoned, 13)
        assert torch.isfinite(found).all()
        assert torch.equal(decode_logits(bench_of(zoo(family), unused=0.0), 13), found)
        for layer, before in zip(poisoned.kv.layers, unused, strict=True):
            after = torch.isnan(layer).flatten(2).all(2)
            assert after[0].all()
            assert int(before.sum()) - int(after.sum()) == 13
