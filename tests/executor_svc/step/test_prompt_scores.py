"""Logprobs of prompt tokens, for the rows that ask, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.memory import activations
from tandem.link.logprobs import LogprobColumns, PromptLogprobColumns, TokenLogprob
from tandem.link.results import RowErrorKind, StepResult
from tandem.sampling_params import SamplingParams
from tests.executor_svc.stepping import (
    GREEDY,
    Bench,
    Row,
    batch,
    hugging_face_logits,
    random_tokens,
)
from tests.model_zoo import VOCAB_SIZE

Zoo = Callable[[str], Path]
FAMILY = "llama_gqa_llama3_rope"
BUNDLED = Path(__file__).resolve().parents[3] / "deploy/models/tandem-py"
FLOAT32_NOISE = 1e-4
"""
Another order of summation in float32 changes logits of about 20 by some 1e-5; log-softmax adds the
same once more.
"""
PROMPT = random_tokens(40, seed=8)


def asking(num_top: int | None, **changes: object) -> SamplingParams:
    return replace(GREEDY, prompt_logprobs=num_top, **changes)


def scores_of(result: StepResult, slot: int) -> dict[int, TokenLogprob]:
    """Return a slot's scores of one step by position."""
    told = result.prompt_logprobs
    if told is None:
        return {}
    entries = zip(
        told.slot.tolist(), told.position.tolist(), told.rank.tolist(), told.columns.entries(),
        strict=True,
    )  # fmt: skip
    return {at: entry._replace(rank=rank) for one, at, rank, entry in entries if one == slot}


def scored(bench: Bench, prompt: list[int], cuts: list[int], num_top: int) -> dict:
    """Return the scores of a prompt that is computed in chunks of these lengths."""
    admits, start, found = [bench.admit(0, prompt, sampling=asking(num_top))], 0, {}
    for length in cuts:
        row = Row(0, start, length, samples=start + length == len(prompt))
        found |= scores_of(bench.runner.execute(batch(row, admits=admits), 1), 0)
        admits, start = [], start + length
    return found


def expected_scores(directory: Path, prompt: list[int]) -> torch.Tensor:
    """Return transformers' log-softmax at the places of the prompt tokens 1, 2, ..."""
    return hugging_face_logits(directory, prompt)[:-1].log_softmax(dim=-1)


class TestValues:
    @pytest.mark.parametrize("directory", [None, BUNDLED], ids=[FAMILY, "bundled"])
    def test_equal_the_log_softmax_of_transformers(self, zoo: Zoo, directory):
        """
        Every prompt token but the first has its log probability, its rank and the likeliest ids.
        """
        directory = directory or zoo(FAMILY)
        expected = expected_scores(directory, PROMPT)
        found = scored(Bench.build(directory), PROMPT, [len(PROMPT)], 5)
        assert list(range(1, len(PROMPT))) == list(found)
        for position, entry in found.items():
            own = expected[position - 1]
            assert entry.logprob == pytest.approx(own[PROMPT[position]].item(), abs=FLOAT32_NOISE)
            np.testing.assert_allclose(
                entry.top_logprobs, own.topk(5).values, rtol=0, atol=FLOAT32_NOISE
            )
            assert len(set(entry.top_token_ids)) == 5
            below = int((own > own[PROMPT[position]] + FLOAT32_NOISE).sum()) + 1
            above = int((own > own[PROMPT[position]] - FLOAT32_NOISE).sum())
            assert below <= entry.rank <= max(above, below)

    def test_token_among_the_likeliest_stands_at_its_rank(self, zoo: Zoo):
        """
        A rank within the number of ids asked for is the token's place among them.
        """
        found = scored(Bench.build(zoo(FAMILY)), PROMPT, [len(PROMPT)], 20)
        for position, entry in found.items():
            is_listed = PROMPT[position] in entry.top_token_ids
            assert is_listed == (entry.rank <= 20)
            if is_listed:
                assert PROMPT[position] == entry.top_token_ids[entry.rank - 1]
                assert entry.logprob == entry.top_logprobs[entry.rank - 1]

    def test_numbers_of_ids_differ_by_row(self, zoo: Zoo):
        """
        Each row gets as many ids as it asked for, and a row that did not ask gets nothing.
        """
        bench = Bench.build(zoo(FAMILY))
        asked = [0, None, 3, 20]
        admits = [
            bench.admit(slot, PROMPT[: 4 + slot], sampling=asking(num_top))
            for slot, num_top in enumerate(asked)
        ]
        rows = [Row(slot, 0, 4 + slot) for slot in range(len(asked))]
        result = bench.runner.execute(batch(*rows, admits=admits), 1)
        found = [scores_of(result, slot) for slot in range(len(asked))]
        assert [3, 0, 5, 6] == [len(one) for one in found]
        tops = [{len(entry.top_logprobs) for entry in one.values()} for one in found]
        assert [{0}, set(), {3}, {20}] == tops


class TestBits:
    @pytest.mark.parametrize("cuts", [[1] * 40, [7, 1, 20, 12], [39, 1], [1, 39]], ids=str)
    def test_chunks_do_not_change_them(self, zoo: Zoo, cuts):
        """
        With batch_invariant every bit is the same however the prompt is cut.
        """
        whole = scored(Bench.build(zoo(FAMILY), batch_invariant=True), PROMPT, [40], 4)
        assert whole == scored(Bench.build(zoo(FAMILY), batch_invariant=True), PROMPT, cuts, 4)

    @pytest.mark.parametrize("num_logits", [1, 3 * VOCAB_SIZE, 7 * VOCAB_SIZE + 9])
    def test_size_of_the_scratch_does_not_change_them(self, zoo: Zoo, monkeypatch, num_logits):
        """
        With batch_invariant every bit is the same however many positions have logits at a time.
        """
        whole = scored(Bench.build(zoo(FAMILY), batch_invariant=True), PROMPT, [40], 4)
        monkeypatch.setattr(activations, "_SCORED_LOGITS", num_logits)
        assert whole == scored(Bench.build(zoo(FAMILY), batch_invariant=True), PROMPT, [40], 4)

    def test_neighbours_do_not_change_them(self, zoo: Zoo):
        """
        With batch_invariant every bit is the same beside decodes and other prompts.
        """
        alone = scored(Bench.build(zoo(FAMILY), batch_invariant=True), PROMPT, [40], 4)
        bench = Bench.build(zoo(FAMILY), batch_invariant=True)
        first = bench.admit(1, random_tokens(9, seed=1), sampling=asking(20, logprobs=3))
        bench.runner.execute(batch(Row(1, 0, 9), admits=[first]), 1)
        admits = [
            bench.admit(0, PROMPT, sampling=asking(4)),
            bench.admit(2, random_tokens(30, seed=2), sampling=asking(0)),
        ]
        step = batch(Row(1, 9), Row(2, 0, 17, samples=False), Row(0, 0, 40), admits=admits)
        assert alone == scores_of(bench.runner.execute(step, 2), 0)


class TestCost:
    def test_logits_exist_for_a_bounded_number_of_positions(self, zoo: Zoo, monkeypatch):
        """
        However long the prompt, the output projection is applied to few positions at a time.
        """
        monkeypatch.setattr(activations, "_SCORED_LOGITS", 8 * VOCAB_SIZE)
        bench = Bench.build(zoo(FAMILY))
        sizes: list[int] = []
        project = bench.runner._decoder.project

        def noted(hidden: torch.Tensor) -> torch.Tensor:
            sizes.append(len(hidden))
            return project(hidden)

        monkeypatch.setattr(bench.runner._decoder, "project", noted)
        assert 199 == len(scored(bench, random_tokens(200, seed=3), [200], 2))
        assert [8] * 24 + [7, 1] == sizes

    def test_rows_that_do_not_ask_cost_one_projection_of_their_last_position(
        self, zoo: Zoo, monkeypatch
    ):
        """
        Beside a row that asks, only its own positions get logits.
        """
        bench = Bench.build(zoo(FAMILY))
        sizes: list[int] = []
        project = bench.runner._decoder.project
        monkeypatch.setattr(
            bench.runner._decoder, "project", lambda hidden: (sizes.append(len(hidden)), project(hidden))[1]
        )  # fmt: skip
        admits = [bench.admit(0, PROMPT), bench.admit(1, PROMPT[:5], sampling=asking(1))]
        bench.runner.execute(batch(Row(0, 0, 40), Row(1, 0, 5), admits=admits), 1)
        assert [4, 2] == sizes
        bench.runner.execute(batch(Row(0, 40), Row(1, 5)), 2)
        assert [4, 2, 2] == sizes


class TestRows:
    def test_prompt_ends_where_outputs_begin(self, zoo: Zoo):
        """
        Of a request that comes with outputs, as after a preemption, only prompt tokens are scored.
        """
        bench = Bench.build(zoo(FAMILY))
        admit = replace(bench.admit(0, PROMPT, sampling=asking(1)), num_prompt_tokens=10)
        result = bench.runner.execute(batch(Row(0, 0, 40), admits=[admit]), 1)
        assert list(range(1, 10)) == list(scores_of(result, 0))

    def test_prompt_of_one_token_has_nothing_to_score(self, zoo: Zoo):
        """
        The first token is followed by none of the prompt.
        """
        bench = Bench.build(zoo(FAMILY))
        admit = bench.admit(0, PROMPT[:1], sampling=asking(1))
        result = bench.runner.execute(batch(Row(0, 0, 1), admits=[admit]), 1)
        assert result.prompt_logprobs is None
        assert [0] == result.slot.tolist()

    def test_prompt_that_samples_nothing_is_scored_all_the_same(self, zoo: Zoo):
        """
        A step may score a whole prompt and produce no token.
        """
        bench = Bench.build(zoo(FAMILY))
        admit = bench.admit(0, PROMPT, sampling=asking(1))
        result = bench.runner.execute(batch(Row(0, 0, 40, samples=False), admits=[admit]), 1)
        assert [] == result.slot.tolist()
        assert 39 == len(scores_of(result, 0))

    def test_infinite_logits_fail_the_row_alone(self, zoo: Zoo):
        """
        A prompt position without numbers fails its row, of which nothing is told; others go on.
        """
        bench = Bench.build(zoo(FAMILY))
        admits = [bench.admit(slot, PROMPT[:20], sampling=asking(1)) for slot in (0, 1)]
        bench.runner.execute(
            batch(*(Row(slot, 0, 8, samples=False) for slot in (0, 1)), admits=admits), 1
        )
        for layer in bench.kv.layers:
            layer[admits[1].block_ids[0]].fill_(float("nan"))
        step = batch(*(Row(slot, 8, 4, samples=False) for slot in (0, 1)))
        result = bench.runner.execute(step, 2)
        assert [(1, RowErrorKind.INVALID_LOGITS)] == [
            (error.slot, error.kind) for error in result.row_errors
        ]
        assert list(range(9, 13)) == list(scores_of(result, 0))
        assert {} == scores_of(result, 1)


def test_selected_entries_keep_their_columns():
    """
    A selection of entries has their positions, ranks and likeliest ids.
    """
    told = PromptLogprobColumns(
        slot=np.array([0, 0, 2], np.int32),
        generation=np.array([1, 1, 4], np.uint32),
        position=np.array([1, 2, 9], np.int32),
        rank=np.array([3, 1, 2], np.int32),
        columns=LogprobColumns(
            row=np.arange(3, dtype=np.int32),
            chosen=np.array([-1, -2, -3], np.float32),
            top_start=np.array([0, 1, 1, 3], np.int32),
            top_token=np.array([5, 6, 7], np.int32),
            top=np.array([-0.1, -0.2, -0.3], np.float32),
        ),
    )
    found = told.select(np.array([False, True, True]))
    assert [2, 9] == found.position.tolist()
    assert [1, 2] == found.rank.tolist()
    assert [(-2.0, []), (-3.0, [6, 7])] == [
        (one.logprob, one.top_token_ids) for one in found.columns.entries()
    ]
