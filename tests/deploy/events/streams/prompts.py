"""The requests of all clients, each in the form of the interface that carries it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TOKENS = 256
"""Tokens of each stream."""
PROMPTS = (
    "def read_json(path: str) -> dict:\n",
    "import os\n\n\ndef main() -> None:\n",
    "class Queue:\n    def __init__(self) -> None:\n",
    "for number in range(10):\n",
)


@dataclass(frozen=True, slots=True)
class Request:
    """
    One request, whose output is the same each time.

    Attributes:
        prompt: Text to continue.
        temperature: 0 = greedy; else tokens are drawn with the seed.
        seed: Seed of the draws.
    """

    prompt: str
    temperature: float
    seed: int

    def options(self) -> dict[str, Any]:
        """Return the options of the Python client's `generate`."""
        return {
            "prompt": self.prompt,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": self.temperature,
            "seed": self.seed,
        }

    def message(self) -> dict[str, Any]:
        """Return a GenerateRequest in the JSON form of protobuf."""
        return {
            "text": self.prompt,
            "sampling": {"temperature": self.temperature, "seed": str(self.seed)},
            "stopping": {"max_tokens": TOKENS, "ignore_eos": True},
        }

    def body(self) -> dict[str, Any]:
        """Return the body of a stream of OpenAI's completions."""
        return self.options() | {"stream": True, "return_token_ids": True}


REQUESTS = tuple(
    Request(prompt, temperature, seed)
    for seed, prompt in enumerate(PROMPTS)
    for temperature in (0.0, 1.0)
)
"""Half of them greedy, and half of them drawn: drawn output has no loops that would hide a loss."""
