"""What every engine is given, and what is made of the times in which it answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """
    Requests that all arrive at once.

    Attributes:
        concurrency: How many.
        input_len: Tokens of each prompt, drawn at random.
        output_len: Tokens of each answer, at least 2, whatever they are; greedy.
        seed: Of the prompts.
    """

    concurrency: int
    input_len: int
    output_len: int
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids of every prompt."""
        source = np.random.default_rng((self.seed, self.concurrency))
        drawn: list[list[int]] = source.integers(
            0, vocab_size, (self.concurrency, self.input_len)
        ).tolist()
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """
    What one process measures.

    Attributes:
        engine: Its name among the engines.
        model: Directory in Hugging Face format.
        dtype: Type of weights, keys and values.
        num_threads: Of one operation.
        concurrency: Each is a workload of its own, in this order.
        input_len: See `Workload`.
        output_len: See `Workload`.
        cpu_extension: "auto", "on" or "off", of our own engine.
    """

    engine: str
    model: Path
    dtype: str
    num_threads: int
    concurrency: tuple[int, ...]
    input_len: int
    output_len: int
    cpu_extension: str = "auto"

    @property
    def sequence_len(self) -> int:
        """Tokens of a request at its end."""
        return self.input_len + self.output_len

    def of(self, engine: str) -> Task:
        """The same for another engine."""
        return replace(self, engine=engine)

    def workload(self, concurrency: int) -> Workload:
        """The requests that are measured."""
        return Workload(
            concurrency=concurrency, input_len=self.input_len, output_len=self.output_len
        )

    def warm_up(self, concurrency: int) -> Workload:
        """A few tokens of other requests of the same shape, not measured."""
        return Workload(
            concurrency=concurrency,
            input_len=self.input_len,
            output_len=min(4, self.output_len),
            seed=1,
        )

    def to_json(self) -> str:
        """As one argument of a command line."""
        return json.dumps(asdict(self) | {"model": str(self.model)})

    @classmethod
    def from_json(cls, text: str) -> Task:
        """What `to_json` wrote."""
        fields = json.loads(text)
        return cls(
            **fields | {"model": Path(fields["model"]), "concurrency": tuple(fields["concurrency"])}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """
    How a workload went.

    Attributes:
        tokens: Output of each request, in order; empty where an engine makes none.
        num_tokens: Of all outputs together.
        started_s: When the first request was given, on any monotonic clock.
        all_decode_s: When each request had its first token.
        num_before: Tokens there were by then.
        ended_s: When the last token was there.
    """

    tokens: Sequence[Sequence[int]]
    num_tokens: int
    started_s: float
    all_decode_s: float
    num_before: int
    ended_s: float

    @property
    def output_tokens_per_s(self) -> float:
        """Of all tokens over all the time, prompts included."""
        return self.num_tokens / (self.ended_s - self.started_s)

    @property
    def decode_tokens_per_s(self) -> float:
        """Of the tokens made while every request decoded."""
        return (self.num_tokens - self.num_before) / (self.ended_s - self.all_decode_s)


class Contestant(Protocol):
    """A loaded engine."""

    @property
    def vocab_size(self) -> int:
        """Token ids are in [0, vocab_size)."""

    def serve(self, prompts: list[list[int]], output_len: int) -> Served:
        """Answer all prompts with so many greedy tokens each, ending none early."""
