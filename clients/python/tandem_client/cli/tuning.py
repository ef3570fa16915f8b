"""Engine limits for a model, a memory and a kind of load: arithmetic alone, with a reason each."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.errors import OutOfMemory

TOKENS_FACTOR = 1.5
"""Of max_total_tokens over the tokens of a full batch of average requests."""

SEQS_PER_BATCH_ROW = 8
"""Requests in the system per sequence in a step: as the defaults have it, 256 over 32."""

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """
    What is to be served.

    Attributes:
        avg_tokens: Prompt and output of an average request.
        max_batch_size: Sequences that are to run together.
        utilization: Share of the memory to use.
        memory_gb: Memory of the device; None for that of the facts.
    """

    avg_tokens: int
    max_batch_size: int
    utilization: float
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """
    What the executor's own plan says of the model and the device, in bytes and tokens.

    `wanted_model_len` is what the model supports or was asked for, whatever this memory holds.
    """

    total_bytes: int
    free_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes_per_block: int
    block_size: int
    wanted_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One line of a configuration file."""

    name: str
    value: int | float
    reason: str


def step_tokens(wishes: Wishes) -> int:
    """Tokens per step: average length x batch x 1.5, at least one per sequence."""
    wanted = math.ceil(wishes.avg_tokens * wishes.max_batch_size * TOKENS_FACTOR)
    return max(wishes.max_batch_size, wanted)


def suggest(wishes: Wishes, facts: Facts) -> list[Suggestion]:
    """
    Limits for these wishes, in the order of the documentation.

    `facts` are those of an executor with `max_batch_size` and `step_tokens(wishes)`.

    Raises:
        OutOfMemory: The memory does not hold the model and one request.
    """
    usable, whose = _usable_bytes(wishes, facts)
    kv_bytes = usable - facts.weight_bytes - facts.activation_bytes
    num_blocks = kv_bytes // facts.kv_bytes_per_block - 1
    if num_blocks < 1:
        raise OutOfMemory(
            f"{_gib(usable)} GiB ({whose}) do not hold the weights ({_gib(facts.weight_bytes)} "
            f"GiB), activations ({_gib(facts.activation_bytes)} GiB) and KV: give more with "
            "--memory-gb or --utilization, or lower --avg-tokens or --max-batch-size"
        )
    batch = wishes.max_batch_size
    max_num_seqs = SEQS_PER_BATCH_ROW * batch
    enough = max_num_seqs * math.ceil(facts.wanted_model_len / facts.block_size)
    bound = ""
    if num_blocks > enough:
        num_blocks = enough
        bound = f", of which {max_num_seqs} requests of {facts.wanted_model_len} tokens use no more"
    capacity = num_blocks * facts.block_size
    fitting = min(batch, capacity // wishes.avg_tokens)
    return [
        Suggestion(name="block_size", value=facts.block_size, reason="tokens per block"),
        Suggestion(
            name="max_num_blocks",
            value=num_blocks,
            reason=f"{_gib(usable)} GiB ({whose}) less weights {_gib(facts.weight_bytes)} and "
            f"activations {_gib(facts.activation_bytes)} GiB, {facts.kv_bytes_per_block} bytes a "
            f"block{bound}; {capacity} tokens hold {fitting} of {batch} average requests",
        ),
        Suggestion(name="max_batch_size", value=batch, reason="as asked for"),
        Suggestion(
            name="max_num_seqs",
            value=max_num_seqs,
            reason=f"{SEQS_PER_BATCH_ROW} requests in the system per sequence in a step",
        ),
        Suggestion(
            name="max_model_len",
            value=min(facts.wanted_model_len, capacity),
            reason="what the model supports or was asked for, and the KV memory holds",
        ),
        Suggestion(
            name="max_total_tokens",
            value=step_tokens(wishes),
            reason=f"average length {wishes.avg_tokens} x batch {batch} x {TOKENS_FACTOR}",
        ),
        Suggestion(name="memory_threshold", value=0.9, reason="room for running requests to grow"),
    ]


def _usable_bytes(wishes: Wishes, facts: Facts) -> tuple[int, str]:
    if wishes.memory_gb is not None:
        usable = round(wishes.memory_gb * GIB * wishes.utilization)
        return usable, f"{wishes.utilization:g} of {wishes.memory_gb:g} GiB"
    share = round(facts.total_bytes * wishes.utilization)
    if share <= facts.free_bytes:
        return share, f"{wishes.utilization:g} of this device's {_gib(facts.total_bytes)} GiB"
    usable = round(facts.free_bytes * wishes.utilization)
    return usable, f"{wishes.utilization:g} of the {_gib(facts.free_bytes)} GiB free here"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
