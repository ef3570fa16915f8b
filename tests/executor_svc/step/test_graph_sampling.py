"""Every sampling parameter is read by captured graphs, or keeps its rows out of their drawing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.slots.sampling import SlotSampling
from executor_svc.step.static_step import DecodeStep, Drawing
from tandem.sampling_params import SamplingParams
from tests.executor_svc.step.test_mixed_graphs import SHAPES, Twins
from tests.executor_svc.step.test_static_step import NOISY
from tests.executor_svc.stepping import Row, admission

Zoo = Callable[[str], Path]

OF_PROMPTS = {"prompt_logprobs"}
"""Parameters of prompts alone, which decide nothing about a draw."""
READ_BY_GRAPHS = {"temperature", "top_k", "top_p", "seed", "choice", "min_p"}
"""Parameters that graphs read; a new one is not among them until the graphs' kernels know it."""

AWAY_FROM_DEFAULT = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.5},
    "seed": {"seed": 11},
    "choice": {"choice": 1},
    "min_p": {"min_p": 0.125},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.75},
    "presence_penalty": {"presence_penalty": -0.5},
    "min_tokens": {"min_tokens": 4, "end_ids": (2,)},
    "end_ids": {"min_tokens": 4, "end_ids": (2, 3)},
    "logit_bias": {"logit_bias": ((3, -2.0),)},
    "logprob_token_ids": {"logprobs": 0, "logprob_token_ids": (3, 5)},
    "allowed_token_ids": {"allowed_token_ids": (3, 5)},
    "logprobs": {"logprobs": 0},
    "row_metadata": {"row_metadata": (("steer", 1.0),)},
}
"""Each parameter with a value that nothing has by default, and what else it needs to count."""


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> list[Drawing]:
    """Return the ways of drawing of all decode steps from now on."""
    seen: list[Drawing] = []
    run = DecodeStep.run

    def noted(step: DecodeStep, num_rows: int, drawing: Drawing) -> None:
        seen.append(drawing)
        run(step, num_rows, drawing)

    monkeypatch.setattr(DecodeStep, "run", noted)
    return seen


def test_every_parameter_is_tried():
    """
    A new parameter fails here until it has a value above.
    """
    assert {param.name for param in fields(SamplingParams)} == set(AWAY_FROM_DEFAULT) | OF_PROMPTS


@pytest.mark.parametrize("name", AWAY_FROM_DEFAULT)
def test_graphs_draw_with_the_parameters_they_read_alone(zoo: Zoo, drawings, name):
    """
    A step with a prompt and a decode step decide alike, and a row with the parameter gets the
    tokens of eager steps from both.
    """
    twins = Twins(zoo("llama_mha"), shapes=SHAPES[3:4])
    sampling = replace(NOISY, **AWAY_FROM_DEFAULT[name])
    in_graphs = name in READ_BY_GRAPHS
    assert (12 if in_graphs else 0) == twins.run(Row(0, 0, 5), admits=[twins.admit(0, 5, sampling)])
    drawings.clear()
    twins.run(Row(0, 5))
    assert in_graphs == (Drawing.OUTSIDE not in drawings)
    assert drawings


def test_a_scored_prompt_is_eager_and_its_decodes_are_not(zoo: Zoo, drawings):
    """
    No graph scores prompt tokens, so that the chunk that is asked for them runs eagerly, and graphs
    draw what follows.
    """
    twins = Twins(zoo("llama_mha"), shapes=SHAPES[3:4])
    sampling = replace(NOISY, prompt_logprobs=0)
    assert 0 == twins.run(Row(0, 0, 5), admits=[twins.admit(0, 5, sampling)])
    drawings.clear()
    twins.run(Row(0, 5))
    assert Drawing.OUTSIDE not in drawings
    assert drawings


def test_a_slot_returns_to_graphs():
    """
    Graphs draw for a slot once its end ids are allowed, and for the next request that it holds.
    """
    sampling = SlotSampling(2, 50, torch.device("cpu"))
    slot, first, later = (np.array([value], np.int32) for value in (1, 8, 12))
    ending = replace(NOISY, min_tokens=4, end_ids=(2,))
    sampling.admit(admission(1, range(8), [1], sampling=ending))
    assert not sampling.drawn_by_graphs(slot, first, margin_eps=None)
    assert sampling.drawn_by_graphs(slot, later, margin_eps=None)
    assert not sampling.drawn_by_graphs(slot, later, margin_eps=0.1)
    sampling.admit(admission(1, range(8), [1], sampling=replace(NOISY, logprobs=0)))
    assert not sampling.drawn_by_graphs(slot, later, margin_eps=None)
    sampling.admit(admission(1, range(8), [1], sampling=NOISY))
    assert sampling.drawn_by_graphs(slot, first, margin_eps=None)
