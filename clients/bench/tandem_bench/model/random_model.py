"""Model of a known size with random weights, in memory: no checkpoint is read or written."""

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
from tandem.wording import gib
from tandem_bench.device.operands import fill_randomly

_DEVIATION = 0.02
"""Standard deviation of weights, as at a model's initialisation: activations stay in range."""


def random_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, packs: bool = False
) -> LoadedModel:
    """
    Make a model with normal matrices and biases and with norms of 1.

    Equal arguments give equal weights.

    Args:
        config: Sizes of the model.
        dtype: Number type of the weights.
        device: Device that holds the weights.
        packs: As in `load_model`.

    Raises:
        OutOfMemory: The model does not fit the device.
    """
    needed, free = weight_bytes(config, dtype), available_bytes(device)
    if free is not None and needed > free:  # a host would grant it, then kill us as it is filled
        raise OutOfMemory(
            f"weights of {gib(needed, '.1f')} GiB do not fit into the {gib(free, '.1f')} GiB that "
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
    """Collect garbage and empty PyTorch's cache, so that free device memory is counted right."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def random_kv(model: LoadedModel, num_blocks: int, block_size: int) -> KvMemory:
    """
    Make a KV cache full of random numbers, which stand for computed prompts.

    Raises:
        OutOfMemory: The cache does not fit.
    """
    kv = KvMemory(model.config, num_blocks, block_size, model.dtype, model.device)
    for seed, layer in enumerate(kv.layers):
        fill_randomly(layer, seed=seed)
    return kv
