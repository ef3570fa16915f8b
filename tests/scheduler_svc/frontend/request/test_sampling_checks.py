"""Penalties, cuts, biases and logprobs: ranges, defaults, the sentence and path of each error."""

import math
from pathlib import Path

import pytest

from scheduler_svc.frontend.request.requests import default_sampling
from scheduler_svc.frontend.request.validation import check_min_tokens, check_params
from tandem.errors import InvalidParameter
from tandem.inference.v1.inference_service_pb2 import GenerateRequest
from tandem.sampling_params import SamplingParams
from tests.scheduler_svc.frontend.fake_core import model

MODEL = model(Path("/nowhere"))

BAD = [
    ("repetition_penalty", 0.0, "repetition_penalty must be greater than zero, got 0.0."),
    ("repetition_penalty", -1.5, "repetition_penalty must be greater than zero, got -1.5."),
    ("repetition_penalty", math.nan, "repetition_penalty must be a finite number, got nan."),
    ("repetition_penalty", math.inf, "repetition_penalty must be a finite number, got inf."),
    ("frequency_penalty", 2.1, "frequency_penalty must be in [-2, 2], got 2.1."),
    ("frequency_penalty", math.nan, "frequency_penalty must be in [-2, 2], got nan."),
    ("presence_penalty", -2.5, "presence_penalty must be in [-2, 2], got -2.5."),
    ("presence_penalty", math.inf, "presence_penalty must be in [-2, 2], got inf."),
    ("min_p", -0.1, "min_p must be in [0, 1], got -0.1."),
    ("min_p", 1.5, "min_p must be in [0, 1], got 1.5."),
    ("min_p", math.nan, "min_p must be in [0, 1], got nan."),
]
GOOD = [
    ("repetition_penalty", 0.01),
    ("repetition_penalty", 1e6),
    ("frequency_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("presence_penalty", -2.0),
    ("presence_penalty", 2.0),
    ("min_p", 0.0),
    ("min_p", 1.0),
]


def check(**fields: object) -> SamplingParams:
    return check_params(GenerateRequest(**fields), MODEL, choose_seed=lambda: 77).sampling


def error_of(**fields: object) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        check(**fields)
    return caught.value


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_value_is_named(name, value, message):
    """
    A value out of range is refused with its path and a sentence that says what is allowed.
    """
    error = error_of(sampling={name: value})
    assert (f"sampling.{name}", message) == (error.field, error.message)


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_ends_of_ranges_are_inside(name, value):
    """
    Both ends of every range can be asked for.
    """
    assert value == pytest.approx(getattr(check(sampling={name: value}), name))


def test_everything_is_off_unless_asked_for():
    """
    A request that sets none of them runs without any, and the model's defaults say so.
    """
    params, told = check(), default_sampling(MODEL)
    assert (1.0, 0.0, 0.0, 0.0, (), 0, None) == (
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        params.min_p,
        params.logit_bias,
        params.min_tokens,
        params.logprobs,
    )
    assert (1.0, 0.0) == (told.repetition_penalty, told.frequency_penalty)


def test_model_recommends_what_is_unset():
    """
    The model's own repetition penalty and min_p apply where a request sets none.
    """
    defaults = SamplingParams(repetition_penalty=1.05, min_p=0.1)
    recommending = model(Path("/nowhere"), default_sampling=defaults)
    unset = check_params(GenerateRequest(), recommending, choose_seed=lambda: 0).sampling
    assert (1.05, 0.1) == (unset.repetition_penalty, unset.min_p)
    off = GenerateRequest(sampling={"repetition_penalty": 1.0, "min_p": 0.0})
    params = check_params(off, recommending, choose_seed=lambda: 0).sampling
    assert (1.0, 0.0) == (params.repetition_penalty, params.min_p)
    told = default_sampling(recommending)
    assert (1.05, 0.1) == pytest.approx((told.repetition_penalty, told.min_p))


class TestLogprobs:
    def test_zero_differs_from_unset(self):
        """
        A logprobs of 0 asks for the chosen token's log probability, unset asks for none.
        """
        assert 0 == check(response={"logprobs": 0}).logprobs
        assert check().logprobs is None

    def test_too_many_are_refused(self):
        """
        A request for 20 of the likeliest tokens is accepted, for 21 refused.
        """
        assert 20 == check(response={"logprobs": 20}).logprobs
        error = error_of(response={"logprobs": 21})
        assert "response.logprobs" == error.field
        assert "logprobs must be in [0, 20], got 21." == error.message


class TestLogitBias:
    def test_ids_outside_the_vocabulary_are_refused(self):
        """
        The lowest id outside the vocabulary is named.
        """
        error = error_of(sampling={"logit_bias": {600: 1.0, 3: 1.0, 512: 1.0}})
        assert "sampling.logit_bias[512]" == error.field
        assert "token id 512 is not in the vocabulary, which is 0 to 511." == error.message
        assert "sampling.logit_bias[-1]" == error_of(sampling={"logit_bias": {-1: 1.0}}).field

    @pytest.mark.parametrize("value", [100.5, -101.0, math.nan, math.inf])
    def test_values_out_of_range_are_refused(self, value):
        """
        A bias over 100 in either direction, or not a finite number, is refused.
        """
        error = error_of(sampling={"logit_bias": {3: value}})
        assert "sampling.logit_bias[3]" == error.field
        assert error.message.startswith("a logit bias must be in [-100, 100], got ")

    def test_too_many_ids_are_refused(self):
        """
        A request with 1,024 biased ids is accepted, with one more refused.
        """
        wide = model(Path("/nowhere"), vocab_size=2000)
        bias = dict.fromkeys(range(1025), 1.0)
        request = GenerateRequest(sampling={"logit_bias": bias})
        with pytest.raises(InvalidParameter, match="at most 1024 ids, got 1025"):
            check_params(request, wide, choose_seed=lambda: 0)
        del request.sampling.logit_bias[7]
        taken = check_params(request, wide, choose_seed=lambda: 0).sampling
        assert 1024 == len(taken.logit_bias)


class TestMinTokens:
    def test_more_than_max_tokens_is_refused(self):
        """
        A min_tokens over max_tokens is refused.
        """
        check_min_tokens(5, 5)
        with pytest.raises(InvalidParameter) as caught:
            check_min_tokens(6, 5)
        assert "stopping.min_tokens" == caught.value.field
        text = "min_tokens must be less than or equal to max_tokens=5, got 6."
        assert text == caught.value.message
