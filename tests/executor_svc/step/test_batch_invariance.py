"""
Bits of a sequence with batch_invariant: the same beside any other rows and however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from executor_svc.config.settings import load_settings
from executor_svc.device.choice import choose_kernels
from executor_svc.engine import load_engine
from kernels.paged_attention import use_cpu_extension
from tests.executor_svc.stepping import Bench, Row, batch, forward_logits, random_tokens

Zoo = Callable[[str], Path]

PROMPT_LEN = 90
WHOLE = [PROMPT_LEN]
CUTS = [20, *[1] * 12, 30, 8, 3, 17]
NEIGHBOURS = 6
CASES = [
    pytest.param("llama_gqa_llama3_rope", "float32", "off", id="llama-fp32"),
    pytest.param("qwen2_window", "bfloat16", "on", id="qwen2-bf16-cpp", marks=pytest.mark.compiler),
    *(
        pytest.param(family, dtype, cpp, id=f"{family}-{dtype}-{cpp}", marks=pytest.mark.slow)
        for family, dtype, cpp in (
            ("llama_mqa", "float32", "off"),
            ("llama_tied_biased", "bfloat16", "off"),
            ("qwen3", "bfloat16", "off"),
        )
    ),
    *(
        pytest.param(
            family,
            "float32",
            "on",
            id=f"{family}-float32-on",
            marks=[pytest.mark.slow, pytest.mark.compiler],
        )
        for family in ("mistral_window", "qwen3")
    ),
]


@pytest.fixture(autouse=True)
def in_pytorch() -> Iterator[None]:
    """Compute in PyTorch unless a test says otherwise: engines made before may have left C++ on."""
    choose_kernels(torch.device("cpu"), "off")
    yield
    choose_kernels(torch.device("cpu"), "off")


def logits(
    directory: Path, dtype: str, cuts: list[int], neighbours: int, *, batch_invariant: bool
) -> torch.Tensor:
    """
    Return the logits of a prompt computed in these chunks in the middle of others, which begin and
    go on unevenly, ``[PROMPT_LEN, vocab_size]``.
    """
    bench = Bench.build(
        directory, dtype=dtype, shuffle_seed=neighbours, batch_invariant=batch_invariant
    )
    prompts = [random_tokens(150, seed) for seed in range(neighbours + 1)]
    admits = [bench.admit(slot, prompt) for slot, prompt in enumerate(prompts)]
    done, found = [0] * len(prompts), []
    for length in cuts:
        lengths = [length, *(1 + 3 * slot % 7 for slot in range(1, len(prompts)))]
        rows = [Row(slot, done[slot], lengths[slot], samples=False) for slot in range(len(prompts))]
        own = len(rows) // 2
        rows[0], rows[own] = rows[own], rows[0]
        first = sum(row.num_tokens for row in rows[:own])
        step = forward_logits(bench.runner, batch(*rows, admits=admits))
        found.append(step[first : first + length].clone())
        done = [before + more for before, more in zip(done, lengths, strict=True)]
        admits = []
    return torch.cat(found)


@pytest.mark.parametrize(("family", "dtype", "cpp"), CASES)
class TestBits:
    def test_they_are_the_same_in_any_batch_and_chunks(self, zoo: Zoo, family, dtype, cpp):
        """
        Logits of a prompt alone at once are, bit for bit, those among six others and in chunks of 1 to 30.
        """
        use_cpu_extension(cpp)
        given = zoo(family), dtype
        expected = logits(*given, WHOLE, 0, batch_invariant=True)
        for cuts, neighbours in ((WHOLE, NEIGHBOURS), (CUTS, 0), (CUTS, NEIGHBOURS)):
            found = logits(*given, cuts, neighbours, batch_invariant=True)
            assert torch.equal(expected, found), (cuts, neighbours)


class TestOtherwise:
    def test_bits_change_with_the_batch_where_nobody_asks(self, zoo: Zoo):
        """
        Without batch_invariant the same comparison finds other bits: it can fail.
        """
        given = zoo("llama_gqa_llama3_rope"), "float32"
        expected = logits(*given, WHOLE, 0, batch_invariant=False)
        found = logits(*given, CUTS, NEIGHBOURS, batch_invariant=False)
        assert not torch.equal(expected, found)
        # Float32 sums in another order: 1e-6 per unit of logit, and logits here reach about 10.
        assert (expected - found).abs().max() < 1e-4


class TestThreads:
    @pytest.mark.slow
    def test_bits_are_the_same_where_threads_share_operations(self, zoo: Zoo):
        """
        With three threads, which cut an operation in the middle of a row, bits do not follow the batch either.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            given = zoo("llama_mha"), "float32"
            expected = logits(*given, WHOLE, 0, batch_invariant=True)
            found = logits(*given, CUTS, NEIGHBOURS, batch_invariant=True)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(expected, found)


class TestSetting:
    def test_describe_tells_the_feature_and_the_fingerprint_stays(self, zoo: Zoo):
        """
        An executor with batch_invariant says so among its features, of the same model.
        """
        flags = ["--model", str(zoo("llama_mha")), "--max-num-blocks", "64", "--num-threads", "1"]
        flags += ["--max-model-len", "64", "--device", "cpu"]
        plain = load_engine(load_settings(flags, {}), "boot").description
        found = load_engine(load_settings([*flags, "--batch-invariant"], {}), "boot").description
        assert "batch_invariant" not in plain.features
        assert "batch_invariant" in found.features
        assert plain.model_fingerprint == found.model_fingerprint
