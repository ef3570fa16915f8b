"""Distributions of lengths and arrival times, each written as a short text for a flag."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem.errors import InvalidConfig

Int64Column: TypeAlias = NDArray[np.int64]
Float64Column: TypeAlias = NDArray[np.float64]


class LengthKind(enum.StrEnum):
    """Kinds of distributions of lengths."""

    FIXED = "fixed"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"
    ZIPF = "zipf"


_LENGTH_FORMS = {
    LengthKind.FIXED: ("N",),
    LengthKind.UNIFORM: ("MIN", "MAX"),
    LengthKind.LOGNORMAL: ("MEAN", "SIGMA", "MAX"),
    LengthKind.ZIPF: ("EXPONENT", "MAX"),
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """
    Distribution of lengths in tokens, each at least 1.

    Its forms are `fixed:N`; `uniform:MIN:MAX`, both included; `lognormal:MEAN:SIGMA:MAX`, MEAN
    before the cut at MAX and SIGMA of the logarithm; `zipf:EXPONENT:MAX`, which draws k from 1 to
    MAX with weights k^-EXPONENT.
    """

    kind: LengthKind
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """
        Read one of the forms above; a plain number is a fixed length.

        Raises:
            InvalidConfig: The text has another form, or a value is out of range.
        """
        name, *rest = text.split(":")
        if not rest:
            name, rest = LengthKind.FIXED, [name]
        forms = ", ".join(":".join((kind, *form)) for kind, form in _LENGTH_FORMS.items())
        try:
            kind = LengthKind(name)
            values = tuple(float(value) for value in rest)
        except ValueError:
            raise InvalidConfig(f"{text!r} is no length distribution; known: {forms}") from None
        if len(values) != len(_LENGTH_FORMS[kind]):
            form = ":".join((kind, *_LENGTH_FORMS[kind]))
            raise InvalidConfig(f"{text!r} has {len(values)} values, expected {form}")
        cls._check(text, kind, values)
        return cls(kind, values)

    @staticmethod
    def _check(text: str, kind: LengthKind, values: tuple[float, ...]) -> None:
        if not all(math.isfinite(value) for value in values):
            raise InvalidConfig(f"{text!r} has a value that is not finite")
        is_ratio = {LengthKind.LOGNORMAL: (1,), LengthKind.ZIPF: (0,)}.get(kind, ())
        for index, value in enumerate(values):
            if index in is_ratio:
                if value <= 0:
                    raise InvalidConfig(f"{text!r}: {value:g} must be over 0")
            elif value < 1 or value != int(value):
                raise InvalidConfig(f"{text!r}: {value:g} must be a whole number of tokens, 1 up")
        if kind is LengthKind.UNIFORM and values[0] > values[1]:
            raise InvalidConfig(f"{text!r}: the smallest length is over the largest")

    def draw(self, rng: np.random.Generator, count: int) -> Int64Column:
        """Draw `count` lengths, shape ``[count]``."""
        match self.kind:
            case LengthKind.FIXED:
                return np.full(count, int(self.values[0]), np.int64)
            case LengthKind.UNIFORM:
                return rng.integers(int(self.values[0]), int(self.values[1]) + 1, count)
            case LengthKind.LOGNORMAL:
                mean, sigma, longest = self.values
                drawn = np.exp(math.log(mean) - sigma**2 / 2 + sigma * rng.standard_normal(count))
                lengths: Int64Column = np.clip(np.rint(drawn), 1, longest).astype(np.int64)
                return lengths
            case LengthKind.ZIPF:
                exponent, longest = self.values
                ranks = zipf_ranks(rng, count, int(longest), exponent)
                return ranks + np.int64(1)

    def __str__(self) -> str:
        return ":".join([self.kind, *(f"{value:g}" for value in self.values)])


def zipf_ranks(
    rng: np.random.Generator, count: int, num_ranks: int, exponent: float
) -> Int64Column:
    """Draw ranks below `num_ranks`, rank k with weight (k + 1)^-exponent, shape ``[count]``."""
    weights = np.arange(1, num_ranks + 1, dtype=np.float64) ** -exponent
    shares = np.cumsum(weights)
    ranks = np.searchsorted(shares / shares[-1], rng.random(count), side="right")
    return np.minimum(ranks, num_ranks - 1).astype(np.int64)


class ArrivalKind(enum.StrEnum):
    """Kinds of arrival processes."""

    POISSON = "poisson"
    CONSTANT = "constant"
    GAMMA = "gamma"
    BURSTS = "bursts"
    AT_ONCE = "at-once"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """
    Process of arrivals.

    Its forms are `poisson`; `constant`, with even spacing; `gamma:CV`, with gaps of this
    coefficient of variation (1 is Poisson, more is burstier); `bursts:SIZE`, with groups that
    arrive together at Poisson times and have geometric sizes with mean SIZE; `at-once`, with all
    arrivals at time 0, whatever the rate.
    """

    kind: ArrivalKind
    value: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """
        Read one of the forms above.

        Raises:
            InvalidConfig: The text has another form, or its value is out of range.
        """
        name, *rest = text.split(":")
        takes_value = name in {ArrivalKind.GAMMA, ArrivalKind.BURSTS}
        try:
            kind = ArrivalKind(name)
            value = float(rest[0]) if rest else 1.0
        except ValueError:
            kind, rest = ArrivalKind.POISSON, ["", ""]
        if len(rest) != int(takes_value):
            known = "poisson, constant, gamma:CV, bursts:SIZE, at-once"
            raise InvalidConfig(f"{text!r} is no arrival process; known: {known}")
        if not math.isfinite(value) or value <= 0 or (kind is ArrivalKind.BURSTS and value < 1):
            raise InvalidConfig(f"{text!r}: {value:g} is out of range")
        return cls(kind, value)

    def draw(self, rng: np.random.Generator, count: int, rate_per_s: float) -> Float64Column:
        """Draw ascending times in seconds from 0, `rate_per_s` per second, shape ``[count]``."""
        match self.kind:
            case ArrivalKind.AT_ONCE:
                return np.zeros(count)
            case ArrivalKind.CONSTANT:
                return np.arange(1, count + 1) / rate_per_s
            case ArrivalKind.POISSON:
                return np.cumsum(rng.exponential(1 / rate_per_s, count))
            case ArrivalKind.GAMMA:
                shape = self.value**-2
                return np.cumsum(rng.gamma(shape, 1 / (shape * rate_per_s), count))
            case ArrivalKind.BURSTS:
                sizes = rng.geometric(1 / self.value, count)
                times = np.cumsum(rng.exponential(self.value / rate_per_s, count))
                return np.repeat(times, sizes)[:count]

    def __str__(self) -> str:
        has_value = self.kind in {ArrivalKind.GAMMA, ArrivalKind.BURSTS}
        return f"{self.kind}:{self.value:g}" if has_value else str(self.kind)
