"""Engine limits for a model, a memory size and a kind of load, each with its reason. No I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.engine_config import EngineConfig
from tandem.errors import OutOfMemory
from tandem.kv_memory.budget import (
    MIN_BLOCKS,
    MemoryPlan,
    MemoryProbe,
    RankMemory,
    plan_kv,
)
from tandem.kv_memory.default_size import default_kv_size, share_of_device
from tandem.wording import GIB, gib

TOKENS_FACTOR = 1.5
"""Ratio of max_total_tokens to the tokens of a full batch of average requests."""

SEQS_PER_BATCH_ROW = 8
"""Number of requests in the system per sequence in a step, as in the defaults: 256 / 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """
    Wishes of the user for a server.

    Attributes:
        avg_tokens: Tokens of prompt and output of an average request.
        max_batch_size: Number of sequences that run together.
        max_model_len: Tokens of the longest request; None = as many as the model supports and the
            memory holds.
        utilization: Share of the memory to use; None = the default of an executor.
        memory_gb: GiB of memory of the device; None = the memory in the facts.
    """

    avg_tokens: int
    max_batch_size: int
    max_model_len: int | None = None
    utilization: float | None = None
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """
    Facts of the executor's own plan about the model and the device, in bytes and tokens.

    `wanted_model_len` is the length that the model supports or the user asked for, even if this
    memory does not hold it.
    """

    device: str
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
    """Return the tokens per step: average length x batch x 1.5, at least one per sequence."""
    wanted = math.ceil(wishes.avg_tokens * wishes.max_batch_size * TOKENS_FACTOR)
    return max(wishes.max_batch_size, wanted)


def suggest(wishes: Wishes, facts: Facts) -> list[Suggestion]:
    """
    Return the limits for these wishes, in the order of the documentation. The KV memory is what
    `tandem up` takes with them, unless the user asks for a share of the device.

    `facts` are those of an executor with `max_batch_size` and `step_tokens(wishes)`.

    Raises:
        OutOfMemory: The memory does not hold the model and one request.
    """
    plan = _kv_plan(wishes, facts)
    batch, capacity = wishes.max_batch_size, plan.num_blocks * plan.block_size
    fitting = min(batch, capacity // wishes.avg_tokens)
    max_num_seqs = SEQS_PER_BATCH_ROW * batch
    return [
        Suggestion(name="block_size", value=facts.block_size, reason="tokens per block"),
        Suggestion(
            name="max_num_blocks",
            value=plan.num_blocks,
            reason=f"{_rule(wishes, plan)}; weights take {gib(facts.weight_bytes)} and "
            f"activations {gib(facts.activation_bytes)} GiB, a block {facts.kv_bytes_per_block} "
            f"bytes; {capacity} tokens hold {fitting} of {batch} average requests",
        ),
        Suggestion(name="max_batch_size", value=batch, reason="as asked for"),
        Suggestion(
            name="max_num_seqs",
            value=max_num_seqs,
            reason=f"{SEQS_PER_BATCH_ROW} requests in the system per sequence in a step",
        ),
        Suggestion(
            name="max_model_len",
            value=plan.max_model_len,
            reason="what the model supports or was asked for, and the KV memory holds",
        ),
        Suggestion(
            name="max_total_tokens",
            value=step_tokens(wishes),
            reason=f"average length {wishes.avg_tokens} x batch {batch} x {TOKENS_FACTOR}",
        ),
        Suggestion(
            name="memory_threshold",
            value=EngineConfig().memory_threshold,
            reason="room for running requests to grow",
        ),
    ]


def _kv_plan(wishes: Wishes, facts: Facts) -> MemoryPlan:
    """Size the KV memory by the executor's own rule."""
    rank = _rank(wishes, facts)
    free = rank.probe.free_before_bytes
    if free < rank.probe.non_kv_bytes + MIN_BLOCKS * rank.block_bytes:
        raise _too_little(f"the {gib(free)} GiB that are free", facts)
    limits = EngineConfig(
        block_size=facts.block_size,
        max_batch_size=wishes.max_batch_size,
        max_model_len=facts.wanted_model_len,
    )
    may_shorten = wishes.max_model_len is None
    if wishes.utilization is None:
        on_gpu = facts.device.startswith("cuda")
        size = default_kv_size(limits, rank, on_gpu=on_gpu, may_shorten=may_shorten)
    else:
        size = share_of_device(rank, wishes.utilization)
    if size.knob == "gpu_memory_utilization":
        usable = round(size.value * rank.probe.total_bytes)
        if usable < rank.probe.non_kv_bytes + MIN_BLOCKS * rank.block_bytes:
            raise _too_little(f"{gib(usable)} GiB, {size.value:.3g} of the device,", facts)
    return plan_kv(
        size,
        [rank],
        block_size=facts.block_size,
        max_model_len=facts.wanted_model_len,
        may_shorten=may_shorten,
    )


def _rank(wishes: Wishes, facts: Facts) -> RankMemory:
    """Return the memory of the device, or of an otherwise empty one of the size asked for."""
    total, free = facts.total_bytes, facts.free_bytes
    if wishes.memory_gb is not None:
        total = free = round(wishes.memory_gb * GIB)
    probe = MemoryProbe(
        device=facts.device,
        total_bytes=total,
        free_before_bytes=free,
        free_after_bytes=max(0, free - facts.weight_bytes),
        weight_bytes=facts.weight_bytes,
        activation_bytes=facts.activation_bytes,
    )
    return RankMemory(block_bytes=facts.kv_bytes_per_block, probe=probe)


def _too_little(memory: str, facts: Facts) -> OutOfMemory:
    return OutOfMemory(
        f"{memory} do not hold the weights ({gib(facts.weight_bytes)} GiB), activations "
        f"({gib(facts.activation_bytes)} GiB) and KV: give more with --memory-gb or "
        "--utilization, or lower --avg-tokens or --max-batch-size"
    )


def _rule(wishes: Wishes, plan: MemoryPlan) -> str:
    """Return a text on the rule that sizes the KV memory."""
    share = f"{plan.size.value:.3g} of the device's {gib(plan.rank.probe.total_bytes)} GiB"
    what = plan.size.place.removeprefix("default: ")
    if plan.size.knob == "gpu_memory_utilization":
        what = share if what == "default" else f"{share}, {what}"
    if wishes.utilization is not None:
        return f"{what}, as asked for and not as tandem up takes by default"
    device = "" if wishes.memory_gb is None else f" with {wishes.memory_gb:g} GiB"
    return f"what tandem up takes by default{device}: {what}"
