"""Parameters of a request: sampling params, and the conditions that end its output."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, SupportsIndex, get_args, get_type_hints

from scheduler_svc.core.admission import MAX_PRIORITY, MIN_PRIORITY
from scheduler_svc.frontend.request.response import MAX_LOGPROB_IDS
from scheduler_svc.frontend.request.sampling import check_logit_bias, row_params
from scheduler_svc.frontend.request.validation import (
    MAX_CACHE_SALT_BYTES,
    MAX_CHOICES,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    check_allowed_ids,
    check_token_ids,
)
from tandem.sampling_params import (
    MAX_BIAS,
    MODEL_DEFAULT_PARAMS,
    SamplingParams,
    broken_range,
)
from tandem_embedded.errors import ValidationError, engine_errors

SamplingDefaults = SamplingParams
"""Sampling defaults of requests; a model's author may recommend others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Facts for checking parameters: ids are in [0, size), the ids that end output, defaults."""

    size: int
    eos_token_ids: tuple[int, ...] = ()
    defaults: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """
    Parameters of one request. A sampling parameter that is None takes the value that the model's
    generation_config.json recommends, or else the default given here.

    Attributes:
        max_tokens: Largest number of output tokens, at least 1; None = 100 after a prompt and the
            rest of the context after a chat, never more than that rest.
        temperature: 0 to 2; 0 always takes the most likely token, (0, 0.01) counts as 0.01.
            Default 1.
        top_p: Share of probability to draw from, in (0, 1]; 1 is off. Default 0.9.
        top_k: Number of likeliest tokens to draw from; 0 and -1 are off. Default off.
        seed: Key of the noise, a uint64; None lets the engine choose one.
        stop_token_ids: Ids that end the output, besides the model's end-of-sequence ids.
        include_stop: True: the stop string, or the text of the token, that ended the output stays
            in it.
        ignore_eos: True: end-of-sequence tokens do not end the output.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or
            output; above 0, 1 is off. Default off.
        frequency_penalty: Subtracted from a token's logit for each time it is in the output, -2 to
            2. Default 0.
        presence_penalty: Subtracted once from a token's logit if it is in the output, -2 to 2.
            Default 0.
        min_p: Draws only tokens at least this many times as likely as the likeliest, 0 to 1; 0 is
            off. Default off.
        min_tokens: Number of output tokens before which nothing ends the output, 0 to max_tokens.
        logit_bias: Values added to the logits of these ids, -100 to 100 each.
        allowed_token_ids: Only these ids are drawn, at most 1,024; () = all.
        logprobs: Number of likeliest tokens, 0 to 20, that are returned with each token's log
            probability; None = no log probabilities.
        logprob_token_ids: Ids, at most 64, whose log probabilities follow those of the likeliest
            tokens, in this order; they need `logprobs`.
        prompt_logprobs: The same for each token of the prompt but the first.
        stop: Stop strings, at most 16: the output ends before the first one that is complete. They
            need a tokenizer.
        n: Number of completions of the prompt, 1 to 16; more than one cannot be greedy.
        priority: Priority of the request; a lower value is admitted first.
        tenant: Tenant that the request counts for in `CoreOptions.max_tenant_requests`; "" = none.
        cache_salt: Salt of the prefix cache; only requests with the same salt share KV.
        metadata: Numbers for the engine's logits hook, by the labels of its request_metadata_types.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    metadata: Mapping[str, float] = field(default_factory=dict, hash=False)

    def validate(self) -> None:
        """
        Check the types and ranges of all parameters that are set.

        Raises:
            ValidationError: A parameter is wrong; the message names the first one.
        """
        self._check_numbers()
        self._check_texts_and_ids()
        for name, _ in _number_kinds():
            value = getattr(self, name)
            broken = None if value is None else broken_range(name, value)
            if broken is not None:
                raise self._refusal(name, broken)
        for holds, name, rule in self._rules():
            if not holds:
                raise self._refusal(name, rule)
        self._check_stop()

    def resolved(self, defaults: SamplingParams, max_tokens: int) -> GenerationParams:
        """
        Return the parameters in force: those that are None and have a default are filled in.

        Args:
            defaults: Values of sampling parameters that are not set.
            max_tokens: Value of max_tokens if it is not set.

        Raises:
            ValidationError: Two of the parameters in force exclude each other.
        """
        found = replace(
            self,
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            **{
                name: getattr(defaults if getattr(self, name) is None else self, name)
                for name in MODEL_DEFAULT_PARAMS
            },
        )
        if self.min_tokens > (found.max_tokens or 0):
            rule = f"must be less than or equal to max_tokens={found.max_tokens}"
            raise self._refusal("min_tokens", rule)
        if self.n > 1 and found.temperature == 0:
            raise self._refusal("n", "must be 1 when using greedy sampling")
        return found

    def check_ids(self, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        """
        Check that biased, allowed and stop ids are in the vocabulary, and that one is left to draw.

        Raises:
            ValidationError: One is not, or none is left; the message names it.
        """
        ends = (*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids))
        with engine_errors():
            check_logit_bias(self.logit_bias, vocab_size, field="logit_bias")
            check_allowed_ids(
                self.allowed_token_ids,
                vocab_size,
                banned_ids=ends if self.min_tokens else (),
                field="allowed_token_ids",
            )
            check_token_ids(self.logprob_token_ids, vocab_size, field="logprob_token_ids")
            check_token_ids(self.stop_token_ids, vocab_size, field="stop_token_ids")

    def _rules(self) -> tuple[tuple[bool, str, str], ...]:
        """Return the rules, each with its outcome, the parameter's name, and the text on it."""
        biases = self.logit_bias.values()
        least = 1 if self.prompt_logprobs is None or self.n > 1 else 0
        return (
            (
                self.max_tokens is None or self.max_tokens >= least,
                "max_tokens",
                "must be at least 1",
            ),
            (1 <= self.n <= MAX_CHOICES, "n", f"must be in [1, {MAX_CHOICES}]"),
            (
                len(self.logprob_token_ids) <= MAX_LOGPROB_IDS
                and (self.logprobs is not None or not self.logprob_token_ids),
                "logprob_token_ids",
                f"must have at most {MAX_LOGPROB_IDS} ids, and needs logprobs",
            ),
            (MIN_PRIORITY <= self.priority <= MAX_PRIORITY, "priority", "must be an int32"),
            (
                len(self.cache_salt.encode()) <= MAX_CACHE_SALT_BYTES,
                "cache_salt",
                f"must have at most {MAX_CACHE_SALT_BYTES} bytes",
            ),
            (
                all(-MAX_BIAS <= bias <= MAX_BIAS for bias in biases),
                "logit_bias",
                f"must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}]",
            ),
        )

    def _check_stop(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise self._refusal("stop", f"must have at most {MAX_STOP_STRINGS} strings")
        for stop in self.stop:
            if not stop:
                message = "stop cannot contain an empty string."
                raise ValidationError(message, reason="INVALID_PARAMETER", field="stop")
            if len(stop.encode()) > MAX_STOP_STRING_BYTES:
                rule = f"must have strings of at most {MAX_STOP_STRING_BYTES} bytes each"
                raise self._refusal("stop", rule)

    def _refusal(self, name: str, rule: str) -> ValidationError:
        message = f"{name} {rule}, got {getattr(self, name)}."
        return ValidationError(message, reason="INVALID_PARAMETER", field=name)

    def _check_numbers(self) -> None:
        for name, kinds in _number_kinds():
            value = getattr(self, name)
            if value is None and NoneType in kinds:
                continue
            if isinstance(value, bool) or value is None or not isinstance(value, kinds):
                what = "a number" if float in kinds else "a whole number"
                message = f"{name} must be {what}, got {value!r}."
                raise ValidationError(message, reason="INVALID_PARAMETER", field=name)

    def _check_texts_and_ids(self) -> None:
        for name in ("tenant", "cache_salt"):
            if not isinstance(getattr(self, name), str):
                raise self._refusal(name, "must be a string")
        stop: Any = self.stop
        if not isinstance(stop, tuple | list) or not all(isinstance(one, str) for one in stop):
            raise self._refusal("stop", "must be a tuple of strings")
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            if not _are_ids(getattr(self, name)):
                raise self._refusal(name, "must be a tuple of whole numbers")
        biases: Mapping[Any, Any] = self.logit_bias
        for token_id, bias in biases.items():
            if not (isinstance(token_id, int) and isinstance(bias, (int, float))):
                message = f"logit_bias must map ids to numbers, got {token_id!r}: {bias!r}."
                raise ValidationError(message, reason="INVALID_PARAMETER", field="logit_bias")

    def row_sampling(self, seed: int, end_ids: Collection[int]) -> SamplingParams:
        """
        Return the sampling params of a row for the executor, from resolved parameters.

        Args:
            seed: Key of the noise.
            end_ids: All ids that end the output.
        """
        names = [param.name for param in fields(SamplingParams) if hasattr(self, param.name)]
        given = {name: getattr(self, name) for name in names} | {"seed": seed}
        return row_params(given, SamplingParams(), end_ids)


def _are_ids(value: Any) -> bool:
    is_list = isinstance(value, tuple | list)
    return is_list and all(isinstance(one, SupportsIndex) for one in value)


@cache
def _number_kinds() -> tuple[tuple[str, tuple[type, ...]], ...]:
    """Return the parameters that are one number, each with the types of values that it takes."""
    found = []
    for name, hint in get_type_hints(GenerationParams).items():
        kinds = set(get_args(hint)) if isinstance(hint, UnionType) else {hint}
        if float in kinds:
            kinds.add(int)
        if kinds <= {int, float, NoneType}:
            found.append((name, tuple(kinds)))
    return tuple(found)
