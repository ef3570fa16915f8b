"""Numbers of rows for which decode steps are captured: lists of sizes, largest first."""

from __future__ import annotations

from typing import Final, Literal

from tandem.errors import InvalidConfig

GraphCount = int | Literal["default", "none"]
"""Values of `num_cuda_graphs`; the number -1 stands for a dense list of sizes."""

DENSE: Final = -1
"""Value of `num_cuda_graphs` for every eighth size and, from 256 on, every sixteenth."""

_STEP = 8
_DEFAULT_SIZES = (1, 2, 3, 4, 6, *range(8, 64, 8), *range(64, 257, 16), 320, 384, 448, 512)


def check_graph_count(num_cuda_graphs: GraphCount) -> None:
    """
    Refuse a number that names no list.

    Raises:
        InvalidConfig: The number is neither -1 nor at least 1; the text is Megatron Core's.
    """
    if isinstance(num_cuda_graphs, int) and num_cuda_graphs != DENSE and num_cuda_graphs < 1:
        raise InvalidConfig(f"num_cuda_graphs must be >= 1, got {num_cuda_graphs}")


def graph_sizes(
    num_cuda_graphs: GraphCount, max_requests: int, tp_size: int = 1
) -> tuple[int, ...]:
    """
    Return the sizes that a setting asks for.

    Args:
        num_cuda_graphs: "none" for no graphs, "default" for `default_sizes`, else as in
            `decode_sizes`.
        max_requests: Most rows of a step.
        tp_size: Ranks that share a row's work; sizes are multiples of it.

    Raises:
        InvalidConfig: The number is neither -1 nor at least 1.
        ValueError: `max_requests` is below `tp_size`, or `tp_size` is below 1.
    """
    if num_cuda_graphs == "none":
        return ()
    if num_cuda_graphs == "default":
        return default_sizes(max_requests, tp_size)
    return decode_sizes(num_cuda_graphs, max_requests, tp_size)


def default_sizes(max_requests: int, tp_size: int = 1) -> tuple[int, ...]:
    """
    Return the default sizes: 1, 2, 3, 4, 6, every eighth to 64, every sixteenth to 256, then every
    sixty-fourth to 512, and `max_requests` itself if it is at most 512.

    A step of up to 64 rows then has at most 7 rows of padding, one of up to 256 at most 15, a
    larger one at most 63. Beyond 512 rows the device is busy for so long that launches hide behind
    it, and steps run eagerly.

    Raises:
        ValueError: `max_requests` is below `tp_size`, or `tp_size` is below 1.
    """
    largest = min(max_requests, max(_DEFAULT_SIZES))
    return _descending({*_DEFAULT_SIZES, largest}, max_requests, tp_size)


def decode_sizes(num_cuda_graphs: int, max_requests: int, tp_size: int = 1) -> tuple[int, ...]:
    """
    Return so many sizes, chosen as in Megatron Core.

    Args:
        num_cuda_graphs: -1 for 1, 2, 4, every eighth below 256 and every sixteenth from there.
            Otherwise sizes are evenly spaced: `max_requests` divided by this number, rounded up to
            a multiple of eight, so that there may be fewer sizes, or more, than asked for. A number
            above `max_requests` counts as `max_requests`.
        max_requests: Most rows of a step; itself a size, rounded down to `tp_size`.
        tp_size: Ranks that share a row's work; sizes are multiples of it.

    Raises:
        InvalidConfig: The number is neither -1 nor at least 1.
        ValueError: `max_requests` is below `tp_size`, or `tp_size` is below 1.

    Source: Megatron Core, `CUDAGraphBatchDimensionBuilder`.
    """
    check_graph_count(num_cuda_graphs)
    if num_cuda_graphs == DENSE:
        found = {1, 2, 4, *range(8, 256, 8), *range(256, max_requests + 1, 16), max_requests}
        return _descending(found, max_requests, tp_size)
    if num_cuda_graphs == 1:
        return _descending({max_requests}, max_requests, tp_size)
    rows_each = max_requests // min(num_cuda_graphs, max_requests)
    step = _rounded_up(_rounded_up(rows_each, _STEP), tp_size)
    return _descending({*range(step, max_requests, step), max_requests}, max_requests, tp_size)


def _descending(sizes: set[int], max_requests: int, tp_size: int) -> tuple[int, ...]:
    """
    Return the sizes in descending order, each rounded up to a multiple of `tp_size`; none is above
    `max_requests` rounded down to such a multiple.
    """
    if not 1 <= tp_size <= max_requests:
        raise ValueError(f"{tp_size} ranks cannot share steps of at most {max_requests} rows")
    largest = _rounded_down(max_requests, tp_size)
    rounded = {min(_rounded_up(size, tp_size), largest) for size in sizes if size <= max_requests}
    return tuple(sorted(rounded, reverse=True))


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _rounded_down(number: int, unit: int) -> int:
    return number // unit * unit
