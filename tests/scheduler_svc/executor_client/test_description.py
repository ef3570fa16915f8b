"""Checks of the description that an executor gives of itself."""

import pytest

from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.executor_client.description import read_description
from tandem.engine_config import EngineConfig
from tandem.errors import IncompatibleExecutor
from tandem.executor.v1.executor_service_pb2 import DescribeResponse, GenerationDefaults
from tandem.link import PROTOCOL_VERSION


def described(**defaults: float) -> DescribeResponse:
    return DescribeResponse(
        protocol_version=PROTOCOL_VERSION,
        boot_id="boot",
        model_fingerprint="model",
        vocab_size=100,
        max_model_len=64,
        block_size=4,
        num_blocks=16,
        num_slots=4,
        max_batch_size=4,
        max_total_tokens=16,
        max_inflight_steps=4,
        generation_defaults=GenerationDefaults(**defaults),
    )


@pytest.mark.parametrize(
    ("defaults", "repetition_penalty", "min_p"),
    [
        ({}, 1.0, 0.0),
        ({"repetition_penalty": 1.25, "min_p": 0.5}, 1.25, 0.5),
    ],
    ids=["silent", "recommended"],
)
def test_recommended_penalties_reach_frontends(defaults, repetition_penalty, min_p):
    """
    Defaults that the model's author recommends are told to frontends; those left unset are off.
    """
    model = read_description(described(**defaults)).model(
        "", EngineConfig(max_model_len=64), CoreOptions()
    )
    defaults = model.default_sampling
    assert (repetition_penalty, min_p) == (defaults.repetition_penalty, defaults.min_p)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol_version": 1}, "speaks step protocol 1"),
        ({"block_size": 0}, "describes itself with block_size 0"),
        ({"boot_id": ""}, "without boot or model identity"),
        ({"model_fingerprint": ""}, "without boot or model identity"),
        ({"eos_token_ids": b"\1\0\0\0\2"}, "eos_token_ids that are not whole int32 tokens"),
        ({"num_stages": 0}, "with num_stages 0, which is not from 1 to 64"),
        ({"num_stages": 65}, "with num_stages 65, which is not from 1 to 64"),
    ],
    ids=["protocol", "geometry", "boot", "model", "eos", "no_stage", "stages"],
)
def test_description_that_cannot_be_is_refused(changes, words):
    """
    An executor with an impossible description is refused by a typed error that names the mistake.
    """
    answer = described()
    for name, value in changes.items():
        setattr(answer, name, value)
    with pytest.raises(IncompatibleExecutor, match=words):
        read_description(answer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 5.0),
        ("temperature", float("nan")),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("repetition_penalty", 0.0),
        ("min_p", 2.0),
    ],
)
def test_recommendation_that_no_request_may_ask_for_is_refused(name, value):
    """
    An executor is refused if its model recommends defaults that the step link would refuse.
    """
    with pytest.raises(IncompatibleExecutor, match=f"a default {name} of {value:g}, which must"):
        read_description(described(**{name: value}))


@pytest.mark.parametrize(("told", "num_stages"), [(None, 1), (1, 1), (4, 4)])
def test_stages_are_told(told, num_stages):
    """
    The core learns the number of pipeline stages; an executor that is silent about it has one.
    """
    answer = described()
    if told is not None:
        answer.num_stages = told
    assert num_stages == read_description(answer).geometry.num_stages
