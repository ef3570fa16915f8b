"""With batch_invariant a model has the same bits on one rank, on two and on four."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.config.settings import load_settings
from executor_svc.device.choice import choose_kernels
from executor_svc.engine import load_engine
from executor_svc.parallel.process_groups import SINGLE, ProcessGroups
from tests import model_zoo
from tests.executor_svc.parallel.rank_pool import RankPool, threads
from tests.executor_svc.stepping import Bench, Row, batch, forward_logits, random_tokens

Zoo = Callable[[str], Path]

CPU = torch.device("cpu")
PROMPT_LENS = (37, 5, 18)
NUM_DECODES = 3
NUM_THREADS = 3
"""Threads of the one rank; those of a pool have one each, and a library may add up otherwise."""

EVERYDAY = [("llama_tied_biased", 2), ("llama_mqa", 4)]
CASES = [
    pytest.param(name, size, id=f"{name}-tp{size}", marks=[] if everyday else [pytest.mark.slow])
    for name in model_zoo.FAMILIES
    for size in (2, 4)
    for everyday in [(name, size) in EVERYDAY]
]
WAYS = [
    pytest.param(
        ("on" if where == "cpp" else "off", dtype),
        marks=[pytest.mark.compiler] if where == "cpp" else [],
        id=f"{dtype}-{where}",
    )
    for dtype in ("float32", "bfloat16", "float16")
    for where in ("torch", "cpp")
]
"""Use of C++ and number types."""


def logits(
    groups: ProcessGroups,
    directory: Path,
    kernels: str,
    dtype: str,
    *,
    batch_invariant: bool = True,
) -> torch.Tensor:
    """Return the logits of prompts side by side, then of decodes: those of the rank's own ids."""
    choose_kernels(CPU, kernels)
    bench = Bench.build(
        directory,
        dtype=dtype,
        packs=kernels == "on",
        groups=groups,
        batch_invariant=batch_invariant,
    )
    prompts = [random_tokens(length, seed=length) for length in PROMPT_LENS]
    admits = [bench.admit(slot, prompt) for slot, prompt in enumerate(prompts)]
    rows = [Row(slot, 0, len(prompt)) for slot, prompt in enumerate(prompts)]
    found = [forward_logits(bench.runner, batch(*rows, admits=admits))]
    for step in range(NUM_DECODES):
        rows = [Row(row.slot, length + step) for row, length in zip(rows, PROMPT_LENS, strict=True)]
        found.append(forward_logits(bench.runner, batch(*rows)))
    choose_kernels(CPU, "off")
    return torch.cat(found)


def joined(pool: RankPool, size: int, *given: Any, **more: Any) -> torch.Tensor:
    """Return the logits of `size` ranks beside each other, without what pads the last rank's."""
    parts = torch.cat(pool.run(size, logits, *given, **more), dim=1)
    padding = (parts == float("-inf")).all(dim=0)
    return parts[:, ~padding]


@pytest.fixture(autouse=True)
def many_threads() -> Iterator[None]:
    """Let the one rank compute in more threads than the others have."""
    with threads(NUM_THREADS):
        yield


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with matrices that a library multiplies in blocks, and shares out among threads."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
    directory = tmp_path_factory.mktemp("wide")
    return model_zoo._write("wide", "Llama", directory, num_key_value_heads=4, **sizes)


class TestBits:
    @pytest.mark.parametrize("way", WAYS[:4])
    @pytest.mark.parametrize(("family", "size"), CASES)
    def test_logits_of_ranks_are_those_of_one(
        self, zoo: Zoo, ranks: RankPool, family: str, size: int, way: tuple[str, str]
    ):
        """
        Logits of prompts and decodes of every family are, bit for bit, those of one rank.
        """
        given = zoo(family), *way
        expected = logits(SINGLE, *given)
        assert torch.equal(expected, joined(ranks, size, *given))

    @pytest.mark.slow
    @pytest.mark.parametrize("way", WAYS)
    def test_wide_matrices_have_them_too(self, wide: Path, ranks: RankPool, way: tuple[str, str]):
        """
        Products that a library cuts by their shape and its threads have the bits of one rank on two
        and on four.
        """
        expected = logits(SINGLE, wide, *way)
        for size in (2, 4):
            assert torch.equal(expected, joined(ranks, size, wide, *way))


def warnings(groups: ProcessGroups, directory: Path) -> list[str]:
    """Return the warnings of an executor's start with batch_invariant."""
    flags = [f"--model={directory}", "--device=cpu", "--num-threads=1", "--batch-invariant"]
    loaded = load_settings([*flags, "--max-num-blocks=20", "--cpu-extension=off"], {})
    return list(load_engine(loaded, "boot", groups=groups).description.warnings)


class TestPromise:
    @pytest.mark.slow
    def test_sizes_that_cannot_keep_it_are_told_at_the_start(
        self, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
    ):
        """
        An MLP that is cut into two chunks has the bits of one rank on two ranks, not on four, and the
        executor says so.
        """
        directory = tmp_path_factory.mktemp("two-chunks")
        model_zoo._write("two-chunks", "Llama", directory, intermediate_size=100)
        given = directory, "off", "float32"
        assert torch.equal(logits(SINGLE, *given), joined(ranks, 2, *given))
        sentences = {size: ranks.run(size, warnings, directory)[0] for size in (1, 2, 4)}
        told = {size: ["last bits" in each for each in own] for size, own in sentences.items()}
        assert {1: False, 2: False, 4: True} == {size: any(own) for size, own in told.items()}


class TestOtherwise:
    def test_bits_change_with_the_ranks_where_nobody_asks(self, zoo: Zoo, ranks: RankPool):
        """
        Without batch_invariant the same comparison finds other bits: it can fail.
        """
        given = zoo("qwen3"), "off", "float32"
        expected = logits(SINGLE, *given, batch_invariant=False)
        found = joined(ranks, 2, *given, batch_invariant=False)
        assert not torch.equal(expected, found)
        # Float32 sums in another order, of logits that reach about 10.
        assert torch.allclose(expected, found, atol=1e-4)
