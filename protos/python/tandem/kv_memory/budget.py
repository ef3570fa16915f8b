"""
Number of KV blocks that a device holds: pure arithmetic over the numbers of a memory probe.

Four settings can size the KV memory, each with the formula of the system that it comes from: a
number of blocks; GiB of KV memory (Megatron's `buffer_size_gb`); a share of the device for weights
and KV (SGLang's `mem_fraction_static`); a share for weights, activations and KV (vLLM's
`gpu_memory_utilization`). Unlike in those systems, block 0 is a dummy block: it counts in a budget
of bytes, but not in a number of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import OutOfMemory
from tandem.wording import GIB, gib

MIN_BLOCKS = 2
"""Least number of blocks: one to use and the dummy."""


def block_bytes(
    *,
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    bytes_per_number: int,
    tp_size: int = 1,
) -> int:
    """
    Return the bytes of one block on one rank: keys and values of all attention layers there.

    With fewer KV heads than ranks, every rank holds one head.
    """
    heads = max(1, num_kv_heads // tp_size)
    return 2 * num_layers * block_size * heads * head_dim * bytes_per_number


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProbe:
    """
    Memory of one device around the loading of weights, in bytes.

    Attributes:
        device: Name of the device, for messages.
        total_bytes: All memory of the device, used or not.
        free_before_bytes: Free memory before the weights are loaded.
        free_after_bytes: Free memory with the weights, before any KV is allocated.
        weight_bytes: Size of the weights.
        activation_bytes: Most memory that steps need beyond weights and KV.
        other_bytes: Other memory taken meanwhile: libraries, contexts, workspaces.
        is_measured: True if the activations were measured, False if they are an estimate.
    """

    device: str
    total_bytes: int
    free_before_bytes: int
    free_after_bytes: int
    weight_bytes: int
    activation_bytes: int
    other_bytes: int = 0
    is_measured: bool = False

    @property
    def non_kv_bytes(self) -> int:
        """Memory that must fit beside the KV, in bytes."""
        return self.weight_bytes + self.activation_bytes + self.other_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank of an executor, and the bytes that a block takes there."""

    block_bytes: int
    probe: MemoryProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """Setting that sizes the KV memory: one of `KV_SIZE_KNOBS`, with its value and source."""

    knob: str
    value: float
    place: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """
    Plan of the KV memory.

    Attributes:
        size: The setting that sizes it.
        num_blocks: Number of blocks that sequences can use, on every rank.
        block_size: Tokens per block.
        max_model_len: Most tokens of one sequence.
        rank: The rank that has room for the fewest blocks.
        wanted_len: `max_model_len` as it would be with more KV memory; None if it is as wanted.
    """

    size: KvSize
    num_blocks: int
    block_size: int
    max_model_len: int
    rank: RankMemory
    wanted_len: int | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of all blocks on `rank`, with the dummy."""
        return (self.num_blocks + 1) * self.rank.block_bytes

    def equivalents(self) -> dict[str, float]:
        """Return, by knob, the value that gives this number of blocks on this device."""
        probe = self.rank.probe
        return {
            "max_num_blocks": self.num_blocks,
            "buffer_size_gb": self.kv_bytes / GIB,
            "mem_fraction_static": 1 - (probe.free_after_bytes - self.kv_bytes) / probe.total_bytes,
            "gpu_memory_utilization": (probe.non_kv_bytes + self.kv_bytes) / probe.total_bytes,
        }

    def warnings(self) -> list[str]:
        """Return warnings about a plan that works but is rarely intended."""
        capacity = self.num_blocks * self.block_size
        if self.wanted_len is not None:
            warning = (
                f"max_model_len is {self.max_model_len}, the tokens that the KV memory holds, "
                f"instead of {self.wanted_len}: raise {self.size.knob} "
                f"({self.size.value:.6g}, {self.size.place}) for longer requests"
            )
            return [warning]
        if capacity >= self.max_model_len:
            return []
        warning = (
            f"the KV memory holds {capacity} tokens and max_model_len is {self.max_model_len}: "
            f"longer requests are refused; raise {self.size.knob} or lower max_model_len"
        )
        return [warning]


def plan_kv(
    size: KvSize,
    ranks: Sequence[RankMemory],
    *,
    block_size: int,
    max_model_len: int,
    may_shorten: bool = False,
) -> MemoryPlan:
    """
    Plan the KV memory.

    Args:
        size: The setting that sizes it.
        ranks: Memory of the ranks, at least one; the rank with the fewest blocks counts, as
            pipeline stages can differ in size.
        block_size: Tokens per block.
        max_model_len: Most tokens of one sequence.
        may_shorten: Lower `max_model_len` to the tokens that the KV memory holds, if that is less.

    Raises:
        OutOfMemory: No block fits, too few do, or they do not fit beside the weights; the message
            names the setting to change and a value.
    """
    needed_len = 0 if may_shorten else max_model_len
    counts = [_usable_blocks(size, rank, block_size, needed_len) for rank in ranks]
    fewest = min(range(len(ranks)), key=counts.__getitem__)
    capacity = counts[fewest] * block_size
    is_short = may_shorten and capacity < max_model_len
    plan = MemoryPlan(
        size=size,
        num_blocks=counts[fewest],
        block_size=block_size,
        max_model_len=capacity if is_short else max_model_len,
        rank=ranks[fewest],
        wanted_len=max_model_len if is_short else None,
    )
    for rank in ranks:
        _check_fits(plan, rank)
    return plan


def _usable_blocks(size: KvSize, rank: RankMemory, block_size: int, max_model_len: int) -> int:
    match size.knob:
        case "max_num_blocks":
            return int(size.value)
        case "buffer_size_gb":
            return max(MIN_BLOCKS, round(size.value * GIB) // rank.block_bytes) - 1
        case "mem_fraction_static":
            return _static_share(size, rank)
        case "gpu_memory_utilization":
            return _utilization(size, rank, block_size, max_model_len)
    raise AssertionError(size.knob)


def _static_share(size: KvSize, rank: RankMemory) -> int:
    probe = rank.probe
    left = probe.free_after_bytes - round(probe.total_bytes * (1 - size.value))
    num_blocks = left // rank.block_bytes
    if num_blocks < MIN_BLOCKS:
        reserved = probe.total_bytes * (1 - size.value)
        raise OutOfMemory(
            "Not enough memory. Please try to increase --mem-fraction-static. At "
            f"{size.value:g} ({size.place}) {gib(reserved)} GiB of {probe.device} stay free for "
            f"activations, and with the weights loaded {gib(probe.free_after_bytes)} GiB are free: "
            f"{gib(max(0, left))} GiB remain for KV, two blocks take "
            f"{gib(2 * rank.block_bytes)} GiB"
        )
    return num_blocks - 1


def _utilization(size: KvSize, rank: RankMemory, block_size: int, max_model_len: int) -> int:
    probe = rank.probe
    requested = round(probe.total_bytes * size.value)
    if probe.free_before_bytes < requested:
        raise OutOfMemory(
            f"Free memory on device ({gib(probe.free_before_bytes)}/{gib(probe.total_bytes)} GiB) "
            "on startup is less than desired GPU memory utilization "
            f"({size.value:g}, {gib(requested)} GiB). Decrease GPU memory "
            "utilization or reduce GPU memory used by other processes. The device is "
            f"{probe.device}, the setting gpu_memory_utilization ({size.place})"
        )
    left = requested - probe.non_kv_bytes
    num_blocks = left // rank.block_bytes
    if num_blocks < MIN_BLOCKS:
        raise OutOfMemory(
            f"No available memory for the cache blocks. Of the {gib(requested)} GiB that "
            f"gpu_memory_utilization {size.value:g} ({size.place}) allows on {probe.device}, "
            f"weights take {gib(probe.weight_bytes)} GiB, activations "
            f"{gib(probe.activation_bytes)} GiB and the rest {gib(probe.other_bytes)} GiB: "
            "increase gpu_memory_utilization, or lower max_total_tokens, which needs the "
            "activations"
        )
    usable = num_blocks - 1
    _check_one_request(size, rank, usable, block_size, max_model_len)
    return usable


def _check_one_request(
    size: KvSize, rank: RankMemory, usable: int, block_size: int, max_model_len: int
) -> None:
    if usable * block_size >= max_model_len:
        return
    needed = -(-max_model_len // block_size) * rank.block_bytes
    raise OutOfMemory(
        f"To serve at least one request with the model's max seq len ({max_model_len}), "
        f"({gib(needed)} GiB KV cache is needed, which is larger than the available KV cache "
        f"memory ({gib(usable * rank.block_bytes)} GiB). Based on the available memory, the "
        f"estimated maximum model length is {usable * block_size}. Increase gpu_memory_utilization "
        f"({size.value:g}, {size.place}) or decrease max_model_len"
    )


def _check_fits(plan: MemoryPlan, rank: RankMemory) -> None:
    needed, free = (plan.num_blocks + 1) * rank.block_bytes, rank.probe.free_after_bytes
    if needed <= free:
        return
    fitting = max(0, free // rank.block_bytes - 1)
    most = MemoryPlan(
        size=plan.size,
        num_blocks=fitting,
        block_size=plan.block_size,
        max_model_len=plan.max_model_len,
        rank=rank,
    ).equivalents()[plan.size.knob]
    unit = " blocks" if plan.size.knob == "max_num_blocks" else ""
    raise OutOfMemory(
        f"{plan.num_blocks} KV blocks need {gib(needed)} GiB but only {gib(free)} GiB are free on "
        f"{rank.probe.device}: lower {plan.size.knob} ({plan.size.value:g}, {plan.size.place}), "
        f"at most {most:.6g}{unit} fit"
    )
