"""Decode steps from static buffers give the tokens of steps that bring their inputs with them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.memory.decode_bytes import RING_LINES
from executor_svc.step.static_step import DecodeStep, Drawing
from tandem.link.batch import Batch
from tandem.link.results import StepResult
from tandem.sampling_params import SamplingParams
from tests.executor_svc.stepping import GREEDY, Bench, Row, admission, batch, random_tokens

Zoo = Callable[[str], Path]

NUM_SLOTS = 6
BLOCK_SIZE = 7
TOLERANCE = 1e-4
"""Room for float32 sums in another order, 1e-6 per unit of logit; logits here reach about 10."""
NOISY = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=5)
FILTERED = SamplingParams(temperature=0.9, top_k=30, top_p=0.9, seed=2**64 - 1, min_p=0.02)
PENALISED = SamplingParams(temperature=0.8, top_k=0, top_p=1.0, seed=9, repetition_penalty=1.4)
TOLD = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, logprobs=3)


def twins(directory: Path, **options: object) -> tuple[Bench, Bench]:
    """The same model and memory twice: steps with their inputs, and from static buffers."""
    same = {"block_size": BLOCK_SIZE, "num_blocks": 64, "num_slots": NUM_SLOTS, "shuffle_seed": 3}
    same |= {"max_model_len": 64} | options
    return Bench.build(directory, **same), Bench.build(directory, static_rows=NUM_SLOTS, **same)


def is_same(left: StepResult, right: StepResult) -> bool:
    """
    Return whether all that rows got is equal, but for rounding in margins and log probabilities.
    """
    columns = ("slot", "generation", "position", "token")
    same = all(np.array_equal(getattr(left, name), getattr(right, name)) for name in columns)
    same &= left.row_errors == right.row_errors
    if left.logprobs is not None and right.logprobs is not None:
        same &= np.allclose(left.logprobs.chosen, right.logprobs.chosen, atol=TOLERANCE)
    return same and (left.logprobs is None) == (right.logprobs is None)


class Traffic:
    """Requests that come and go: one batch after another, the same for every runner."""

    def __init__(self, block_ids: list[int]) -> None:
        self.free = list(block_ids)
        self.length: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}
        self.generation = dict.fromkeys(range(NUM_SLOTS), 0)
        self._released: list[int] = []

    def leave(self, slot: int) -> None:
        """Release the slot with the next batch."""
        self.free += self.blocks.pop(slot)
        del self.length[slot]
        self._released.append(slot)

    def join(self, slot: int, prompt_len: int, sampling: SamplingParams) -> Batch:
        """Return a batch in which all running rows decode and a new one computes its prompt."""
        self.generation[slot] += 1
        decodes = [Row(each, self.length[each]) for each in self.order()]
        appends = self._grow()
        count = -(-prompt_len // BLOCK_SIZE)
        self.blocks[slot], self.free = self.free[:count], self.free[count:]
        admit = admission(
            slot,
            random_tokens(prompt_len, seed=slot + 10 * self.generation[slot]),
            self.blocks[slot],
            generation=self.generation[slot],
            sampling=sampling,
        )
        self.length[slot] = prompt_len
        return self._batch(*decodes, Row(slot, 0, prompt_len), admits=[admit], appends=appends)

    def decode(self, order: list[int] | None = None) -> Batch:
        """Return a batch in which all running rows decode, in slots' order or another."""
        rows = [Row(slot, self.length[slot]) for slot in order or self.order()]
        return self._batch(*rows, appends=self._grow())

    def order(self) -> list[int]:
        """Return the slots that run."""
        return sorted(self.length)

    def _grow(self) -> list[tuple[int, int]]:
        appends = []
        for slot in self.order():
            self.length[slot] += 1
            if self.length[slot] > len(self.blocks[slot]) * BLOCK_SIZE:
                self.blocks[slot].append(self.free.pop(0))
                appends.append((slot, self.blocks[slot][-1]))
        return appends

    def _batch(self, *rows: Row, **parts: object) -> Batch:
        released, self._released = self._released, []
        return batch(*rows, releases=released, **parts)


def joins_and_leaves(block_ids: list[int], samplings: list[SamplingParams]) -> Iterator[Batch]:
    """
    Yield batches: rows come at the end and in the middle, leave from the middle, change places and
    slots.
    """
    traffic = Traffic(block_ids)
    for slot, sampling in zip((1, 3, 4), samplings, strict=False):
        yield traffic.join(slot, 4 + 5 * slot, sampling)
        yield traffic.decode()
    for _ in range(BLOCK_SIZE + 1):
        yield traffic.decode()
    traffic.leave(3)
    yield traffic.decode()
    yield traffic.join(2, 3, samplings[-1])
    yield traffic.decode([4, 1, 2])
    yield traffic.decode([2, 1, 4])
    yield traffic.join(3, 9, samplings[0])
    traffic.leave(1)
    for _ in range(3):
        yield traffic.decode()


def count_calls(work: Callable[[], object]) -> int:
    """Count the calls of functions, Python's and others, that `work` makes."""
    events: list[str] = []
    sys.setprofile(lambda _frame, event, _function: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return events.count("call") + events.count("c_call")


class TestTokens:
    @pytest.mark.parametrize(
        ("family", "samplings"),
        [
            pytest.param("llama_gqa_llama3_rope", [GREEDY, NOISY, GREEDY], id="plain"),
            pytest.param("qwen2_window", [GREEDY, FILTERED, NOISY], id="filtered"),
            pytest.param("qwen2_window", [PENALISED, NOISY, TOLD], id="drawn-outside"),
        ],
    )
    def test_rows_that_come_and_go_get_the_tokens_of_other_steps(
        self, zoo: Zoo, family: str, samplings: list[SamplingParams]
    ):
        """
        Each row gets the tokens that steps with their own inputs give it, whatever rows join, leave
        or change places and whatever runs between.
        """
        plain, static = twins(zoo(family))
        for step, each in enumerate(joins_and_leaves(plain.block_ids, samplings), start=1):
            expected, found = (bench.runner.execute(each, step) for bench in (plain, static))
            assert is_same(expected, found), step
        assert plain.runner.state_hash == static.runner.state_hash

    def test_margins_are_those_of_other_steps(self, zoo: Zoo):
        """
        Decodes from static buffers have margins too when these are collected.
        """
        plain, static = twins(zoo("llama_mha"), collect_margins=True)
        for step, each in enumerate(joins_and_leaves(plain.block_ids, [GREEDY, NOISY, FILTERED])):
            expected, found = (bench.runner.execute(each, step) for bench in (plain, static))
            assert np.allclose(expected.margin, found.margin, atol=TOLERANCE), step

    def test_a_row_with_nan_fails_alone(self, zoo: Zoo):
        """
        A row with NaN in its keys ends INVALID_LOGITS, and its neighbours go on as without it.
        """
        plain, static = twins(zoo("llama_mha"))
        traffic = Traffic(plain.block_ids)
        steps = [traffic.join(slot, 9, GREEDY) for slot in (0, 1, 2)]
        steps += [traffic.decode()]
        for bench in (plain, static):
            for step, each in enumerate(steps):
                bench.runner.execute(each, step)
            for layer in bench.kv.layers:
                layer[traffic.blocks[1][0], 2] = float("nan")
        last = traffic.decode()
        expected, found = (bench.runner.execute(last, 9) for bench in (plain, static))
        assert [1] == [error.slot for error in found.row_errors]
        assert is_same(expected, found)

    def test_a_new_session_starts_clean(self, zoo: Zoo):
        """
        After a reset the same slots, generations and blocks serve other sequences.
        """
        plain, static = twins(zoo("llama_mha"))
        for samplings in ([GREEDY, NOISY, GREEDY], [FILTERED, GREEDY, NOISY]):
            steps = joins_and_leaves(plain.block_ids, samplings)
            for step, each in enumerate(itertools.islice(steps, 7)):
                expected, found = (bench.runner.execute(each, step) for bench in (plain, static))
                assert is_same(expected, found), step
            for bench in (plain, static):
                bench.runner.reset()


class TestDevice:
    def run_rows(self, zoo: Zoo, num_steps: int) -> tuple[Bench, DecodeStep, Traffic]:
        """Three rows after their prompts and some decodes."""
        _, static = twins(zoo("llama_mha"))
        traffic = Traffic(static.block_ids)
        for step, slot in enumerate((0, 2, 5)):
            static.runner.execute(traffic.join(slot, 8, GREEDY), step)
        for step in range(num_steps):
            static.runner.execute(traffic.decode(), 3 + step)
        assert static.runner._static is not None
        return static, static.runner._static.step, traffic

    def test_steps_feed_themselves(self, zoo: Zoo):
        """
        Steps run one after another without the host give the tokens that it would have asked for one by one, in a ring of lines.
        """
        plain, step_bench = twins(zoo("llama_mha"))
        traffic = Traffic(plain.block_ids)
        for count, slot in enumerate((0, 2, 5)):
            each = traffic.join(slot, 8, NOISY)
            plain.runner.execute(each, count)
            step_bench.runner.execute(each, count)
        repeats = [traffic.decode() for _ in range(4)]  # positions 8 to 13: two blocks hold them
        expected = [plain.runner.execute(each, 3).token.tolist() for each in repeats]
        step_bench.runner.execute(repeats[0], 3)
        step = step_bench.runner._static.step
        with torch.inference_mode():
            for _ in repeats[1:]:
                step.run(3, Drawing.PLAIN)
        assert expected == step._ring.tokens[1:5, :3].tolist()

    def test_rows_that_only_go_on_send_nothing(self, zoo: Zoo, monkeypatch):
        """
        A step of the same rows, none of which begins a block, brings the device no word.
        """
        static, _, traffic = self.run_rows(zoo, num_steps=1)
        sent = []
        monkeypatch.setattr(
            "executor_svc.step.static_step.patch_rows", lambda _words, patch: sent.append(patch)
        )
        for _ in range(2):
            static.runner.execute(traffic.decode(), 9)
        assert [] == sent

    def test_a_block_and_a_place_are_sent_as_what_changed(self, zoo: Zoo, monkeypatch):
        """
        A row that leaves moves those behind it, for one word each; a row that begins a block sends that block.
        """
        static, _, traffic = self.run_rows(zoo, num_steps=1)
        sent = []

        def patch_rows(words: torch.Tensor, patch: torch.Tensor) -> None:
            sent.append(patch[1].tolist())
            words[patch[0].long()] = patch[1]

        monkeypatch.setattr("executor_svc.step.static_step.patch_rows", patch_rows)
        traffic.leave(0)
        static.runner.execute(traffic.decode(), 9)
        assert [[2, 5, -1]] == sent
        while traffic.length[2] % BLOCK_SIZE:
            static.runner.execute(traffic.decode(), 9)
        assert [[2, 5, -1]] == sent
        static.runner.execute(traffic.decode(), 9)
        assert [traffic.blocks[2][-1]] == sent[-1]
        assert 2 == len(sent)

    def test_many_rows_take_no_more_calls_than_few(self, zoo: Zoo):
        """
        The host works on columns: a step of 30 rows that only go on makes as many calls, of Python's and of libraries', as one of 2.
        """
        found = []
        for num_rows in (2, 30):
            same = {"block_size": 64, "num_blocks": num_rows, "num_slots": num_rows}
            bench = Bench.build(zoo("llama_mha"), max_model_len=64, static_rows=num_rows, **same)
            admits = [bench.admit(slot, [1, 2]) for slot in range(num_rows)]
            prompts = [Row(slot, 0, 2) for slot in range(num_rows)]
            bench.runner.execute(batch(*prompts, admits=admits), 1)
            steps = [batch(*(Row(slot, 2 + step) for slot in range(num_rows))) for step in range(3)]
            for each in steps[:2]:
                bench.runner.execute(each, 2)
            assert bench.runner._static is not None
            bench.runner._static._run = lambda _rows, _drawing: 0
            found.append(count_calls(partial(bench.runner.launch, steps[2], 3)))
        few, many = found
        assert few == many
        assert few > 50

    @pytest.mark.parametrize("drawing", list(Drawing))
    def test_padding_touches_nothing_anybody_reads(self, zoo: Zoo, drawing: Drawing):
        """
        Rows of padding write keys and values into the dummy block alone, and no position, token or table of a slot.
        """
        static, step, _ = self.run_rows(zoo, num_steps=1)
        step.forget()
        blocks = [layer[1:].clone() for layer in static.kv.layers]
        history = step._slots.history[:, :-1].clone()
        words = step._packed.words.clone()
        for layer in static.kv.layers:
            layer[0] = 7.0
        with torch.inference_mode():
            step.run(NUM_SLOTS, drawing)
            if drawing is Drawing.OUTSIDE:
                token = torch.ones(NUM_SLOTS, dtype=torch.int64)
                step.finish(token, token.bool())
        for layer, before in zip(static.kv.layers, blocks, strict=True):
            assert torch.equal(before.nan_to_num(), layer[1:].nan_to_num())
        assert torch.equal(history, step._slots.history[:, :-1])
        assert torch.equal(words, step._packed.words)
        assert [-1] * NUM_SLOTS == step._ring.tokens[1].tolist()

    def test_more_rows_than_asked_for_pad(self, zoo: Zoo):
        """
        A step may compute more rows than were prepared: these get their tokens, the rest none.
        """
        plain, static = twins(zoo("llama_mha"))
        traffic = Traffic(plain.block_ids)
        for step, slot in enumerate((0, 2)):
            each = traffic.join(slot, 8, FILTERED)
            expected = plain.runner.execute(each, step)
            static.runner.execute(each, step)
        step = static.runner._static.step
        static.runner._static._run = lambda _rows, drawing: step.run(5, drawing) or 5
        for _ in range(3):
            each = traffic.decode()
            expected, found = (bench.runner.execute(each, 4) for bench in (plain, static))
            assert is_same(expected, found)
            assert 5 == found.graph
            assert [-1, -1, -1] == step._ring.tokens[step._line, 2:5].tolist()

    def test_result_of_a_step_outlives_the_steps_after_it(self, zoo: Zoo):
        """
        Tokens are told as they were drawn, though their line of the ring is written anew before they are asked for.
        """
        plain, static = twins(zoo("llama_mha"))
        traffic = Traffic(plain.block_ids)
        first = traffic.join(0, 3, NOISY)
        plain.runner.execute(first, 0)
        static.runner.execute(first, 0)
        steps = [traffic.decode() for _ in range(RING_LINES + 2)]
        expected = [plain.runner.execute(each, 1).token.tolist() for each in steps]
        collects = [static.runner.launch(each, 1) for each in steps]
        assert expected == [collect().token.tolist() for collect in collects]
