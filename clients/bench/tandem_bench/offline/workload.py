"""Requests that every engine gets, and rates computed from the times at which it answers."""

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
        concurrency: Number of requests.
        input_len: Tokens of each prompt, drawn at random.
        output_len: Output tokens of each request, at least 2; greedy, past EOS.
        seed: Seed of the prompts.
    """

    concurrency: int
    input_len: int
    output_len: int
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Draw the token ids of every prompt."""
        source = np.random.default_rng((self.seed, self.concurrency))
        drawn: list[list[int]] = source.integers(
            0, vocab_size, (self.concurrency, self.input_len)
        ).tolist()
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """
    Measurement of one process.

    Attributes:
        engine: Name of the engine, a key of `ENGINES`.
        model: Model directory in Hugging Face format.
        dtype: Number type of weights, keys and values.
        num_threads: CPU threads of one operation.
        concurrency: Numbers of requests; each is a workload of its own, in this order.
        input_len: See `Workload`.
        output_len: See `Workload`.
        cpu_extension: Setting of our own engine: "auto", "on" or "off".
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
        """Tokens of a request at its end, prompt and output."""
        return self.input_len + self.output_len

    def of(self, engine: str) -> Task:
        """Return the same task for another engine."""
        return replace(self, engine=engine)

    def workload(self, concurrency: int) -> Workload:
        """Return the requests that are measured."""
        return Workload(
            concurrency=concurrency, input_len=self.input_len, output_len=self.output_len
        )

    def warm_up(self, concurrency: int) -> Workload:
        """Return other requests of the same shape with at most 4 output tokens, to warm up with."""
        return Workload(
            concurrency=concurrency,
            input_len=self.input_len,
            output_len=min(4, self.output_len),
            seed=1,
        )

    def to_json(self) -> str:
        """Encode as one argument of a command line."""
        return json.dumps(asdict(self) | {"model": str(self.model)})

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Decode the result of `to_json`."""
        fields = json.loads(text)
        return cls(
            **fields | {"model": Path(fields["model"]), "concurrency": tuple(fields["concurrency"])}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """
    Outputs and times of a workload that was served.

    Attributes:
        tokens: Output tokens of each request, in order; empty where an engine returns none.
        num_tokens: Number of all output tokens together.
        started_s: Time at which the first request was submitted, on any monotonic clock.
        all_decode_s: Time from which every request had its first token.
        num_before: Output tokens that existed at `all_decode_s`.
        ended_s: Time of the last token.
    """

    tokens: Sequence[Sequence[int]]
    num_tokens: int
    started_s: float
    all_decode_s: float
    num_before: int
    ended_s: float

    @property
    def output_tokens_per_s(self) -> float:
        """Rate of all output tokens over the whole time, prefill included."""
        return self.num_tokens / (self.ended_s - self.started_s)

    @property
    def decode_tokens_per_s(self) -> float:
        """Rate of the tokens made from `all_decode_s` on."""
        return (self.num_tokens - self.num_before) / (self.ended_s - self.all_decode_s)


class Contestant(Protocol):
    """Loaded engine of the comparison."""

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""

    def serve(self, prompts: list[list[int]], output_len: int) -> Served:
        """Answer every prompt with exactly `output_len` greedy tokens, past EOS."""
