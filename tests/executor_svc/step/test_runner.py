"""The runner: deltas in, sampled tokens out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.memory.kv_memory import KvMemory
from executor_svc.model.loader import load_model
from executor_svc.step.runner import ModelRunner
from tandem.errors import SessionLost
from tandem.link.commands import KvMode
from tandem.link.results import RowErrorKind, StepResult
from tandem.sampling_params import SamplingParams
from tests.executor_svc.stepping import (
    Bench,
    Row,
    admission,
    batch,
    forward_logits,
    hugging_face_logits,
    random_tokens,
)
from tests.model_zoo import VOCAB_SIZE

Zoo = Callable[[str], Path]

NOISY = SamplingParams(temperature=1.0, top_k=0, top_p=0.95, seed=2**64 - 5)
TOLERANCE = 1e-4
"""Room for float32 sums in another order, 1e-6 per unit of logit; logits here reach about 10."""


@pytest.fixture
def bench(zoo: Zoo) -> Bench:
    return Bench.build(zoo("llama_gqa_llama3_rope"), collect_margins=True)


def token_of(result: StepResult, slot: int) -> int:
    """Return the token that a slot got in a step."""
    (index,) = np.flatnonzero(result.slot == slot)
    return int(result.token[index])


def decode(
    bench: Bench, slot: int, start: int, num_steps: int, first_step_id: int = 2
) -> list[int]:
    """Return the tokens of consecutive one-token steps of one slot."""
    found = []
    for offset in range(num_steps):
        result = bench.runner.execute(batch(Row(slot, start + offset)), first_step_id + offset)
        found.append(token_of(result, slot))
    return found


def generate(
    bench: Bench, prompt: list[int], num_tokens: int, sampling: SamplingParams
) -> list[int]:
    """Return the tokens of one request alone in slot 0, with blocks for all of them."""
    blocks = bench.take_blocks(len(prompt) + num_tokens)
    admit = admission(0, prompt, blocks, sampling=sampling)
    first = bench.runner.execute(batch(Row(0, 0, len(prompt)), admits=[admit]), 1)
    return [token_of(first, 0), *decode(bench, 0, len(prompt), num_tokens - 1)]


class TestSampling:
    def test_greedy_tokens_feed_back_on_the_device(self, zoo: Zoo, bench: Bench):
        """
        Each decode continues from the token sampled before it: the sequence is its own greedy continuation.
        """
        prompt = random_tokens(9, seed=3)
        found = generate(bench, prompt, 12, sampling=admission(0, [0], []).sampling)
        truth = hugging_face_logits(zoo("llama_gqa_llama3_rope"), prompt + found)
        assert truth[len(prompt) - 1 : -1].argmax(dim=1).tolist() == found
        assert len(set(found)) > 3

    def test_seeded_tokens_do_not_depend_on_the_batch(self, zoo: Zoo, bench: Bench):
        """
        A seeded request gets the same tokens alone and next to others, in another slot and other blocks.
        """
        prompt = random_tokens(20, seed=5)
        alone = generate(bench, prompt, 8, NOISY)
        other = Bench.build(zoo("llama_gqa_llama3_rope"), shuffle_seed=1)
        admits = [other.admit(slot, random_tokens(11 * slot, seed=slot)) for slot in (1, 2)]
        admits.append(admission(5, prompt, other.take_blocks(40), sampling=NOISY))
        rows = [Row(1, 0, 11), Row(5, 0, 20), Row(2, 0, 22)]
        found = [token_of(other.runner.execute(batch(*rows, admits=admits), 1), 5)]
        for step in range(3):
            rows = [Row(1, 11 + step), Row(5, 20 + step), Row(2, 22 + step)]
            found.append(token_of(other.runner.execute(batch(*rows), 2 + step), 5))
        assert alone[:4] == found

    def test_result_names_only_rows_that_sample(self, bench: Bench):
        """
        Rows that do not sample have no entry; positions are those of the sampled tokens; order is the batch's.
        """
        admits = [bench.admit(slot, random_tokens(10, seed=slot)) for slot in (4, 1, 2)]
        rows = [Row(4, 0, 10), Row(1, 0, 4, samples=False), Row(2, 0, 10)]
        result = bench.runner.execute(batch(*rows, admits=admits), 7)
        assert (result.boot_id, result.step_id) == ("boot-1", 7)
        assert result.slot.tolist() == [4, 2]
        assert result.position.tolist() == [10, 10]
        assert result.generation.tolist() == [1, 1]
        assert result.token.dtype == result.slot.dtype == result.position.dtype == np.int32
        assert result.generation.dtype == np.uint32
        assert result.margin is not None
        assert result.margin.shape == (2,)
        assert result.device_memory_bytes > bench.kv.device_bytes

    def test_batch_without_rows_gives_an_empty_result(self, bench: Bench):
        """
        A batch may only release; it has a result without entries.
        """
        bench.runner.execute(batch(Row(0, 0, 3), admits=[bench.admit(0, [1, 2, 3])]), 1)
        result = bench.runner.execute(batch(releases=[0]), 2)
        assert len(result.slot) == len(result.token) == 0
        assert bench.runner.state_hash == 0

    def test_full_length_sequence_samples_its_last_token(self, zoo: Zoo):
        """
        A prompt of max_model_len tokens still samples the token after it.
        """
        bench = Bench.build(zoo("llama_mha"), max_model_len=32, num_slots=2)
        neighbour = bench.admit(1, random_tokens(8, seed=1))
        full = admission(0, random_tokens(32, seed=0), bench.take_blocks(32))
        rows = [Row(0, 0, 32), Row(1, 0, 8)]
        result = bench.runner.execute(batch(*rows, admits=[full, neighbour]), 1)
        assert result.position.tolist() == [32, 8]
        alone = Bench.build(zoo("llama_mha"), max_model_len=32)
        expected = generate(alone, random_tokens(8, seed=1), 3, neighbour.sampling)
        assert expected == [token_of(result, 1), *decode(bench, 1, 8, 2)]


class TestRowErrors:
    def test_token_out_of_range_fails_that_row_alone(self, bench: Bench):
        """
        An input token outside the vocabulary is that row's error; the others get the tokens they get alone.
        """
        prompt = random_tokens(12, seed=9)
        expected = generate(bench, prompt, 1, admission(0, [0], []).sampling)
        bad = [1, 2, VOCAB_SIZE, 3]
        admits = [bench.admit(1, bad, generation=3), bench.admit(2, prompt), bench.admit(3, [-1])]
        rows = [Row(1, 0, 4), Row(2, 0, 12), Row(3, 0, 1)]
        result = bench.runner.execute(batch(*rows, admits=admits), 2)
        assert [(1, 3), (3, 1)] == [(error.slot, error.generation) for error in result.row_errors]
        kinds = {error.kind for error in result.row_errors}
        assert kinds == {RowErrorKind.TOKEN_OUT_OF_RANGE}
        assert result.slot.tolist() == [2]
        assert expected == result.token.tolist()

    def test_bad_token_is_reported_by_the_chunk_that_reads_it(self, bench: Bench):
        """
        Chunks before the bad token pass; the one that reads it fails, whether it samples or not.
        """
        admit = bench.admit(0, [1, 2, 3, 4, VOCAB_SIZE, 5])
        first = bench.runner.execute(batch(Row(0, 0, 4, samples=False), admits=[admit]), 1)
        assert first.row_errors == ()
        second = bench.runner.execute(batch(Row(0, 4, 1, samples=False)), 2)
        assert len(second.row_errors) == 1

    def test_next_user_of_a_slot_starts_clean(self, bench: Bench):
        """
        A slot that failed works again under its next generation.
        """
        bench.runner.execute(batch(Row(0, 0, 1), admits=[bench.admit(0, [VOCAB_SIZE])]), 1)
        admit = bench.admit(0, [5, 6], generation=2)
        result = bench.runner.execute(batch(Row(0, 0, 2), admits=[admit], releases=[0]), 2)
        assert result.row_errors == ()
        assert result.generation.tolist() == [2]

    def test_nan_in_one_rows_cache_fails_that_row_alone(self, bench: Bench):
        """
        A row with NaN in its keys ends INVALID_LOGITS; a neighbour's token and margin do not
        change.
        """
        sick, well = random_tokens(30, seed=1), random_tokens(30, seed=2)
        admits = [bench.admit(0, sick), bench.admit(1, well)]
        bench.runner.execute(batch(Row(0, 0, 30), Row(1, 0, 30), admits=admits), 1)
        copy = [layer.clone() for layer in bench.kv.layers]
        healthy = bench.runner.execute(batch(Row(0, 30), Row(1, 30)), 2)
        for layer, before in zip(bench.kv.layers, copy, strict=True):
            layer.copy_(before)
            layer[int(admits[0].block_ids[0]), 3] = float("nan")
        bench.runner.reset()
        again = [admission(0, [*sick, 7], admits[0].block_ids.tolist(), num_cached_tokens=30)]
        token = int(bench.runner._tokens._history[1 * 257 + 30])
        again.append(
            admission(1, [*well, token], admits[1].block_ids.tolist(), num_cached_tokens=30)
        )
        result = bench.runner.execute(batch(Row(0, 30), Row(1, 30), admits=again), 3)
        assert [RowErrorKind.INVALID_LOGITS] == [error.kind for error in result.row_errors]
        assert [0] == [error.slot for error in result.row_errors]
        assert result.slot.tolist() == [1]
        assert token_of(healthy, 1) == token_of(result, 1)


class TestOrderInsideABatch:
    def test_copies_read_what_was_there_before_the_batch(self, zoo: Zoo, bench: Bench):
        """
        A block copied and at once reused by a new row gives the copy's owner the old contents.
        """
        prompt = random_tokens(24, seed=4)
        first = bench.admit(0, prompt)
        bench.runner.execute(batch(Row(0, 0, 24), admits=[first]), 1)
        full, partial = first.block_ids.tolist()[:2]
        (spare,) = bench.take_blocks(1)
        sharer = admission(1, [*prompt, 9], [full, spare], num_cached_tokens=24, generation=1)
        thief = admission(2, random_tokens(16, seed=8), [partial])
        plan = batch(
            Row(1, 24),
            Row(2, 0, 16),
            admits=[sharer, thief],
            releases=[0],
            copies=[(partial, spare)],
        )
        logits = forward_logits(bench.runner, plan)
        truth = hugging_face_logits(zoo("llama_gqa_llama3_rope"), [*prompt, 9])[-1]
        assert torch.allclose(truth, logits[0], atol=TOLERANCE)

    def test_appended_blocks_serve_the_same_batch(self, zoo: Zoo):
        """
        A row may use a block in the batch that appends it.
        """
        bench = Bench.build(zoo("llama_mha"), block_size=4)
        prompt = random_tokens(4, seed=0)
        admit = admission(0, prompt, [9])
        first = bench.runner.execute(batch(Row(0, 0, 4), admits=[admit]), 1)
        second = bench.runner.execute(batch(Row(0, 4), appends=[(0, 3)]), 2)
        tokens = [*prompt, token_of(first, 0)]
        truth = hugging_face_logits(zoo("llama_mha"), tokens)
        assert int(truth[-1].argmax()) == token_of(second, 0)

    def test_inconsistent_batch_changes_nothing(self, bench: Bench):
        """
        A batch that contradicts the slot state is refused whole: the next right one works.
        """
        admit = bench.admit(0, random_tokens(6, seed=0))
        bench.runner.execute(batch(Row(0, 0, 6), admits=[admit]), 1)
        before = bench.runner.state_hash
        with pytest.raises(SessionLost):
            bench.runner.execute(batch(Row(0, 3), releases=[5]), 2)
        assert before == bench.runner.state_hash
        assert len(bench.runner.execute(batch(Row(0, 6)), 2).token) == 1

    def test_slot_past_its_longest_sequence_is_refused(self, zoo: Zoo):
        """
        Blocks may have room past max_model_len; admitting or computing there is an error, and changes nothing.
        """
        bench = Bench.build(zoo("llama_mha"), max_model_len=20, block_size=16)
        with pytest.raises(SessionLost, match="to 21 tokens, max_model_len is 20"):
            bench.runner.execute(batch(admits=[admission(0, [1] * 21, [1, 2])]), 1)
        bench.runner.execute(batch(Row(0, 0, 20), admits=[admission(0, [1] * 20, [1, 2])]), 1)
        before = bench.runner.state_hash
        with pytest.raises(SessionLost, match="to 21 tokens, max_model_len is 20"):
            bench.runner.execute(batch(Row(0, 20)), 2)
        assert before == bench.runner.state_hash


class TestSuspension:
    @pytest.mark.parametrize("mode", [KvMode.PERSIST, KvMode.OFFLOAD])
    def test_generation_goes_on_where_it_was(self, bench: Bench, mode: KvMode):
        """
        After PERSIST and OFFLOAD a running sequence continues with the tokens it would have had.
        """
        prompt = random_tokens(20, seed=6)
        expected = generate(bench, prompt, 6, NOISY)
        bench.runner.reset()
        found = generate(bench, prompt, 3, NOISY)
        bench.runner.execute(batch(appends=[(0, bench.take_blocks(1)[0])]), 9)
        bench.runner.suspend(mode)
        bench.runner.resume()
        found += decode(bench, 0, 22, 3)
        assert expected == found

    def test_recompute_needs_every_slot_released(self, bench: Bench):
        """
        RECOMPUTE with a live slot is refused; without one it drops the memory, and slots work after resume.
        """
        admit = bench.admit(0, [1, 2, 3])
        before = bench.runner.execute(batch(Row(0, 0, 3), admits=[admit]), 1)
        with pytest.raises(SessionLost, match="1 slots are live"):
            bench.runner.suspend(KvMode.RECOMPUTE)
        bench.runner.execute(batch(releases=[0]), 2)
        bench.runner.suspend(KvMode.RECOMPUTE)
        assert bench.kv.device_bytes == 0
        bench.runner.resume()
        again = bench.runner.execute(
            batch(Row(0, 0, 3), admits=[bench.admit(0, [1, 2, 3], generation=2)]), 3
        )
        assert before.token.tolist() == again.token.tolist()

    def test_batch_while_suspended_is_refused(self, bench: Bench):
        """
        Rows need KV memory: computing while suspended is an error and changes nothing, releasing is not.
        """
        bench.runner.execute(batch(Row(0, 0, 3), admits=[bench.admit(0, [1, 2, 3])]), 1)
        bench.runner.suspend(KvMode.PERSIST)
        before = bench.runner.state_hash
        with pytest.raises(SessionLost, match="suspended"):
            bench.runner.execute(batch(Row(0, 3)), 2)
        assert before == bench.runner.state_hash
        bench.runner.execute(batch(releases=[0]), 2)
        assert bench.runner.state_hash == 0


class TestStart:
    @pytest.mark.parametrize(
        ("block_size", "num_blocks", "max_model_len"), [(16, 8, 64), (1, 1, 1), (4, 1, 9)]
    )
    def test_warm_up_leaves_no_trace(
        self, zoo: Zoo, block_size: int, num_blocks: int, max_model_len: int
    ):
        """
        Warming up works at any size and leaves the slots as new, generation 1 included.
        """
        bench = Bench.build(
            zoo("qwen3"),
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            num_slots=1,
        )
        bench.runner.warm_up()
        assert bench.runner.state_hash == 0
        bench.runner.execute(batch(Row(0, 0, 1), admits=[admission(0, [5], [1])]), 1)

    def test_timings_come_from_the_clock_given(self, zoo: Zoo):
        """
        Forward and sampling times add up to the step's, in the given clock's nanoseconds.
        """
        model = load_model(zoo("llama_mha"), dtype="float32", device="cpu")
        kv = KvMemory(model.config, 8, 16, model.dtype, model.device)
        ticks = itertools.chain([100, 350, 400], itertools.repeat(400))
        runner = ModelRunner(
            model,
            kv,
            num_slots=1,
            max_model_len=64,
            boot_id="b",
            clock_ns=lambda: next(ticks),
        )
        timings = runner.execute(batch(Row(0, 0, 1), admits=[admission(0, [5], [1])]), 1).timings
        assert (timings.forward_ns, timings.sample_ns, timings.total_ns) == (250, 50, 300)
