"""
Sampling as a pure function of logits, parameters, seed and position.

`reference` is the definition. Faster implementations give the same tokens: `cpu_extension` in C++
on a CPU, `sampler` on a CPU without C++, `triton_sampler` on a GPU. `noise` makes the random
numbers. `sharded` gives the same tokens where ranks share the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.dispatch import CPU_EXTENSION, Deferred, Operation
from kernels.sampling import cpu_extension, reference, sampler
from kernels.sampling.columns import Sampled, SamplingColumns
from kernels.sampling.edits.reference import Allowed, Biases, LogitEdits, Penalties, check_edits
from kernels.sampling.logprobs import cpu_extension as logprobs_cpu_extension
from kernels.sampling.logprobs import reference as logprobs_reference
from kernels.sampling.logprobs.reference import Logprobs, TokenScores, ranks, with_requested
from kernels.sampling.needs import Needs
from kernels.sampling.sharded import logprobs as sharded_logprobs
from kernels.sampling.sharded import sampler as sharded_sampler
from kernels.sampling.sharded.shard import Collectives, VocabularyShard

__all__ = [
    "Allowed",
    "Biases",
    "Collectives",
    "LogitEdits",
    "Logprobs",
    "Needs",
    "Penalties",
    "Sampled",
    "SamplingColumns",
    "TokenScores",
    "VocabularyShard",
    "draw",
    "ranks",
    "sample",
    "token_logprobs",
    "token_scores",
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
    shard: VocabularyShard | None = None,
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
        shard: The ids of these logits, where ranks share the vocabulary; all ranks call alike.

    Returns:
        Tokens and validity on the logits' device. A row with NaN, +infinity or only -infinity is
        not valid; it does not affect other rows. Logprobs are those of `logits` as given.

    Raises:
        ValueError: A shape or type is not as described.
        IndexError: In C++, an edit names a row, token or place of a history that does not exist.
    """
    _check(logits, columns)
    _check_num_logprobs(num_logprobs, len(logits))
    if edits is not None:
        check_edits(edits)
    run: Callable[..., Sampled] = _sample_alone
    if shard is not None:
        run = partial(sharded_sampler.sample, shard=shard)
    return run(
        logits,
        columns,
        edits=edits,
        num_logprobs=num_logprobs,
        logprob_ids=logprob_ids,
        margin_eps=margin_eps,
    )


def draw(
    logits: Tensor,
    columns: SamplingColumns,
    needs: Needs,
    *,
    shard: VocabularyShard | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Draw the tokens of `sample` without edits, with all parameters on the logits' device.

    Launches depend on shapes and `needs` alone, and nothing is read on the host, so that a graph
    can capture them.

    Args:
        logits: Floating, shape ``[R, V]``, elements of a row adjacent. Not changed.
        columns: Parameters of each row, on the device of `logits`.
        needs: Needs of the rows, or more.
        shard: As in `sample`.

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
    if shard is not None:
        return sharded_sampler.draw(logits, columns, needs, shard)
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


def token_scores(
    logits: Tensor, token: Tensor, num_top: int, *, shard: VocabularyShard | None = None
) -> TokenScores:
    """
    Compute logprob and rank of a given token in each row.

    Args:
        logits: Floating ``[R, V]``, R at least 1, elements of a row adjacent. Not changed.
        token: int64 ``[R]`` on the logits' device.
        num_top: Number of top ids to report; K is at most the vocabulary's size.
        shard: As in `sample`.
    """
    if shard is not None:
        return sharded_logprobs.token_scores(logits, token, num_top, shard)
    told = token_logprobs(logits, token, torch.full((len(token),), num_top))
    assert told is not None, "every row asks"
    return TokenScores(
        valid=logits.amax(dim=1).isfinite(),
        chosen=told.chosen,
        rank=ranks(logits, token),
        top_token=told.top_token,
        top=told.top,
    )


def _check_num_logprobs(num_logprobs: Tensor | None, num_rows: int) -> None:
    if num_logprobs is None or (
        num_logprobs.dtype == torch.int64 and num_logprobs.shape == (num_rows,)
    ):
        return
    raise ValueError(
        f"num_logprobs must be torch.int64 of shape [{num_rows}], got {num_logprobs.dtype} "
        f"{list(num_logprobs.shape)}"
    )


def _sample_alone(
    logits: Tensor,
    columns: SamplingColumns,
    *,
    edits: LogitEdits | None,
    num_logprobs: Tensor | None,
    logprob_ids: Tensor | None,
    margin_eps: float | None,
) -> Sampled:
    """Sample from all logits, by the implementation of their device."""
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
