"""The modelled executor: tokens, KV and the time a step takes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.errors import InvalidConfig
from tandem.link.batch import ROW_SAMPLES, Admission, Batch
from tandem.sampling_params import SamplingParams
from tandem_simulator.executor.executor_model import ExecutorModel
from tandem_simulator.executor.model_tokens import (
    EOS_ID,
    end_position,
    next_tokens,
    powers_of_base,
    token_terms,
    unlimited_outputs,
)
from tandem_simulator.executor.step_time import StepTime
from tandem_simulator.presets import MACHINES

PROMPT = np.array([5, 6, 7, 8, 9, 10], np.int32)
TIMES = StepTime(
    overhead_s=1e-3, weights_s=4e-3, token_s=1e-5, context_s=1e-7, pair_s=1e-9, copy_s=1e-6,
    swap_s=1e-4, link_s=0.0,
)  # fmt: skip


def columns(*values):
    return np.array(values, np.int32)


def prefill(slot, start, tokens, blocks, *, cached=0, **changes):
    """Return a batch that admits a prompt and computes all of it."""
    admission = Admission(
        slot=slot, generation=1, token_ids=tokens, num_prompt_tokens=len(tokens),
        num_cached_tokens=cached, block_ids=columns(*blocks),
        sampling=SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=9),
    )  # fmt: skip
    values = {
        "admits": (admission,), "row_slot": columns(slot), "row_start": columns(start),
        "row_num_tokens": columns(len(tokens) - start),
        "row_flags": np.array([ROW_SAMPLES], np.uint8),
    }  # fmt: skip
    return Batch(**(values | changes))


def decode(slot, start):
    """Return a batch that computes one more token."""
    return Batch(
        row_slot=columns(slot), row_start=columns(start), row_num_tokens=columns(1),
        row_flags=np.array([ROW_SAMPLES], np.uint8),
    )  # fmt: skip


@pytest.fixture
def executor():
    return ExecutorModel(
        ExecutorGeometry(
            num_blocks=16,
            block_size=4,
            num_slots=4,
            max_batch_size=4,
            max_total_tokens=64,
            max_model_len=32,
            num_host_blocks=4,
        )
    )


def run_on(executor, slot, count, start):
    """Return the tokens of `count` decode steps."""
    return [int(executor.execute(decode(slot, start + i))[0].token[0]) for i in range(count)]


class TestTokens:
    def test_one_by_one_equals_the_definition(self, executor):
        """
        A prompt computed at once and then decoded gives the tokens of unlimited memory, the last
        of them EOS.
        """
        first = executor.execute(prefill(0, 0, PROMPT, [3, 1, 2, 4]))[0].token.tolist()
        found = first + run_on(executor, 0, 8, len(PROMPT))
        assert unlimited_outputs(PROMPT, 9, 100).tolist() == found
        assert EOS_ID == found[-1]
        assert EOS_ID not in found[:-1]

    def test_choices_draw_other_tokens(self):
        """
        Two completions of one prompt differ.
        """
        assert (unlimited_outputs(PROMPT, 9, 8, 0) != unlimited_outputs(PROMPT, 9, 8, 1)).any()

    def test_max_tokens_cuts_outputs(self):
        """
        A shorter max_tokens gives the beginning of the same output.
        """
        whole, cut = unlimited_outputs(PROMPT, 50, 40), unlimited_outputs(PROMPT, 50, 7)
        assert whole[:7].tolist() == cut.tolist()

    def test_vectors_agree_with_whole_numbers(self):
        """
        Fingerprints and tokens wrap at 2^64 as the definition says, for whole columns at once.
        """
        prompts = [np.arange(3, 3 + n, dtype=np.int32) * 7 for n in range(1, 40)]
        sums = [token_terms(p, powers_of_base(len(p))).sum(dtype=np.uint64) for p in prompts]
        lengths = columns(*map(len, prompts))
        ends = columns(*(end_position(len(p), 5) for p in prompts))
        terms = np.zeros(len(lengths), np.uint64)
        found = next_tokens(np.array(sums, np.uint64), terms, lengths, ends)
        assert [int(unlimited_outputs(p, 5, 1)[0]) for p in prompts] == found.tolist()


class TestKv:
    def test_shared_blocks_give_the_same_tokens(self, executor):
        """
        A request that starts behind blocks another computed continues as if it had computed them.
        """
        executor.execute(prefill(0, 0, PROMPT, [3, 1, 2, 4]))
        other = np.concatenate([PROMPT[:4], columns(20, 21)])
        token = executor.execute(prefill(1, 4, other, [3, 5, 6], cached=4))[0].token
        assert unlimited_outputs(other, 9, 1).tolist() == token.tolist()

    def test_wrong_block_gives_other_tokens(self, executor):
        """
        Reading KV of other tokens changes what is produced.
        """
        executor.execute(prefill(0, 0, PROMPT + 1, [3, 1, 2, 4]))
        other = np.concatenate([PROMPT[:4], columns(20, 21)])
        token = executor.execute(prefill(1, 4, other, [3, 5, 6], cached=4))[0].token
        assert unlimited_outputs(other, 9, 1).tolist() != token.tolist()

    def test_kv_of_the_same_step_cannot_be_read(self, executor):
        """
        Rows read KV as it was before the step, as rows of a real step would.
        """
        both = [prefill(0, 0, PROMPT, [3, 1]), prefill(1, 4, PROMPT, [3, 5], cached=4)]
        names = [f.name for f in dataclasses.fields(Batch) if f.name.startswith("row_")]
        rows = {name: np.concatenate([getattr(b, name) for b in both]) for name in names}
        batch = Batch(admits=both[0].admits + both[1].admits, **rows)
        first, second = executor.execute(batch)[0].token.tolist()
        assert first == unlimited_outputs(PROMPT, 9, 1)[0] != second

    def test_swapping_and_copying_move_kv(self, executor):
        """
        Blocks that went to the host and back, or were copied, are as good as the first ones.
        """
        executor.execute(prefill(0, 0, PROMPT, [3, 1, 2, 4]))
        executor.execute(Batch(
            release_slot=columns(0), swap_out_block=columns(3), swap_out_host=columns(2),
            copy_source=columns(1), copy_destination=columns(9),
        ))  # fmt: skip
        executor.kv[[1, 3]] = 0
        back = prefill(
            2, 5, PROMPT, [7, 9], cached=5, swap_in_host=columns(2), swap_in_block=columns(7)
        )
        result, work = executor.execute(back)
        assert unlimited_outputs(PROMPT, 9, 1).tolist() == result.token.tolist()
        assert (0, 0, 1) == (work.copied_blocks, work.swapped_out_blocks, work.swapped_in_blocks)


class TestStepTime:
    def test_work_counts_tokens_context_and_pairs(self, executor):
        """
        A chunk reads everything up to its end once, and attends from each of its tokens to all
        before it and itself.
        """
        executor.execute(prefill(0, 0, PROMPT, [3, 1, 2, 4]))
        other = np.arange(3, 13, dtype=np.int32)
        batch = prefill(1, 4, other, [3, 5, 6], cached=4)
        work = executor.execute(batch)[1]
        assert (1, 0, 6, 10) == (work.num_rows, work.num_decodes, work.tokens, work.context)
        assert 5 + 6 + 7 + 8 + 9 + 10 == work.pairs

    def test_weights_bound_small_steps_and_arithmetic_large_ones(self):
        """
        A step takes as long as reading the weights until its tokens' arithmetic takes longer.
        """
        assert TIMES.seconds(1, 0, 0, 0, 0) == TIMES.seconds(400, 0, 0, 0, 0) == 5e-3
        assert 1e-3 + 8e-3 == pytest.approx(TIMES.seconds(800, 0, 0, 0, 0))

    def test_every_part_adds_its_time(self):
        """
        Context, pairs, copies and swaps each cost what their parameter says.
        """
        expected = 1e-3 + 4e-3 + 10 * 1e-7 + 20 * 1e-9 + 3 * 1e-6 + 2 * 1e-4
        assert expected == pytest.approx(TIMES.seconds(1, 10, 20, 3, 2))
        assert 1e-3 == TIMES.seconds(0, 0, 0, 0, 0)

    @pytest.mark.parametrize(
        "changes", [{"token_s": -1.0}, {"swap_s": float("inf")}, {"pair_s": float("nan")},
                    {"overhead_s": 0.0, "weights_s": 0.0}],
        ids=["negative", "infinite", "nan", "timeless"],
    )  # fmt: skip
    def test_impossible_parameters_are_refused(self, changes):
        """
        A parameter that is negative or not finite is an error that names it.
        """
        with pytest.raises(InvalidConfig, match=next(iter(changes))):
            dataclasses.replace(TIMES, **changes)

    def test_presets_are_of_the_known_size(self):
        """
        The H100 preset decodes one row in about 7.5 ms and the CPU preset computes a prompt of 128
        tokens at about 2,200 tokens/s.
        """
        gpu, cpu = MACHINES["h100-8b"].step_time, MACHINES["cpu-135m"].step_time
        # "About" is within a twentieth.
        assert 7.5e-3 == pytest.approx(gpu.seconds(1, 500, 500, 0, 0), rel=0.05)
        assert 2200 == pytest.approx(128 / cpu.seconds(128, 128, 128 * 64, 0, 0), rel=0.05)
