"""Ranges of generation parameters and their texts."""

from __future__ import annotations

import math

import pytest

from tandem.errors import ERROR_BY_REASON
from tandem_embedded import (
    ConfigError,
    EngineError,
    EngineMemoryError,
    ExecutionError,
    GenerationParams,
    SchedulerError,
    ValidationError,
)
from tandem_embedded.errors import engine_error
from tests.clients.embedded.fake_backend import engine_and_runner

REFUSED = [
    ({"max_tokens": 2.5}, "max_tokens must be a whole number, got 2.5."),
    ({"max_tokens": True}, "max_tokens must be a whole number, got True."),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'."),
    ({"seed": 1.0}, "seed must be a whole number, got 1.0."),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ({"temperature": -0.1}, "temperature must be non-negative, got -0.1."),
    ({"temperature": 2.001}, "temperature must be in [0, 2], got 2.001."),
    ({"temperature": math.nan}, "temperature must be a finite number, got nan."),
    ({"temperature": math.inf}, "temperature must be a finite number, got inf."),
    ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0."),
    ({"top_p": 1.1}, "top_p must be in (0, 1], got 1.1."),
    ({"top_p": math.nan}, "top_p must be in (0, 1], got nan."),
    ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2."),
    ({"seed": -1}, "seed must be in [0, 2**64), got -1."),
    ({"seed": 2**64}, f"seed must be in [0, 2**64), got {2**64}."),
    (
        {"repetition_penalty": 0.0},
        "repetition_penalty must be greater than zero, got 0.0.",
    ),
    (
        {"repetition_penalty": math.inf},
        "repetition_penalty must be a finite number, got inf.",
    ),
    ({"frequency_penalty": 2.5}, "frequency_penalty must be in [-2, 2], got 2.5."),
    ({"presence_penalty": -2.5}, "presence_penalty must be in [-2, 2], got -2.5."),
    ({"min_p": 1.01}, "min_p must be in [0, 1], got 1.01."),
    ({"min_p": "some"}, "min_p must be a number, got 'some'."),
    ({"allowed_token_ids": "ab"}, "allowed_token_ids must be a tuple of whole numbers, got ab."),
    ({"min_tokens": -1}, "min_tokens must be non-negative, got -1."),
    (
        {"min_tokens": 101},
        "min_tokens must be less than or equal to max_tokens=100, got 101.",
    ),
    ({"logit_bias": {"a": 1.0}}, "logit_bias must map ids to numbers, got 'a': 1.0."),
    ({"logit_bias": {3: "b"}}, "logit_bias must map ids to numbers, got 3: 'b'."),
    ({"logit_bias": {3: 101.0}}, "logit_bias must be in [-100, 100], got {3: 101.0}."),
    (
        {"logit_bias": {10**6: 1.0}},
        "token id 1000000 is not in the vocabulary, which is 0 to 357.",
    ),
    (
        {"stop_token_ids": (2, 10**30)},
        f"token id {10**30} is not in the vocabulary, which is 0 to 357.",
    ),
    ({"stop_token_ids": (2.5,)}, "stop_token_ids must be a tuple of whole numbers, got (2.5,)."),
    ({"logprobs": 21}, "logprobs must be in [0, 20], got 21."),
    ({"logprobs": 1.0}, "logprobs must be a whole number, got 1.0."),
    ({"stop": ("",)}, "stop cannot contain an empty string."),
    ({"stop": "ab"}, "stop must be a tuple of strings, got ab."),
    ({"stop": None}, "stop must be a tuple of strings, got None."),
    ({"stop": ("a",) * 17}, f"stop must have at most 16 strings, got {('a',) * 17}."),
    ({"n": 0}, "n must be in [1, 16], got 0."),
    ({"n": 17}, "n must be in [1, 16], got 17."),
    ({"n": 2, "temperature": 0.0}, "n must be 1 when using greedy sampling, got 2."),
    ({"priority": 2**31}, f"priority must be an int32, got {2**31}."),
    ({"tenant": 3}, "tenant must be a string, got 3."),
    ({"cache_salt": "x" * 257}, f"cache_salt must have at most 256 bytes, got {'x' * 257}."),
]
ACCEPTED = [
    {"temperature": 0.0}, {"temperature": 2.0}, {"top_p": 1.0}, {"top_p": 1e-6}, {"top_k": 0},
    {"top_k": -1}, {"top_k": 10**6}, {"max_tokens": 1}, {"seed": 0}, {"seed": 2**64 - 1},
    {"repetition_penalty": 1e-3}, {"frequency_penalty": -2.0}, {"presence_penalty": 2.0},
    {"min_p": 0.0}, {"min_p": 1}, {"min_tokens": 100}, {"logprobs": 0}, {"logprobs": 20},
]  # fmt: skip


class TestGenerationParams:
    @pytest.mark.parametrize(("values", "text"), REFUSED, ids=lambda value: str(value)[:30])
    def test_a_value_out_of_range_is_refused_at_submission(self, values, text):
        """
        A parameter out of its range is refused with its exact text and name, and nothing is kept.
        """
        engine, _ = engine_and_runner()
        with pytest.raises(ValidationError) as caught:
            engine.submit_request("abc", GenerationParams(**values))
        assert text == caught.value.message
        assert next(iter(values)) == caught.value.field.partition("[")[0]
        assert not engine.has_pending_work()

    @pytest.mark.parametrize("values", ACCEPTED, ids=str)
    def test_the_bounds_are_accepted(self, values):
        """
        Both ends of every range are valid.
        """
        GenerationParams(**values).validate()

    def test_defaults_are_the_documented_ones(self):
        """
        The defaults are 100 tokens at temperature 1.0 and top_p 0.9, everything else off.
        """
        engine, _ = engine_and_runner()
        found = engine.get_request(engine.submit_request("abc")).params
        assert (100, 1.0, 0.9, 0, 1.0, 0.0, None) == (
            found.max_tokens,
            found.temperature,
            found.top_p,
            found.top_k,
            found.repetition_penalty,
            found.min_p,
            found.seed,
        )

    @pytest.mark.parametrize(
        ("given", "applied"), [(0.0, 0.0), (0.001, 0.01), (0.01, 0.01), (0.7, 0.7)]
    )
    def test_tiny_temperatures_are_raised(self, given, applied):
        """
        Temperatures in (0, 0.01) count as 0.01; 0 stays greedy.
        """
        assert applied == GenerationParams(temperature=given).row_sampling(0, ()).temperature


class TestEngineErrors:
    def test_each_kind_prints_its_prefix(self):
        """
        The five kinds print as Config, Memory, Validation, Execution and Scheduler error.
        """
        kinds = (ConfigError, EngineMemoryError, ValidationError, ExecutionError, SchedulerError)
        assert [
            "Config error: x", "Memory error: x", "Validation error: x", "Execution error: x",
            "Scheduler error: x",
        ] == [str(kind("x")) for kind in kinds]  # fmt: skip

    def test_every_reason_has_a_kind(self):
        """
        Every error of the table becomes one of the five kinds and keeps reason, text and advice.
        """
        for reason, error in ERROR_BY_REASON.items():
            found = engine_error(error("what to do", field="f", retry_after_s=2.0))
            assert isinstance(found, EngineError)
            assert type(found) is not EngineError
            assert (reason, "what to do", "f", 2.0) == (
                found.reason,
                found.message,
                found.field,
                found.retry_after_s,
            )
