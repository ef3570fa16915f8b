"""Shapes of captured steps, and the match of a batch to one of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """
    The room of a captured step for tokens and rows.

    Attributes:
        num_tokens: Number of tokens, padding included.
        num_prefills: Number of rows that compute any number of tokens.
        num_decodes: Number of rows that compute one token.
    """

    num_tokens: int
    num_prefills: int
    num_decodes: int

    @property
    def num_rows(self) -> int:
        """Number of rows of both kinds."""
        return self.num_prefills + self.num_decodes


def graph_shapes(
    sizes: Sequence[int],
    *,
    max_requests: int,
    max_sequence_length: int,
    mixed_prefill_count: int | None = None,
    captures_prefills: bool = True,
) -> tuple[GraphShape, ...]:
    """
    Return the shapes in the order of their capture: most prefilled tokens first, then most decodes,
    so that a shared memory pool has its final size from the start.

    Args:
        sizes: Numbers of tokens, as in `executor_svc.config.graph_sizes`.
        max_requests: Most rows of a step.
        max_sequence_length: Most tokens of one row.
        mixed_prefill_count: Number of prefills for which steps of both kinds have room; with None
            or 0 only steps of decodes alone are captured.
        captures_prefills: False captures only steps of decodes alone.

    Source: Megatron Core, `CUDAGraphBatchDimensionBuilder`.
    """
    shapes = {GraphShape(size, 0, size) for size in sizes}
    if mixed_prefill_count and captures_prefills:
        for size in sizes:
            in_mixed = min(mixed_prefill_count, max_requests)
            longest = max(1, max_sequence_length - 1)
            alone = max(mixed_prefill_count, math.ceil(size / longest), min(max_requests, size))
            shapes.add(GraphShape(size, in_mixed, size - in_mixed))
            shapes.add(GraphShape(size, alone, 0))
    kept = (shape for shape in shapes if _is_possible(shape, max_requests, max_sequence_length))
    return tuple(sorted(kept, key=_capture_order, reverse=True))


def match(
    shapes: Iterable[GraphShape],
    *,
    num_tokens: int,
    num_prefills: int,
    num_decodes: int,
) -> GraphShape | None:
    """
    Return the smallest shape that a batch fits into; None if it fits into none and runs eagerly.

    A batch of decodes alone fits only into a shape of decodes alone.

    Args:
        shapes: Shapes of the captured steps.
        num_tokens: Number of tokens of the batch, all rows together.
        num_prefills: Number of its rows that compute any number of tokens.
        num_decodes: Number of its rows that compute one token.
    """
    fitting = (
        shape
        for shape in shapes
        if num_tokens <= shape.num_tokens
        and num_prefills <= shape.num_prefills
        and (num_prefills > 0 or shape.num_prefills == 0)
        and num_prefills + num_decodes <= shape.num_rows
    )
    return min(fitting, default=None)


def _is_possible(shape: GraphShape, max_requests: int, max_sequence_length: int) -> bool:
    most_tokens = shape.num_prefills * max_sequence_length + shape.num_decodes
    return shape.num_decodes >= 0 and (
        shape.num_rows <= min(max_requests, shape.num_tokens) and shape.num_tokens <= most_tokens
    )


def _capture_order(shape: GraphShape) -> tuple[int, int, GraphShape]:
    return shape.num_tokens - shape.num_decodes, shape.num_decodes, shape
