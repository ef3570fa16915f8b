"""The requests that every way of serving must answer alike."""

from __future__ import annotations

import random
from dataclasses import dataclass

OUTPUT_LEN = 64
TARGET_PROMPT_LEN = 37
NEIGHBOUR_LENS = (1, 5, 16, 17, 33, 48, 70, 90)
VOCAB = range(3, 250)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthRequest:
    """A prompt with resolved sampling; `temperature` 0 is greedy."""

    prompt: tuple[int, ...]
    temperature: float
    top_k: int
    top_p: float
    seed: int


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.choice(VOCAB) for _ in range(length))


GREEDY = TruthRequest(
    prompt=_prompt(TARGET_PROMPT_LEN, 1), temperature=0.0, top_k=0, top_p=1.0, seed=0
)
SEEDED = TruthRequest(
    prompt=_prompt(TARGET_PROMPT_LEN, 1), temperature=0.9, top_k=50, top_p=0.95, seed=2**63 + 11
)
TARGETS = {"greedy": GREEDY, "seeded": SEEDED}

NEIGHBOURS = tuple(
    TruthRequest(
        prompt=_prompt(length, 100 + length),
        temperature=(index % 3) * 0.6,
        top_k=(index % 2) * 20,
        top_p=1.0,
        seed=length,
    )
    for index, length in enumerate(NEIGHBOUR_LENS)
)
"""Eight requests of other lengths, greedy and sampled, that run beside a target."""
