"""Tokens of the link's model: a pure function of the prefix, so that every run is comparable."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

VOCAB_SIZE = 23
END_OF_SEQUENCE = 0
_WORD = (1 << 61) - 1


def extend(identity: int, token: int) -> int:
    """Return the identity of a prefix, given that of the prefix shorter by one token."""
    return (identity * 1_000_003 + token + 1) % _WORD


def identity_of(tokens: list[int]) -> int:
    """Return the identity of a whole prefix."""
    identity = 7
    for token in tokens:
        identity = extend(identity, token)
    return identity


def next_token(identity: int) -> int:
    """Return the token that the model's "language model" samples after a prefix."""
    return (identity * 0x9E3779B97F4A7C15 % _WORD >> 20) % VOCAB_SIZE


class Place(enum.Enum):
    """State of a request of the model."""

    WAITING = "waiting"
    RUNNING = "running"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(eq=False)
class ModelRequest:
    """One request; `num_pending` counts sampled rows in flight."""

    name: str
    prompt: list[int]
    max_outputs: int
    parent: ModelRequest | None = None
    outputs: list[int] = field(default_factory=list)
    place: Place = Place.WAITING
    aborted: bool = False
    num_pending: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs

    def take(self, position: int, token: int) -> None:
        """
        Append a token after checking its position and that it is the token which the prefix
        demands.
        """
        assert position == len(self.tokens), f"{self.name}: position {position} is not the next one"
        assert token == next_token(identity_of(self.tokens)), f"{self.name}: wrong token"
        self.outputs.append(token)

    @property
    def is_complete(self) -> bool:
        return len(self.outputs) >= self.max_outputs or self.outputs[-1:] == [END_OF_SEQUENCE]
