"""
Every field that a client can send: its range, its default, the sentence and path of its error.
"""

import math
from pathlib import Path

import pytest

from scheduler_svc.frontend.request.validation import (
    check_params,
    check_prompt_shape,
    check_token_ids,
)
from tandem.errors import EmptyPrompt, InvalidParameter
from tandem.inference.v1.inference_service_pb2 import GenerateRequest
from tests.scheduler_svc.frontend.fake_core import model

MODEL = model(Path("/nowhere"))

BAD_PARAMS = [
    ({"request_id": ""}, "request_id", "request_id must have 1 to 128 characters, got 0."),
    ({"request_id": "x" * 129}, "request_id", "request_id must have 1 to 128 characters, got 129."),
    (
        {"time_limit_s": 0},
        "time_limit_s",
        "time_limit_s must be a finite number of at least 0.001, got 0.",
    ),
    ({"n": 0}, "n", "n must be in [1, 16], got 0."),
    ({"n": 17}, "n", "n must be in [1, 16], got 17."),
    (
        {"n": 2, "sampling": {"temperature": 0.0}},
        "n",
        "n must be 1 when using greedy sampling, got 2.",
    ),
    ({"tenant": "x" * 129}, "tenant", "tenant must have at most 128 characters, got 129."),
    (
        {"tenant": "a\x1b[2J"},
        "tenant",
        r"tenant must have printable characters only, got '\x1b' at 1.",
    ),
    (
        {"request_id": "a\nb"},
        "request_id",
        r"request_id must have printable characters only, got '\n' at 1.",
    ),
    (
        {"request_id": "\u202e"},
        "request_id",
        r"request_id must have printable characters only, got '\u202e' at 0.",
    ),
    (
        {"attempt_key": ""},
        "attempt_key",
        "attempt_key must have 1 to 128 characters, got 0.",
    ),
    (
        {"attempt_key": "\x00"},
        "attempt_key",
        r"attempt_key must have printable characters only, got '\x00' at 0.",
    ),
    ({"cache_salt": "é" * 129}, "cache_salt", "cache_salt must have at most 256 bytes, got 258."),
    (
        {"sampling": {"temperature": math.nan}},
        "sampling.temperature",
        "temperature must be a finite number, got nan.",
    ),
    (
        {"sampling": {"temperature": math.inf}},
        "sampling.temperature",
        "temperature must be a finite number, got inf.",
    ),
    (
        {"sampling": {"temperature": -0.5}},
        "sampling.temperature",
        "temperature must be non-negative, got -0.5.",
    ),
    (
        {"sampling": {"temperature": 2.001}},
        "sampling.temperature",
        "temperature must be in [0, 2], got 2.001.",
    ),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p", "top_p must be in (0, 1], got 0.0."),
    ({"sampling": {"top_p": -0.1}}, "sampling.top_p", "top_p must be in (0, 1], got -0.1."),
    ({"sampling": {"top_p": 1.01}}, "sampling.top_p", "top_p must be in (0, 1], got 1.01."),
    ({"sampling": {"top_p": math.nan}}, "sampling.top_p", "top_p must be in (0, 1], got nan."),
    (
        {"sampling": {"top_k": -2}},
        "sampling.top_k",
        "top_k must be 0 (disable), or at least 1, got -2.",
    ),
    (
        {"stopping": {"max_tokens": 0}},
        "stopping.max_tokens",
        "max_tokens must be at least 1, got 0.",
    ),
    ({"stopping": {"stop": ["a", ""]}}, "stopping.stop[1]", "stop cannot contain an empty string."),
    (
        {"stopping": {"stop": ["x"] * 17}},
        "stopping.stop",
        "stop must have at most 16 strings, got 17.",
    ),
    (
        {"stopping": {"stop": ["é" * 513]}},
        "stopping.stop[0]",
        "a stop string must have at most 1024 bytes, got 1026.",
    ),
    (
        {"stopping": {"stop_token_ids": [1] * 65}},
        "stopping.stop_token_ids",
        "stop_token_ids must have at most 64 ids, got 65.",
    ),
    (
        {"stopping": {"stop_token_ids": [3, 512]}},
        "stopping.stop_token_ids[1]",
        "token id 512 is not in the vocabulary, which is 0 to 511.",
    ),
    (
        {"stopping": {"stop_token_ids": [-1]}},
        "stopping.stop_token_ids[0]",
        "token id -1 is not in the vocabulary, which is 0 to 511.",
    ),
]

GOOD_PARAMS = [
    {"request_id": "x" * 128},
    {"request_id": "größe 1", "tenant": "team a"},
    {"attempt_key": "x" * 128},
    {"time_limit_s": 0.001},
    {"sampling": {"temperature": 2.0, "top_p": 1.0, "top_k": 1, "seed": 2**64 - 1}},
    {"stopping": {"max_tokens": 1, "stop": ["y" * 1024] * 16, "stop_token_ids": [511] * 64}},
]


def checked(**fields: object):
    return check_params(GenerateRequest(**fields), MODEL, choose_seed=lambda: 77)


class TestCheckParams:
    @pytest.mark.parametrize(("fields", "path", "sentence"), BAD_PARAMS)
    def test_value_out_of_range_is_named(self, fields, path, sentence):
        """
        A value out of range is InvalidParameter with the field's path and a sentence.
        """
        with pytest.raises(InvalidParameter) as caught:
            checked(**fields)
        assert (path, sentence) == (caught.value.field, caught.value.message)

    @pytest.mark.parametrize("fields", GOOD_PARAMS)
    def test_value_at_its_limit_is_taken(self, fields):
        """
        The ends of every range are accepted.
        """
        checked(**fields)

    def test_unset_takes_the_models_default(self):
        """
        A parameter that was not sent comes from the model, a seed from the server.
        """
        params = checked()
        assert (0.75, 20, 0.5, 77) == (
            params.sampling.temperature,
            params.sampling.top_k,
            params.sampling.top_p,
            params.sampling.seed,
        )
        assert (None, (), (), (1,), None) == (
            params.max_tokens,
            params.stop,
            params.stop_token_ids,
            params.eos_token_ids,
            params.time_limit_s,
        )

    def test_zero_differs_from_unset(self):
        """
        Temperature 0, top_k 0 and seed 0 are values, not absences.
        """
        params = checked(sampling={"temperature": 0.0, "top_k": 0, "seed": 0}).sampling
        assert (0.0, 0, 0) == (params.temperature, params.top_k, params.seed)

    def test_minus_one_turns_top_k_off(self):
        """
        A top_k of -1 means the same as 0.
        """
        assert 0 == checked(sampling={"top_k": -1}).sampling.top_k

    @pytest.mark.parametrize(("sent", "used"), [(0.001, 0.01), (0.01, 0.01), (0.02, 0.02)])
    def test_tiny_temperature_is_raised(self, sent, used):
        """
        A temperature in (0, 0.01) becomes 0.01.
        """
        assert pytest.approx(used) == checked(sampling={"temperature": sent}).sampling.temperature

    def test_ignore_eos_leaves_no_eos_token(self):
        """
        A request with ignore_eos has no token that ends its output as EOS.
        """
        assert () == checked(stopping={"ignore_eos": True}).eos_token_ids


class TestCheckPrompt:
    @pytest.mark.parametrize(
        ("fields", "path", "sentence"),
        [
            ({}, "prompt", "a prompt is needed: set text, token_ids or chat."),
            ({"text": ""}, "text", "text must not be empty."),
            ({"token_ids": {}}, "token_ids.ids", "token_ids must have at least one id."),
        ],
    )
    def test_nothing_to_continue_is_refused(self, fields, path, sentence):
        """
        A prompt without content is EmptyPrompt.
        """
        with pytest.raises(EmptyPrompt) as caught:
            check_prompt_shape(GenerateRequest(**fields))
        assert (path, sentence) == (caught.value.field, caught.value.message)

    def test_first_id_outside_the_vocabulary_is_named(self):
        """
        The first of several bad ids is named by its place.
        """
        with pytest.raises(
            InvalidParameter, match="token id 600 is not in the vocabulary"
        ) as caught:
            check_token_ids([0, 511, 600, -5], 512, field="token_ids.ids")
        assert "token_ids.ids[2]" == caught.value.field
