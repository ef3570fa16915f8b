"""
The 64 requests of a storm: greedy and seeded, penalised, with stop strings, some with two choices.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tandem_client import FinishReason
from tandem_client.params import GenerateOptions
from tests.truth.equality import EPS_FLOAT32, compared_length

NUM_STREAMS = 64
_SEED = 20_240
_NAMES = ("total", "items", "left", "right", "count", "value", "index", "names", "path", "size")
_VERBS = ("read", "merge", "find", "sort", "count", "split", "parse", "write", "check", "load")
_STOPS = ("return", "\n\n", "self", "7", "Q", "b")
_LONGEST_PROMPT = 280
"""Longest prompt in characters; the smallest models have a token for each and few positions."""


@dataclass(frozen=True, slots=True)
class StormRequest:
    """One request; its seed tells it apart from all others."""

    seed: int
    prompt: str
    options: GenerateOptions

    @property
    def num_choices(self) -> int:
        """Number of completions that it asks for."""
        return self.options.get("n") or 1


@dataclass(slots=True, eq=False)
class Output:
    """Output of one choice, as the client saw it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    matched: str | int | None = None


@dataclass(slots=True, eq=False)
class Expected:
    """Output of one choice without a fault, and the margin by which each token won."""

    output: Output
    margins: list[float]

    @property
    def num_certain(self) -> int:
        """Number of leading tokens that every right run has."""
        return compared_length(self.margins, EPS_FLOAT32)

    def difference(self, found: Output) -> str:
        """Return how a run differs in what must be equal; empty if it does not."""
        expected, certain = self.output, self.num_certain
        if expected.token_ids[:certain] != found.token_ids[:certain]:
            pairs = zip(expected.token_ids, found.token_ids, strict=False)
            places = (place for place, (one, other) in enumerate(pairs) if one != other)
            place = next(places, min(len(expected.token_ids), len(found.token_ids)))
            return (
                f"token {place} differs (lengths {len(expected.token_ids)}, {len(found.token_ids)})"
            )
        if certain < len(expected.token_ids):
            return ""  # another run may be right too after that
        for name in ("token_ids", "text", "reason", "matched"):
            if getattr(expected, name) != getattr(found, name):
                return f"{name}: {getattr(expected, name)!r} became {getattr(found, name)!r}"
        return ""


def storm_requests() -> tuple[StormRequest, ...]:
    """Return the 64 requests, the same every time."""
    source = random.Random(_SEED)
    return tuple(_request(index, source) for index in range(NUM_STREAMS))


def _request(index: int, source: random.Random) -> StormRequest:
    seed = 1_000 + index
    options: GenerateOptions = {
        "seed": seed,
        "max_tokens": source.choice((64, 64, 96, 128, 192)),
        "ignore_eos": True,
        "temperature": 0.0 if index % 2 else round(source.uniform(0.5, 1.1), 2),
    }
    if index % 4 == 0:
        options |= {"top_k": source.choice((20, 50)), "top_p": 0.95}
    if index % 8 == 2:
        options |= {"n": 2}
    if index % 5 == 3:
        options |= {"stop": [source.choice(_STOPS)]}
    if index % 3 == 1:
        options |= {
            "repetition_penalty": round(source.uniform(1.05, 1.3), 2),
            "frequency_penalty": round(source.uniform(-0.5, 0.8), 2),
        }
    if index % 7 == 5:
        options |= {"presence_penalty": 0.6, "min_p": 0.02, "min_tokens": 20}
    return StormRequest(seed=seed, prompt=_prompt(source), options=options)


def _prompt(source: random.Random) -> str:
    """Return one line of a program, or several."""
    lines = []
    for _ in range(source.choice((1, 1, 2, 5, 12))):
        name, verb = source.choice(_NAMES), source.choice(_VERBS)
        lines += [f"def {verb}_{name}({name}, {source.choice(_NAMES)}=None):"]
        lines += [f"    {source.choice(_NAMES)} = {verb}({name})"] * source.randint(0, 2)
    return "\n".join(lines)[:_LONGEST_PROMPT] + "\n"
