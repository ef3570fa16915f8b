"""
Linear floor: the matrix products of each step and nothing else, by PyTorch's linear operation.

An engine that computes the model with these products cannot be faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.model.loader import LoadedModel, load_model
from tandem_bench.offline.workload import Served, Task


def load(task: Task) -> LinearFloor:
    """Load the weights of the task's model."""
    torch.set_num_threads(task.num_threads)
    return LinearFloor(load_model(task.model, dtype=task.dtype, device="cpu"))


class LinearFloor:
    """Contestant that multiplies as many rows as a step would have; it makes no tokens."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""
        return self._model.config.vocab_size

    def serve(self, prompts: list[list[int]], output_len: int) -> Served:
        """Compute the products of all prompts at once, then those of each decode step."""
        num_rows = len(prompts)
        with torch.inference_mode():
            prefill = self._inputs(num_rows * len(prompts[0]), num_rows)
            decode = self._inputs(num_rows, num_rows)
            started_s = time.perf_counter()
            multiply(prefill)
            all_decode_s = time.perf_counter()
            for _ in range(output_len - 1):
                multiply(decode)
            ended_s = time.perf_counter()
        return Served(
            tokens=(),
            num_tokens=num_rows * output_len,
            started_s=started_s,
            all_decode_s=all_decode_s,
            num_before=num_rows,
            ended_s=ended_s,
        )

    def _inputs(self, num_tokens: int, num_sampled: int) -> list[tuple[Tensor, Tensor]]:
        source = torch.Generator().manual_seed(0)
        by_width: dict[tuple[int, int], Tensor] = {}

        def rows(count: int, weight: Tensor) -> Tensor:
            shape = (count, weight.shape[1])
            if shape not in by_width:
                by_width[shape] = torch.randn(shape, generator=source).to(weight.dtype)
            return by_width[shape]

        return [
            (rows(num_sampled if is_head else num_tokens, weight), weight)
            for weight, is_head in self._weights()
        ]

    def _weights(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield every matrix in the order of a step; True marks the output projection."""
        for layer in self._model.weights.layers:
            for weight in (layer.qkv, layer.output, layer.gate_up, layer.down):
                yield weight, False
        yield self._model.weights.lm_head, True


def multiply(inputs: list[tuple[Tensor, Tensor]]) -> None:
    """Compute one step's products: rows ``[T, in]`` with each weight ``[out, in]``."""
    for rows, weight in inputs:
        functional.linear(rows, weight)
