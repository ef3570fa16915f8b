"""How a request draws its tokens and where it ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.link.batch import RowSampling
from tandem.sampling_ranges import MIN_TEMPERATURE, broken_range
from tandem_embedded.errors import ValidationError

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20

_WHOLE_NUMBERS = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs")
_NUMBERS = (
    "temperature",
    "top_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "min_p",
)
_RANGED = (*_NUMBERS, "top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """
    Parameters of one request.

    Attributes:
        max_tokens: Most output tokens, at least 1.
        temperature: 0 to 2; 0 always takes the most likely token, (0, 0.01) counts as 0.01.
        top_p: Share of probability to draw from, in (0, 1]; 1 is off.
        top_k: Tokens to draw from; 0 and -1 are off.
        seed: Key of the noise, a uint64; None lets the engine choose one.
        stop_token_ids: Ids that end the output, besides the model's end-of-sequence ids.
        ignore_eos: End-of-sequence tokens are like any other.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or
            output; above 0, 1 is off.
        frequency_penalty: Taken off a token's logit for each time it is in the output, -2 to 2.
        presence_penalty: Taken off once if it is there at all, -2 to 2.
        min_p: Only tokens at least this many times as likely as the likeliest are drawn, 0 to 1.
        min_tokens: Output tokens before which nothing ends the output, 0 to max_tokens.
        logit_bias: Added to the logits of these ids, -100 to 100 each.
        logprobs: Tell each token's log probability and this many of the likeliest, 0 to 20; None
            tells nothing.
    """

    max_tokens: int = 100
    temperature: float = 1.0
    top_p: float = 0.9
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    logprobs: int | None = None

    def validate(self) -> None:
        """
        Check every range.

        Raises:
            ValidationError: Naming the first parameter that is wrong.
        """
        self._check_kinds()
        for name in _RANGED:
            rule = broken_range(name, getattr(self, name))
            if rule is not None:
                message = f"{name} {rule}, got {getattr(self, name)}."
                raise ValidationError(message, reason="INVALID_PARAMETER", field=name)
        rules = (
            (self.max_tokens >= 1, "max_tokens", "must be at least 1"),
            (self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", "must be in [0, 2**64)"),
            *self._rules_of_lengths(),
        )
        for holds, name, rule in rules:
            if not holds:
                message = f"{name} {rule}, got {getattr(self, name)}."
                raise ValidationError(message, reason="INVALID_PARAMETER", field=name)

    def check_ids(self, vocab_size: int) -> None:
        """
        Check that biased ids are in the vocabulary.

        Raises:
            ValidationError: Naming one that is not.
        """
        for token_id in self.logit_bias:
            if not 0 <= token_id < vocab_size:
                message = (
                    f"token id {token_id} is not in the vocabulary, which is 0 to {vocab_size - 1}."
                )
                raise ValidationError(message, reason="INVALID_PARAMETER", field="logit_bias")

    def _rules_of_lengths(self) -> tuple[tuple[bool, str, str], ...]:
        biases = self.logit_bias.values()
        return (
            (self.min_tokens >= 0, "min_tokens", "must be non-negative"),
            (
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"must be less than or equal to max_tokens={self.max_tokens}",
            ),
            (all(-100 <= bias <= 100 for bias in biases), "logit_bias", "must be in [-100, 100]"),
            (
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                "logprobs",
                "must be in [0, 20]",
            ),
        )

    def _check_kinds(self) -> None:
        for name in (*_WHOLE_NUMBERS, *_NUMBERS):
            value = getattr(self, name)
            kinds = (int, float) if name in _NUMBERS else (int,)
            if value is None and name in {"seed", "logprobs"}:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds):
                what = "a number" if float in kinds else "a whole number"
                message = f"{name} must be {what}, got {value!r}."
                raise ValidationError(message, reason="INVALID_PARAMETER", field=name)
        biases: Mapping[Any, Any] = self.logit_bias
        for token_id, bias in biases.items():
            if not (isinstance(token_id, int) and isinstance(bias, (int, float))):
                message = f"logit_bias must map ids to numbers, got {token_id!r}: {bias!r}."
                raise ValidationError(message, reason="INVALID_PARAMETER", field="logit_bias")

    @property
    def effective_temperature(self) -> float:
        """Temperature as it is applied."""
        return max(self.temperature, MIN_TEMPERATURE) if self.temperature > 0 else 0.0

    def row_sampling(self, seed: int, end_ids: Iterable[int]) -> RowSampling:
        """
        What the executor is told of them.

        Args:
            seed: Chosen by whoever does.
            end_ids: All ids that end the output.
        """
        return RowSampling(
            temperature=self.effective_temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            seed=seed,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            end_ids=tuple(sorted(end_ids)) if self.min_tokens else (),
            logit_bias=tuple(sorted(self.logit_bias.items())),
            logprobs=self.logprobs,
        )
