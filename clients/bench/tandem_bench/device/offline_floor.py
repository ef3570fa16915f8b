"""
Least time that a device can take for requests that are all there at the start.

Every prompt is computed first, which gives each request its first token; then all requests decode
together, one token a step, and leave as they end. A decode step takes the floor of `floors.py` at
the lengths that its rows have then. Prompts are bound by their products: of the layers for each
token, and of the output projection for each request once. As in the floor of a step, attention over
a prompt, activations, logits, sampling and all gaps are left out.
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
        num_tokens: Output tokens of all requests.
    """

    prompts_s: float
    weights_s: float
    kv_s: float
    num_tokens: int

    @property
    def total_s(self) -> float:
        """Time of all parts, none of which hides another."""
        return self.prompts_s + self.weights_s + self.kv_s

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, which no engine exceeds."""
        return self.num_tokens / self.total_s


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
    weights_s = kv_s = 0.0
    for step in range(1, int(outputs.max(initial=0))):
        lengths = prompts[outputs > step] + step
        floor = step_floor(config, itemsize, ceilings, lengths.tolist())
        weights_s += floor.weights_s
        kv_s += floor.kv_s
    return OfflineFloor(
        prompts_s=_prompts_s(config, itemsize, ceilings, prompt_len),
        weights_s=weights_s,
        kv_s=kv_s,
        num_tokens=sum(output_len),
    )


def _prompts_s(
    config: ModelConfig, itemsize: int, ceilings: Ceilings, prompt_len: Sequence[int]
) -> float:
    parameters = matmul_parameters(config)
    projected = config.vocab_size * config.hidden_size
    num_products = (parameters - projected) * sum(prompt_len) + projected * len(prompt_len)
    return ceilings.floor_s(parameters * itemsize, 2.0 * num_products)
