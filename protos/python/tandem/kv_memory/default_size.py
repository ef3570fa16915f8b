"""How large the KV memory is where no setting says it, also for `tandem config suggest`."""

from __future__ import annotations

from tandem.engine_config import EngineConfig
from tandem.errors import OutOfMemory
from tandem.kv_memory.budget import GIB, MIN_BLOCKS, KvSize, RankMemory

GPU_UTILIZATION = 0.9
"""Of a GPU's memory, as in vLLM; of what is free of it, where other processes have more."""

CPU_SHARE = 0.25
"""Of the memory that is free beside weights and activations: other programs live there too."""


def default_kv_size(
    limits: EngineConfig, rank: RankMemory, *, on_gpu: bool, may_shorten: bool
) -> KvSize:
    """
    Choose a size by the device.

    Args:
        limits: `max_batch_size` and `max_model_len` bound what can be used on a CPU.
        rank: The device, with what is free there.
        on_gpu: It is one.
        may_shorten: `max_model_len` gives way; otherwise room for one such request is taken, share
            or not.

    Raises:
        OutOfMemory: That one request is more than the memory holds.
    """
    if on_gpu:
        return share_of_device(rank, GPU_UTILIZATION)
    return _on_cpu(limits, rank, may_shorten=may_shorten)


def share_of_device(rank: RankMemory, utilization: float) -> KvSize:
    """Take this share of the device, or of what is free of it, where other processes have more."""
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
            f"{least * rank.block_bytes / GIB:.2f} GiB of KV memory and {free / GIB:.2f} GiB are "
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
