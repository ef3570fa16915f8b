"""How a request draws its tokens and where it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem_embedded.errors import ValidationError

MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
MAX_SEED = 2**64 - 1


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
    """

    max_tokens: int = 100
    temperature: float = 1.0
    top_p: float = 0.9
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def validate(self) -> None:
        """
        Check every range.

        Raises:
            ValidationError: Naming the first parameter that is wrong.
        """
        self._check_kinds()
        temperature, top_p, top_k = self.temperature, self.top_p, self.top_k
        rules = (
            (self.max_tokens >= 1, "max_tokens", "must be at least 1"),
            (math.isfinite(temperature), "temperature", "must be a finite number"),
            (temperature >= 0, "temperature", "must be non-negative"),
            (temperature <= MAX_TEMPERATURE, "temperature", "must be in [0, 2]"),
            (0 < top_p <= 1, "top_p", "must be in (0, 1]"),
            (top_k >= -1, "top_k", "must be 0 (disable), or at least 1"),
            (self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", "must be in [0, 2**64)"),
        )
        for holds, name, rule in rules:
            if not holds:
                message = f"{name} {rule}, got {getattr(self, name)}."
                raise ValidationError(message, reason="INVALID_PARAMETER", field=name)

    def _check_kinds(self) -> None:
        for name in ("max_tokens", "top_k", "seed", "temperature", "top_p"):
            value = getattr(self, name)
            kinds: tuple[type, ...] = (int,)
            if name in {"temperature", "top_p"}:
                kinds = (int, float)
            elif name == "seed" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds):
                what = "a number" if float in kinds else "a whole number"
                message = f"{name} must be {what}, got {value!r}."
                raise ValidationError(message, reason="INVALID_PARAMETER", field=name)

    @property
    def effective_temperature(self) -> float:
        """Temperature as it is applied."""
        return max(self.temperature, MIN_TEMPERATURE) if self.temperature > 0 else 0.0
