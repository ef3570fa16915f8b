"""A model of a known size and no meaning, in memory: no checkpoint is read or written."""

from __future__ import annotations

import gc

import torch

from executor_svc.device.free_memory import available_bytes
from executor_svc.memory.kv_memory import KvMemory
from executor_svc.model.config import ModelConfig
from executor_svc.model.loader import LoadedModel
from executor_svc.model.packing import pack_weights
from executor_svc.model.weights import allocate_weights, distinct_tensors, weight_bytes
from kernels.packed_linear import can_pack
from tandem.errors import OutOfMemory
from tandem_bench.device.operands import fill_randomly

_DEVIATION = 0.02
"""As models are initialised: activations neither vanish nor overflow."""


def random_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, packs: bool = False
) -> LoadedModel:
    """
    Matrices are normal, norms are 1, biases too are drawn; equal arguments give equal weights.

    Args:
        config: Its sizes.
        dtype: Of its weights.
        device: Where they are.
        packs: As in `load_model`.

    Raises:
        OutOfMemory: It does not fit the device.
    """
    needed, free = weight_bytes(config, dtype), available_bytes(device)
    if free is not None and needed > free:  # a host would promise it, and end us when it is filled
        raise OutOfMemory(
            f"weights of {needed / 2**30:.1f} GiB do not fit into the {free / 2**30:.1f} GiB that "
            f"are free on {device}"
        )
    weights = allocate_weights(config, dtype, device)
    for seed, tensor in enumerate(distinct_tensors(weights)):
        fill_randomly(tensor, seed=seed, scale=_DEVIATION)
    norms = [weights.norm]
    norms += [norm for layer in weights.layers for norm in (layer.input_norm, layer.mlp_norm)]
    norms += [layer.qk_norm for layer in weights.layers if layer.qk_norm is not None]
    for norm in norms:
        norm.fill_(1.0)
    held = [weights]
    del weights
    return LoadedModel(
        config=config,
        weights=pack_weights(held) if packs and can_pack(dtype, device) else held.pop(),
        dtype=dtype,
        device=device,
        fingerprint="random",
        weight_bytes=needed,
    )


def forget_memory(device: torch.device) -> None:
    """Give back what nothing refers to any more, so that what is free on the device counts it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def random_kv(model: LoadedModel, num_blocks: int, block_size: int) -> KvMemory:
    """
    A cache full of numbers, as after prompts that nobody computed.

    Raises:
        OutOfMemory: It does not fit.
    """
    kv = KvMemory(model.config, num_blocks, block_size, model.dtype, model.device)
    for seed, layer in enumerate(kv.layers):
        fill_randomly(layer, seed=seed)
    return kv
