"""Every sampling parameter changes what an executor answers: none is carried there and ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from executor_svc.slots.logits_hook import LogitsHook
from executor_svc.slots.metadata import MetadataType
from tandem.sampling_params import SamplingParams
from tests.executor_svc.stepping import GREEDY, Bench, Row, admission, batch, random_tokens

Zoo = Callable[[str], Path]

NUM_TOKENS = 12
PROMPT = random_tokens(9, seed=4)
NOISY = replace(GREEDY, temperature=1.0, top_p=1.0, seed=5)

EFFECTS = {
    "temperature": (NOISY, {"temperature": 0.0}),
    "top_k": (NOISY, {"top_k": 1}),
    "top_p": (NOISY, {"top_p": 0.001}),
    "seed": (NOISY, {"seed": 6}),
    "choice": (NOISY, {"choice": 1}),
    "min_p": (NOISY, {"min_p": 1.0}),
    "repetition_penalty": (GREEDY, {"repetition_penalty": 50.0}),
    "frequency_penalty": (GREEDY, {"frequency_penalty": 2.0}),
    "presence_penalty": (GREEDY, {"presence_penalty": 2.0}),
    "min_tokens": (replace(NOISY, end_ids=tuple(range(200))), {"min_tokens": NUM_TOKENS}),
    "end_ids": (replace(NOISY, min_tokens=NUM_TOKENS), {"end_ids": tuple(range(200))}),
    "logit_bias": (GREEDY, {"logit_bias": ((7, 100.0),)}),
    "logprob_token_ids": (replace(GREEDY, logprobs=0), {"logprob_token_ids": (7, 9)}),
    "allowed_token_ids": (GREEDY, {"allowed_token_ids": (7, 9)}),
    "logprobs": (GREEDY, {"logprobs": 2}),
    "prompt_logprobs": (GREEDY, {"prompt_logprobs": 2}),
    "row_metadata": (GREEDY, {"row_metadata": (("of_seven", 100.0),)}),
}
"""Each parameter with params and a change of it alone; the change must be told by the answer."""


def favour_seven(logits, rows):
    """Add a row's metadata to its logit of token 7."""
    logits[:, 7] += rows["of_seven"]


HOOK = LogitsHook(call=favour_seven, types=(MetadataType("of_seven", "float32", on_gpu=True),))


def answers(zoo: Zoo, sampling: SamplingParams) -> list[object]:
    """Return a request's tokens, each with the number of likeliest ids that are told with it."""
    bench = Bench.build(zoo("llama_gqa_llama3_rope"), hook=HOOK)
    blocks = bench.take_blocks(len(PROMPT) + NUM_TOKENS)
    admit = admission(0, PROMPT, blocks, sampling=sampling)
    step, found = batch(Row(0, 0, len(PROMPT)), admits=[admit]), []
    for number in range(NUM_TOKENS):
        result = bench.runner.execute(step, 1 + number)
        told, of_prompt = result.logprobs, result.prompt_logprobs
        found.append((int(result.token[0]), None if told is None else len(told.top)))
        found.append(None if of_prompt is None else len(of_prompt.columns.top))
        step = batch(Row(0, len(PROMPT) + number))
    return found


def test_every_parameter_has_an_effect_to_show():
    """
    A new parameter fails here until it is among the effects.
    """
    assert {param.name for param in fields(SamplingParams)} == set(EFFECTS)


@pytest.mark.parametrize("name", EFFECTS)
def test_a_change_of_one_parameter_changes_the_answer(zoo: Zoo, name: str):
    """
    A request is answered otherwise when this parameter alone is another, and alike when nothing is.
    """
    params, change = EFFECTS[name]
    plain = answers(zoo, params)
    assert plain == answers(zoo, params)
    assert plain != answers(zoo, replace(params, **change))
