"""
The seven engine limits that both services and the embedded engine share, with their exact
validation texts.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tandem.errors import InvalidConfig

MAX_GIB = 1 << 20
"""Most GiB that a setting may ask for; more than this PiB is a typing error."""
MAX_THREADS = 1024
"""Most CPU threads of one operation; OpenMP ends a process that cannot start its threads."""
MAX_LPM_WAITING = 128
"""
Most waiting requests that the schedule policy lpm sorts; it leaves more in the order of arrival, as
fcfs does, since matching their prefixes would cost more than it saves.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """
    Limits of one engine. Code that builds an engine from them calls `validate` before it allocates.

    Attributes:
        block_size: Tokens per KV block, at least 1; powers of two from 1 to 128 are advised.
        max_num_blocks: KV blocks in the pool, at least 1.
        max_batch_size: Most sequences in one step, at least 1.
        max_num_seqs: Most requests in the system, waiting ones included, at least 1.
        max_model_len: Most tokens of prompt plus output, at least `block_size`.
        max_total_tokens: Most tokens computed in one step, at least `max_batch_size`.
        memory_threshold: Share of blocks in use at which no prompt is admitted, 0 to 1.
    """

    block_size: int = 16
    max_num_blocks: int = 1024
    max_batch_size: int = 32
    max_num_seqs: int = 256
    max_model_len: int = 2048
    max_total_tokens: int = 4096
    memory_threshold: float = 0.9

    def validate(self) -> None:
        """
        Check every rule in the order of the documentation.

        Raises:
            InvalidConfig: The first rule that does not hold.
        """
        threshold = self.memory_threshold
        rules = (
            (self.block_size > 0, "block_size must be greater than 0"),
            (self.max_num_blocks > 0, "max_num_blocks must be greater than 0"),
            (self.max_batch_size > 0, "max_batch_size must be greater than 0"),
            (self.max_num_seqs > 0, "max_num_seqs must be greater than 0"),
            (self.max_model_len >= self.block_size, "max_model_len must be at least block_size"),
            (
                self.max_total_tokens >= self.max_batch_size,
                "max_total_tokens must be at least max_batch_size",
            ),
            (
                math.isfinite(threshold) and 0.0 <= threshold <= 1.0,
                "memory_threshold must be between 0.0 and 1.0",
            ),
        )
        for holds, text in rules:
            if not holds:
                raise InvalidConfig(text)

    def warnings(self) -> list[str]:
        """Return a warning for each setting that works but is rarely intended."""
        found = []
        if self.block_size > 128 or self.block_size & (self.block_size - 1):
            found.append(
                f"block_size {self.block_size} is unusual: powers of two from 1 to 128 are advised"
            )
        if self.max_batch_size > self.max_num_seqs:
            found.append(
                f"max_batch_size {self.max_batch_size} can never be reached:"
                f" max_num_seqs is {self.max_num_seqs} and counts waiting requests too, more are"
                " refused; for vLLM's max_num_seqs, so many that run while others wait, set"
                " max_batch_size (--max-batch-size, or SGLang's --max-running-requests)"
            )
        return found

    @classmethod
    def from_file(cls, path: Path | str, *, base: EngineConfig | None = None) -> EngineConfig:
        """
        Read a JSON object of these names; missing ones have the value of `base`, else the default.

        Raises:
            InvalidConfig: The file is unreadable or no JSON object, or has an unknown name or a
                value of the wrong type.
        """
        path = Path(path)
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise InvalidConfig(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise InvalidConfig(f"{path} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise InvalidConfig(f"{path} must hold a JSON object")
        return replace(base or cls(), **_checked(content, path))

    @classmethod
    def preset(cls, name: str) -> EngineConfig:
        """
        Return one of `PRESETS` by its name.

        Raises:
            InvalidConfig: No preset has this name.
        """
        if name not in PRESETS:
            raise InvalidConfig(f"unknown preset {name!r}; presets: {', '.join(PRESETS)}")
        return PRESETS[name]

    def as_dict(self) -> dict[str, int | float]:
        """Return names and values, in the order of the documentation."""
        return asdict(self)


PRESETS: dict[str, EngineConfig] = {
    "low-latency": EngineConfig(
        block_size=16,
        max_num_blocks=512,
        max_batch_size=8,
        max_num_seqs=64,
        max_model_len=1024,
        max_total_tokens=1024,
        memory_threshold=0.8,
    ),
    "high-throughput": EngineConfig(
        block_size=32,
        max_num_blocks=4096,
        max_batch_size=128,
        max_num_seqs=1024,
        max_model_len=4096,
        max_total_tokens=16384,
        memory_threshold=0.95,
    ),
    "memory-constrained": EngineConfig(
        block_size=16,
        max_num_blocks=256,
        max_batch_size=16,
        max_num_seqs=128,
        max_model_len=1024,
        max_total_tokens=2048,
        memory_threshold=0.85,
    ),
    "long-context": EngineConfig(
        block_size=32,
        max_num_blocks=2048,
        max_batch_size=16,
        max_num_seqs=64,
        max_model_len=8192,
        max_total_tokens=8192,
        memory_threshold=0.9,
    ),
}
"""Named starting points."""


def _checked(content: dict[str, Any], path: Path) -> dict[str, Any]:
    known = {field.name for field in fields(EngineConfig)}
    for name, value in content.items():
        if name not in known:
            raise InvalidConfig(
                f"{path}: unknown key {name!r}; known keys: {', '.join(sorted(known))}"
            )
        accepted = (int, float) if name == "memory_threshold" else (int,)
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise InvalidConfig(f"{path}: {name} must be a number, got {value!r}")
    return content
