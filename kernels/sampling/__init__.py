"""
Sampling as a pure function of logits, parameters, seed and position.

`reference` is the definition. Faster implementations give the same tokens: `cpu_extension` in C++
on a CPU, `sampler` on a CPU without C++, `triton_sampler` on a GPU. `noise` makes the random
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.dispatch import CPU_EXTENSION, Deferred, Operation
from kernels.sampling import cpu_extension, reference, sampler
from kernels.sampling.columns import Sampled, SamplingColumns
from kernels.sampling.edits.reference import Allowed, Biases, LogitEdits, Penalties, check_edits
from kernels.sampling.logprobs import cpu_extension as logprobs_cpu_extension
from kernels.sampling.logprobs import reference as logprobs_reference
from kernels.sampling.logprobs.reference import Logprobs, ranks, with_requested
from kernels.sampling.needs import Needs

__all__ = [
    "Allowed",
    "Biases",
    "LogitEdits",
    "Logprobs",
    "Needs",
    "Penalties",
    "Sampled",
    "SamplingColumns",
    "draw",
    "ranks",
    "sample",
    "token_logprobs",
    "use_cpu_extension",
]


_operation: Operation[Callable[..., Sampled]] = Operation(
    "sampling",
    reference.sample,
    {
        "cpu": ("cpu", sampler.sample),
        "cuda": ("triton", Deferred("kernels.sampling.triton_sampler", "sample")),
    },
)

_draw_operation: Operation[Callable[[Tensor, SamplingColumns, Needs], tuple[Tensor, Tensor]]] = (
    Operation(
        "draw",
        reference.draw,
        {"cuda": ("triton", Deferred("kernels.sampling.triton_kernel", "draw"))},
    )
)

_logprobs_operation: Operation[Callable[[Tensor, Tensor, Tensor], Logprobs | None]] = Operation(
    "logprobs",
    logprobs_reference.logprobs,
    {"cuda": ("triton", Deferred("kernels.sampling.logprobs.triton_logprobs", "logprobs"))},
)

_COLUMN_TYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "seed": torch.int64,
    "position": torch.int64,
    "choice": torch.int64,
    "min_p": torch.float32,
}


def use_cpu_extension(*, wanted: bool) -> None:
    """Let a CPU sample in C++ or not, for the whole process; C++ needs the library loaded."""
    _operation.withdraw("cpu", CPU_EXTENSION)
    _logprobs_operation.withdraw("cpu", CPU_EXTENSION)
    if wanted:
        _operation.offer("cpu", CPU_EXTENSION, cpu_extension.sample)
        _logprobs_operation.offer("cpu", CPU_EXTENSION, logprobs_cpu_extension.logprobs)


def sample(
    logits: Tensor,
    columns: SamplingColumns,
    *,
    edits: LogitEdits | None = None,
    num_logprobs: Tensor | None = None,
    logprob_ids: Tensor | None = None,
    margin_eps: float | None = None,
) -> Sampled:
    """
    Draw one token per row by Gumbel-max over the row's kept set.

    Order: rule out ids that are not allowed, add biases, apply penalties, divide by the
    temperature, drop ids less than min_p times as likely as the best, keep the top_k best, of these
    keep the smallest set with mass of at least top_p, add counter-based noise, take the largest.
    Greedy rows (temperature 0, or top_k 1) take the largest logit after all edits. Ties go to the
    lowest id; ids that tie at a cut all stay.

    Args:
        logits: Floating, shape ``[R, V]``; -infinity masks an id. Not changed.
        columns: Parameters of each row, on the logits' device or on the host.
        edits: Allowed ids, biases and penalties of the rows that have any.
        num_logprobs: int64 ``[R]`` on the host: number of top ids to report with each token's
            logprob; -1 for rows without logprobs.
        logprob_ids: int64 ``[R, W]`` on the host: ids whose logprobs are reported as well, -1 after
            a row's last; only with `num_logprobs`, and only for rows with logprobs.
        margin_eps: Also compute margins, with ids within this distance of a cut; slower, for
            equality tests.

    Returns:
        Tokens and validity on the logits' device. A row with NaN, +infinity or only -infinity is
        not valid; it does not affect other rows. Logprobs are those of `logits` as given.

    Raises:
        ValueError: A shape or type is not as described.
        IndexError: In C++, an edit names a row, token or place of a history that does not exist.
    """
    _check(logits, columns)
    num_rows = len(logits)
    if edits is not None:
        check_edits(edits)
    if num_logprobs is not None and (
        num_logprobs.dtype != torch.int64 or num_logprobs.shape != (num_rows,)
    ):
        raise ValueError(
            f"num_logprobs must be torch.int64 of shape [{num_rows}], got {num_logprobs.dtype} "
            f"{list(num_logprobs.shape)}"
        )
    run = _operation.on(logits.device)
    num_top = num_logprobs
    if num_logprobs is not None and logprob_ids is not None:  # the best id's is needed then
        num_top = torch.where(num_logprobs == 0, 1, num_logprobs)
    sampled = run(logits, columns, edits=edits, num_logprobs=num_top, margin_eps=margin_eps)
    told = sampled.logprobs
    if told is None or num_logprobs is None or logprob_ids is None:
        return sampled
    told = with_requested(logits, told, logprob_ids)
    asked = num_logprobs[told.row].clamp(max=logits.shape[1])
    return replace(sampled, logprobs=replace(told, num_top=asked))


def draw(logits: Tensor, columns: SamplingColumns, needs: Needs) -> tuple[Tensor, Tensor]:
    """
    Draw the tokens of `sample` without edits, with all parameters on the logits' device.

    Launches depend on shapes and `needs` alone, and nothing is read on the host, so that a graph
    can capture them.

    Args:
        logits: Floating, shape ``[R, V]``, elements of a row adjacent. Not changed.
        columns: Parameters of each row, on the device of `logits`.
        needs: Needs of the rows, or more.

    Returns:
        Token int64 ``[R]``, 0 where not valid, and validity bool ``[R]``, as in `Sampled`.

    Raises:
        ValueError: A shape, type, stride or device is not as described.
    """
    _check(logits, columns)
    if logits.stride(1) != 1 or columns.temperature.device != logits.device:
        raise ValueError(
            f"rows of logits must be adjacent and columns on {logits.device}, got strides "
            f"{list(logits.stride())} and columns on {columns.temperature.device}"
        )
    return _draw_operation.on(logits.device)(logits, columns, needs)


def token_logprobs(logits: Tensor, token: Tensor, num_top: Tensor) -> Logprobs | None:
    """
    Compute the logprobs of given tokens, as `sample` does of those it draws.

    Args:
        logits: Floating ``[R, V]``, elements of a row adjacent. Not changed.
        token: int64 ``[R]`` on the logits' device.
        num_top: int64 ``[R]`` on the host: number of top ids to report; -1 for a row without
            logprobs.

    Returns:
        Logprobs of the rows that ask; None if none does. Those of a row with NaN or +infinity have
        no meaning.
    """
    return _logprobs_operation.on(logits.device)(logits, token, num_top)


def _check(logits: Tensor, columns: SamplingColumns) -> None:
    if logits.ndim != 2 or not logits.is_floating_point() or logits.shape[1] == 0:
        raise ValueError(
            f"logits must be floating of shape [R, V], got {logits.dtype} {list(logits.shape)}"
        )
    for name, dtype in _COLUMN_TYPES.items():
        column: Tensor | None = getattr(columns, name)
        if column is None and name == "min_p":
            continue
        if column is None or column.dtype != dtype or column.shape != logits.shape[:1]:
            raise ValueError(
                f"{name} must be {dtype} of shape [{logits.shape[0]}], "
                f"got {None if column is None else (column.dtype, list(column.shape))}"
            )
