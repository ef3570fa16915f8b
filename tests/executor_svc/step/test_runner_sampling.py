"""Penalties, bans and log probabilities of a runner's rows, by the token history it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.slots.sampling import SlotSampling
from executor_svc.slots.tokens import SlotTokens
from kernels.sampling import reference
from tandem.errors import SessionLost
from tandem.link.results import StepResult
from tandem.sampling_params import SamplingParams
from tests.executor_svc.stepping import (
    GREEDY,
    Bench,
    Row,
    admission,
    batch,
    hugging_face_logits,
    random_tokens,
)
from tests.kernels.sampling.edit_oracle import RowEdits, edited_row
from tests.kernels.sampling.rows import make_columns
from tests.model_zoo import VOCAB_SIZE

Zoo = Callable[[str], Path]
FAMILY = "llama_gqa_llama3_rope"
NEAR_TIE = 1e-3
"""Lead under which rounding may have decided between two ids."""

PENALISED = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.6, presence_penalty=0.4)
CONFINED = replace(
    SamplingParams(temperature=1.0, top_p=0.9, seed=8), allowed_token_ids=tuple(range(5, 90, 7))
)
SEEDED = replace(PENALISED, temperature=0.9, top_p=0.95, min_p=0.02, seed=77)


@pytest.fixture
def bench(zoo: Zoo) -> Bench:
    return Bench.build(zoo(FAMILY))


def tokens_of(result: StepResult) -> dict[int, int]:
    """Return tokens by slot."""
    return dict(zip(result.slot.tolist(), result.token.tolist(), strict=True))


def generate(
    bench: Bench,
    prompt: list[int],
    sampling: SamplingParams,
    num_tokens: int,
    *,
    outputs: list[int] | None = None,
    slot: int = 0,
    generation: int = 1,
) -> list[int]:
    """Return all output tokens of one request; some may be there already when it is admitted."""
    found = list(outputs or [])
    known = [*prompt, *found]
    admit = replace(
        admission(slot, known, bench.take_blocks(len(prompt) + num_tokens + 1)),
        num_prompt_tokens=len(prompt),
        generation=generation,
        sampling=sampling,
    )
    result = bench.runner.execute(batch(Row(slot, 0, len(known)), admits=[admit]), 1)
    found.append(tokens_of(result)[slot])
    while len(found) < num_tokens:
        step = batch(Row(slot, len(prompt) + len(found) - 1))
        found.append(tokens_of(bench.runner.execute(step, 1))[slot])
    return found


class TestPenalties:
    def test_greedy_tokens_are_the_best_after_penalties(self, zoo: Zoo, bench: Bench):
        """
        Each token of rows with different penalties is the best id after the formula of its prompt and its output so
        far, also beside rows without any.
        """
        kinds = {
            0: PENALISED,
            1: GREEDY,
            2: replace(GREEDY, repetition_penalty=1.5),
            4: replace(GREEDY, presence_penalty=2.0),
            5: replace(GREEDY, frequency_penalty=-0.3, logit_bias=((7, 2.5), (9, -50.0))),
        }
        prompts = {slot: random_tokens(6 + slot, seed=slot) for slot in kinds}
        outputs: dict[int, list[int]] = {slot: [] for slot in kinds}
        admits = [
            admission(slot, prompts[slot], bench.take_blocks(30), sampling=kinds[slot])
            for slot in kinds
        ]
        step = batch(*(Row(slot, 0, len(prompts[slot])) for slot in kinds), admits=admits)
        for number in range(12):
            found = tokens_of(bench.runner.execute(step, 1 + number))
            for slot, token in found.items():
                outputs[slot].append(token)
            step = batch(*(Row(s, len(prompts[s]) + number) for s in kinds))
        for slot, sampling in kinds.items():
            prompt, output = prompts[slot], outputs[slot]
            logits = hugging_face_logits(zoo(FAMILY), prompt + output).double().numpy()
            for number, token in enumerate(output):
                row = RowEdits(
                    prompt=tuple(prompt),
                    output=tuple(output[:number]),
                    repetition=sampling.repetition_penalty,
                    frequency=sampling.frequency_penalty,
                    presence=sampling.presence_penalty,
                    bias=sampling.logit_bias,
                )
                edited = edited_row(logits[len(prompt) - 1 + number], row)
                assert edited[token] > edited.max() - NEAR_TIE, (slot, number)

    @pytest.mark.parametrize(
        "sampling", [PENALISED, SEEDED, CONFINED], ids=["greedy", "seeded", "confined"]
    )
    @pytest.mark.parametrize("kept", [1, 7])
    def test_admission_with_outputs_goes_on_as_if_nothing_had_happened(
        self, zoo: Zoo, bench: Bench, sampling: SamplingParams, kept: int
    ):
        """
        A request that was preempted, and comes back with its outputs into another slot, gets the tokens it would have
        got.
        """
        prompt = random_tokens(11, seed=4)
        whole = generate(bench, prompt, sampling, 16)
        other = Bench.build(zoo(FAMILY), shuffle_seed=3)
        generate(other, random_tokens(40, seed=9), PENALISED, 20, slot=3)  # leaves its history
        other.runner.execute(batch(releases=[3]), 1)
        resumed = generate(other, prompt, sampling, 16, outputs=whole[:kept], slot=3, generation=2)
        assert whole == resumed

    def test_prompt_and_output_are_told_apart(self, bench: Bench):
        """
        The same tokens count for the frequency penalty as output and not as prompt.
        """
        attracted = replace(GREEDY, frequency_penalty=-2.0)
        prompt, said = random_tokens(5, seed=6), [17] * 10
        as_output = generate(bench, prompt, attracted, 12, outputs=said, slot=1)
        as_prompt = generate(bench, [*prompt, *said], attracted, 1, slot=2)
        assert [17, 17] == as_output[10:]
        assert generate(bench, [*prompt, *said], GREEDY, 1, slot=3) == as_prompt
        assert [17] != as_prompt

    def test_tokens_outside_the_vocabulary_fail_their_row_alone(self, bench: Bench):
        """
        A row with penalties and with tokens that are no ids of the model fails alone.
        """
        good = bench.admit(0, random_tokens(5, seed=1), sampling=PENALISED)
        bad = bench.admit(1, [3, VOCAB_SIZE + 9, 4], sampling=PENALISED)
        step = batch(Row(0, 0, 5), Row(1, 0, 3), admits=[good, bad])
        result = bench.runner.execute(step, 1)
        assert [1] == [error.slot for error in result.row_errors]
        assert [0] == result.slot.tolist()


class TestAllowedIds:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_tokens_are_those_of_the_confined_softmax(self, zoo: Zoo, bench: Bench, temperature):
        """
        Only allowed ids are drawn: each token is the one that the noise takes from the logits of
        transformers with all others masked, and a greedy one the best of them.
        """
        sampling = replace(CONFINED, temperature=temperature, top_p=1.0)
        prompt = random_tokens(11, seed=4)
        found = generate(bench, prompt, sampling, 16)
        assert set(found) <= set(sampling.allowed_token_ids)
        logits = hugging_face_logits(zoo(FAMILY), [*prompt, *found])
        masked = torch.full_like(logits, -torch.inf)
        allowed = list(sampling.allowed_token_ids)
        masked[:, allowed] = logits[:, allowed]
        for place, token in enumerate(found):
            position = len(prompt) + place
            columns = make_columns(
                1, temperature=temperature, seed=sampling.seed, first_position=position
            )
            row = masked[position - 1 : position].float()
            drawn = reference.sample(row, columns, margin_eps=0.0)
            assert token == int(drawn.token) or float(drawn.margin) < NEAR_TIE

    def test_neighbours_do_not_matter(self, bench: Bench):
        """
        A confined row and a free one get in one batch what each gets alone.
        """
        prompts = [random_tokens(7, seed=1), random_tokens(7, seed=2)]
        params = [CONFINED, replace(CONFINED, allowed_token_ids=())]
        alone = [
            generate(bench, prompt, one, 8, slot=slot, generation=1)
            for slot, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        bench.runner.execute(batch(releases=[0, 1]), 1)
        admits = [
            replace(admission(slot, prompt, bench.take_blocks(16)), generation=9, sampling=sampling)
            for slot, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
        ]
        step = batch(Row(0, 0, 7), Row(1, 0, 7), admits=admits)
        together: list[list[int]] = [[], []]
        for place in range(8):
            for slot, token in tokens_of(bench.runner.execute(step, 1)).items():
                together[slot].append(token)
            step = batch(Row(0, 7 + place), Row(1, 7 + place))
        assert alone == together

    def test_end_ids_wait_for_their_turn(self, bench: Bench):
        """
        Under min_tokens an allowed end id is not drawn, and after it only the allowed ids are.
        """
        sampling = replace(
            CONFINED, temperature=0.0, allowed_token_ids=(3, 4, 5), end_ids=(3, 4), min_tokens=4
        )
        found = generate(bench, random_tokens(11, seed=4), sampling, 12)
        assert [5] * 4 == found[:4]
        assert set(found) <= {3, 4, 5}

    def test_id_outside_the_vocabulary_ends_the_session(self, bench: Bench):
        """
        An id that has no logit is an error: without it the row could be free to draw anything.
        """
        sampling = replace(CONFINED, allowed_token_ids=(VOCAB_SIZE,))
        with pytest.raises(SessionLost, match="allowed_ids of slot 0"):
            generate(bench, [1, 2], sampling, 1)


class TestMinTokens:
    def test_end_ids_wait_for_their_turn(self, bench: Bench):
        """
        An id that ends the output is not sampled among its first min_tokens tokens, and may be the next one.
        """
        prompt = random_tokens(8, seed=2)
        free = generate(bench, prompt, GREEDY, 1)
        held = replace(GREEDY, min_tokens=3, end_ids=(free[0], 5))
        found = generate(bench, prompt, held, 4, slot=1)
        assert not {free[0], 5} & set(found[:3])
        biased = replace(held, logit_bias=((free[0], 100.0),))
        assert free[0] == generate(bench, prompt, biased, 4, slot=2)[3]

    def test_outputs_before_an_admission_count(self, bench: Bench):
        """
        Tokens that were there when a request came back count for min_tokens.
        """
        prompt = random_tokens(8, seed=2)
        sampling = replace(GREEDY, min_tokens=3, end_ids=(9,), logit_bias=((9, 100.0),))
        found = generate(bench, prompt, sampling, 4, outputs=[1, 2], slot=1)
        assert 9 != found[2]
        assert 9 == found[3]


class TestLogprobs:
    def test_rows_that_ask_get_those_of_the_model(self, zoo: Zoo, bench: Bench):
        """
        Rows that ask are told their token's log probability and as many of the likeliest ids as they asked for; no
        column knows the others.
        """
        asked = {0: None, 1: 0, 2: 3, 3: None, 4: 20}
        prompts = {slot: random_tokens(7, seed=slot) for slot in asked}
        admits = [
            bench.admit(slot, prompts[slot], sampling=replace(PENALISED, logprobs=count))
            for slot, count in asked.items()
        ]
        result = bench.runner.execute(batch(*(Row(s, 0, 7) for s in asked), admits=admits), 1)
        told = result.logprobs
        assert [1, 2, 4] == told.row.tolist()
        assert [0, 0, 3, 23] == told.top_start.tolist()
        for entry, slot in enumerate([1, 2, 4]):
            logits = hugging_face_logits(zoo(FAMILY), prompts[slot])[-1]
            expected = logits.log_softmax(0).numpy()
            token = int(result.token[told.row[entry]])
            assert expected[token] == pytest.approx(told.chosen[entry], abs=NEAR_TIE)
            first, end = told.top_start[entry], told.top_start[entry + 1]
            likeliest = np.sort(expected)[::-1][: end - first]
            np.testing.assert_allclose(told.top[first:end], likeliest, atol=NEAR_TIE)
            ids = told.top_token[first:end]
            np.testing.assert_allclose(expected[ids], likeliest, atol=NEAR_TIE)

    def test_failed_row_has_no_log_probability(self, bench: Bench):
        """
        A row that fails alone has no entry, and the entries after it name the rows that are left.
        """
        asking = replace(GREEDY, logprobs=2)
        admits = [
            bench.admit(0, [1, 2], sampling=asking),
            bench.admit(1, [3, VOCAB_SIZE], sampling=asking),
            bench.admit(2, [4, 5], sampling=asking),
        ]
        result = bench.runner.execute(batch(*(Row(s, 0, 2) for s in range(3)), admits=admits), 1)
        assert [0, 2] == result.slot.tolist()
        assert [0, 1] == result.logprobs.row.tolist()
        assert [0, 2, 4] == result.logprobs.top_start.tolist()

    def test_nobody_asked(self, bench: Bench):
        """
        A step of rows that do not ask has no columns, also once others did.
        """
        admits = [
            bench.admit(0, [1, 2], sampling=replace(GREEDY, logprobs=2)),
            bench.admit(1, [3, 4]),
        ]
        bench.runner.execute(batch(Row(0, 0, 2), Row(1, 0, 2), admits=admits), 1)
        assert bench.runner.execute(batch(Row(1, 2)), 2).logprobs is None


class TestSlots:
    def build(self, admits: dict[int, SamplingParams]) -> tuple[SlotSampling, SlotTokens]:

        sampling = SlotSampling(8, 50, torch.device("cpu"))
        tokens = SlotTokens(8, 64, 50, torch.device("cpu"))
        for slot, how in admits.items():
            admit = admission(slot, range(10 + slot), [1], sampling=how)
            sampling.admit(admit)
            tokens.admit(admit)
        return sampling, tokens

    def test_rows_without_edits_have_none(self):
        """
        A step without a row with a penalty, a bias or a ban has nothing to apply.
        """
        sampling, tokens = self.build({0: PENALISED, 1: GREEDY, 2: replace(SEEDED, choice=1)})
        one = np.array([1], np.int32)
        assert sampling.edits(one, np.array([11], np.int32), tokens) is None
        both = sampling.edits(np.array([1, 2], np.int32), np.array([11, 12], np.int32), tokens)
        assert [1] == both.rows.tolist()

    def test_next_user_of_a_slot_starts_over(self):
        """
        A slot keeps nothing of its last request for the next one.
        """
        busy = replace(
            PENALISED, min_tokens=9, end_ids=(1, 2), logit_bias=((3, 1.0),), logprobs=4, min_p=0.5
        )
        sampling, tokens = self.build({0: busy})
        sampling.admit(admission(0, range(10), [1], sampling=GREEDY))
        slot, position = np.zeros(1, np.int32), np.array([10], np.int32)
        assert sampling.edits(slot, position, tokens) is None
        assert sampling.num_logprobs(slot) is None
        assert [0.0] == sampling.columns(slot, position).min_p.tolist()

    def test_lists_of_different_lengths_keep_to_their_rows(self):
        """
        Biases and bans reach the rows they belong to, whatever their number.
        """
        few = replace(GREEDY, logit_bias=((4, 1.5),))
        many = replace(few, logit_bias=((1, 1.0), (2, 2.0), (99, 3.0)), min_tokens=5, end_ids=(6,))
        sampling, tokens = self.build({3: few, 1: many, 5: GREEDY})
        slot, position = np.array([5, 3, 1], np.int32), np.array([15, 13, 11], np.int32)
        edits = sampling.edits(slot, position, tokens)

        edited = reference.edit(torch.zeros(3, 50), edits)
        assert [] == edited[0].nonzero().flatten().tolist()
        assert {4: 1.5} == {int(i): float(edited[1, i]) for i in edited[1].nonzero().flatten()}
        assert [1, 2, 6] == edited[2].nonzero().flatten().tolist()
        assert float("-inf") == edited[2, 6]
