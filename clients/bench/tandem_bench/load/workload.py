"""Requests of a load test: prompts of random ids with fixed lengths, or prompts from a file."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import InvalidParameter
from tandem_client.params import GenerateOptions

_KINDS = ("prompt", "messages", "token_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Arguments of `build_request` for one request."""

    prompt: str | None
    options: GenerateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """
    Requests by number; the same seed gives the same requests in any number of processes.

    Attributes:
        num_requests: Number of requests; they are numbered from 0.
        input_len: Tokens of a random prompt.
        output_len: Output tokens of a random prompt, past end-of-sequence tokens; for a prompt from
            a file, the default of its largest number.
        vocab_size: Exclusive upper bound of random ids.
        seed: Seed of the random ids.
        temperature: Temperature of every request.
        lines: Parsed JSON lines used in turn instead of random ids.
    """

    num_requests: int
    input_len: int
    output_len: int
    vocab_size: int
    seed: int
    temperature: float
    lines: tuple[dict[str, Any], ...] = ()

    def ask(self, index: int) -> Ask:
        """Build request number `index`."""
        options = GenerateOptions(max_tokens=self.output_len, temperature=self.temperature)
        if not self.lines:
            ids = random.Random(f"{self.seed}/{index}")  # noqa: S311  # a workload, not a secret
            options["token_ids"] = [ids.randrange(self.vocab_size) for _ in range(self.input_len)]
            options["ignore_eos"] = True
            return Ask(prompt=None, options=options)
        line = self.lines[index % len(self.lines)]
        if "max_tokens" in line:
            options["max_tokens"] = line["max_tokens"]
        if "messages" in line:
            options["messages"] = line["messages"]
        if "token_ids" in line:
            options["token_ids"] = line["token_ids"]
        return Ask(prompt=line.get("prompt"), options=options)


def read_prompts(path: Path) -> tuple[dict[str, Any], ...]:
    """
    Read a file of JSON lines, each an object with "prompt", "messages" or "token_ids", and
    "max_tokens" where it differs from the rest.

    Raises:
        InvalidParameter: A line is something else (the message has its number), the file is not
            UTF-8, or it has no prompt.
        OSError: The file cannot be read.
    """
    try:
        content = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{path} is not UTF-8: {error}") from error
    lines = []
    # Only line feeds end a line: JSON strings may hold other characters that Unicode calls breaks.
    for number, text in enumerate(content.split("\n"), start=1):
        if text.strip():
            lines.append(_parse(text, f"{path}:{number}"))
    if not lines:
        raise InvalidParameter(f"{path} holds no prompt")
    return tuple(lines)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise InvalidParameter(f"{where} is not valid JSON: {error}") from error
    if not isinstance(line, dict) or sum(kind in line for kind in _KINDS) != 1:
        raise InvalidParameter(f"{where} must be an object with exactly one of {', '.join(_KINDS)}")
    unknown = set(line) - {*_KINDS, "max_tokens"}
    if unknown:
        raise InvalidParameter(f"{where}: unknown key {min(unknown)!r}")
    return line
