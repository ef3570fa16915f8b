"""Default size of the KV memory, also for `tandem config suggest`."""

from __future__ import annotations

from tandem.engine_config import EngineConfig
from tandem.errors import OutOfMemory
from tandem.kv_memory.budget import MIN_BLOCKS, KvSize, RankMemory
from tandem.wording import GIB, gib

GPU_UTILIZATION = 0.9
"""Share of a GPU's memory, as in vLLM; if other processes leave less, share of its free memory."""

CPU_SHARE = 0.25
"""Share of the memory left by weights and activations, as other programs need memory too."""


def default_kv_size(
    limits: EngineConfig, rank: RankMemory, *, on_gpu: bool, may_shorten: bool
) -> KvSize:
    """
    Choose the size of the KV memory by the device.

    Args:
        limits: Engine limits; `max_batch_size` and `max_model_len` bound the size on a CPU.
        rank: Memory of the device.
        on_gpu: True if the device is a GPU.
        may_shorten: On a CPU, `max_model_len` may be lowered; otherwise the KV memory holds one
            request of it at least, even if that exceeds the share.

    Raises:
        OutOfMemory: One request of `max_model_len` needs more memory than is left on a CPU.
    """
    if on_gpu:
        return share_of_device(rank, GPU_UTILIZATION)
    return _on_cpu(limits, rank, may_shorten=may_shorten)


def share_of_device(rank: RankMemory, utilization: float) -> KvSize:
    """Return this share of the device, or of its free memory if other processes leave less."""
    probe = rank.probe
    knob = "gpu_memory_utilization"
    if probe.free_before_bytes >= utilization * probe.total_bytes:
        return KvSize(knob=knob, value=utilization)
    value = utilization * probe.free_before_bytes / probe.total_bytes
    place = f"default: {utilization:g} of what other processes leave of the device"
    return KvSize(knob=knob, value=value, place=place)


def _on_cpu(limits: EngineConfig, rank: RankMemory, *, may_shorten: bool) -> KvSize:
    per_request = -(-limits.max_model_len // limits.block_size)
    free = max(0, rank.probe.free_after_bytes - rank.probe.activation_bytes)
    usable = (limits.max_batch_size * per_request + 1) * rank.block_bytes
    share = int(CPU_SHARE * free)
    least = MIN_BLOCKS if may_shorten else per_request + 1
    if least > MIN_BLOCKS and least * rank.block_bytes > free:
        fitting = max(0, free // rank.block_bytes - 1) * limits.block_size
        cure = f"lower max_model_len to {fitting} or less" if fitting else "give it more memory"
        raise OutOfMemory(
            f"one request of max_model_len {limits.max_model_len} needs "
            f"{gib(least * rank.block_bytes)} GiB of KV memory and {gib(free)} GiB are "
            f"left beside weights and activations: {cure}"
        )
    if usable <= share:
        num_bytes = usable
        place = (
            f"default: max_batch_size {limits.max_batch_size} requests of max_model_len "
            f"{limits.max_model_len}"
        )
    else:
        num_bytes = max(share, least * rank.block_bytes)
        place = f"default: {CPU_SHARE:g} of the free memory, or one request of max_model_len"
    return KvSize(knob="buffer_size_gb", value=num_bytes / GIB, place=place)
