"""
Least time that a device can take for requests that are all there at the start, if it computes
prompts apart from decodes.

Every prompt is computed first, which gives each request its first token; then all requests decode
together, one token a step, and leave as they end. A decode step takes the floor of `floors.py` at
the lengths that its rows have then. Prompts are bound by their products: of the layers for each
token, and of the output projection for each request once. As in the floor of a step, attention over
a prompt, activations, logits, sampling and all gaps are left out.

An engine that computes chunks of prompts in the steps of decodes multiplies while it reads, and may
be faster than this schedule; `overlapped_s`, all products beside all reads, is the least for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from executor_svc.model.config import ModelConfig
from tandem_bench.device.floors import Ceilings, matmul_parameters, step_floor


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineFloor:
    """
    Least time of a set of requests by its parts, in seconds.

    Attributes:
        prompts_s: Time to multiply all prompts by the weights.
        weights_s: Time of the weights in all decode steps.
        kv_s: Time to read keys and values in all decode steps.
        products_s: Time of all products at the device's matrix rate, of prompts and decodes.
        reads_s: Time to read the weights in as many steps as the longest answer has tokens, and all
            keys and values.
        num_tokens: Output tokens of all requests.
    """

    prompts_s: float
    weights_s: float
    kv_s: float
    products_s: float
    reads_s: float
    num_tokens: int

    @property
    def total_s(self) -> float:
        """Time of all parts, none of which hides another."""
        return self.prompts_s + self.weights_s + self.kv_s

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of a schedule that computes prompts apart from decodes."""
        return self.num_tokens / self.total_s

    @property
    def overlapped_s(self) -> float:
        """Time of all products beside all reads, for a schedule that mixes prompts and decodes."""
        return max(self.products_s, self.reads_s)


def offline_floor(
    config: ModelConfig,
    itemsize: int,
    ceilings: Ceilings,
    prompt_len: Sequence[int],
    output_len: Sequence[int],
) -> OfflineFloor:
    """
    Return the floor of a set of requests that run all at once.

    Args:
        config: Model that computes.
        itemsize: Bytes per number of weights and cache.
        ceilings: Ceilings of the device.
        prompt_len: Tokens of each prompt.
        output_len: Output tokens of each request, at least 1.
    """
    prompts, outputs = np.array(prompt_len), np.array(output_len)
    num_steps = int(outputs.max(initial=0))
    parameters = matmul_parameters(config)
    prompt_products = _prompt_products(config, prompt_len)
    decode_products = parameters * (sum(output_len) - len(output_len))
    weights_s = kv_s = 0.0
    for step in range(1, num_steps):
        lengths = prompts[outputs > step] + step
        floor = step_floor(config, itemsize, ceilings, lengths.tolist())
        weights_s += floor.weights_s
        kv_s += floor.kv_s
    return OfflineFloor(
        prompts_s=ceilings.floor_s(parameters * itemsize, 2.0 * prompt_products),
        weights_s=weights_s,
        kv_s=kv_s,
        products_s=2.0 * (prompt_products + decode_products) / ceilings.flop_per_s,
        reads_s=num_steps * parameters * itemsize / ceilings.bytes_per_s + kv_s,
        num_tokens=sum(output_len),
    )


def _prompt_products(config: ModelConfig, prompt_len: Sequence[int]) -> int:
    """Count the multiplications of all prompts."""
    projected = config.vocab_size * config.hidden_size
    layers = matmul_parameters(config) - projected
    return layers * sum(prompt_len) + projected * len(prompt_len)
