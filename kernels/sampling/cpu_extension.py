"""
Sampling in C++ on the CPU: one call for all rows, whatever each of them asks for.

C++ knows noise and masses more closely than float32 does, but not its very bits. A row that they
could decide either way, about one in ten thousand, is drawn again by `sampler`; so the tokens are
those of the definition.

Source: that the winner among all is the nucleus's own if it lies in it, so that no threshold has to
be searched, is the idea of FlashInfer's rejection sampling; with noise that is a function of the
id, a second try needs no second number, and the result is exact.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from kernels.cpu_extension import load_library
from kernels.cpu_extension.library import NUMBER_TYPES
from kernels.sampling import reference, sampler
from kernels.sampling.columns import Sampled, SamplingColumns
from kernels.sampling.edits import LogitEdits
from kernels.sampling.logprobs import logprobs, rows_per_copy

_UNDECIDED = 2

_COLUMNS = ("temperature", "top_k", "top_p", "least_scaled", "seed", "position", "choice")


class _Draws(ctypes.Structure):
    """The struct `Draws` of sampling.cpp, which says what each field is."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "row_stride")),
        *((name, ctypes.c_int64) for name in ("num_threads", "type")),
        *((name, ctypes.c_double) for name in ("least_temperature", "top_p_slack", "least_mass")),
        *((name, ctypes.c_void_p) for name in ("logits", *_COLUMNS, "token", "state")),
    )


def sample(
    logits: Tensor,
    columns: SamplingColumns,
    *,
    edits: LogitEdits | None = None,
    num_logprobs: Tensor | None = None,
    margin_eps: float | None = None,
) -> Sampled:
    """Draw one token per row; arguments as in the package's `sample`, unchecked."""
    if margin_eps is not None:
        return reference.sample(
            logits, columns, edits=edits, num_logprobs=num_logprobs, margin_eps=margin_eps
        )
    token, valid = _drawn(logits, columns)
    if edits is not None:
        for rows in torch.split(edits.rows, rows_per_copy(logits)):
            changed = logits[rows].float()
            edits.apply(changed, rows)
            token[rows], valid[rows] = _drawn(changed, columns.select(rows))
    told = None if num_logprobs is None else logprobs(logits, token, num_logprobs)
    return Sampled(token=token, valid=valid, logprobs=told)


def _drawn(logits: Tensor, columns: SamplingColumns) -> tuple[Tensor, Tensor]:
    """Tokens and validity of rows without edits."""
    if logits.stride(1) != 1 or logits.dtype not in NUMBER_TYPES:
        logits = logits.float().contiguous()
    num_rows, vocab_size = logits.shape
    least = None if columns.min_p is None else reference.min_p_threshold(columns.min_p)
    given = {
        name: None if column is None else column.contiguous()
        for name, column in (
            *((name, getattr(columns, name)) for name in _COLUMNS if name != "least_scaled"),
            ("least_scaled", least),
        )
    }
    token = torch.empty(num_rows, dtype=torch.int64)
    state = torch.empty(num_rows, dtype=torch.int8)
    draws = _Draws(
        num_rows=num_rows,
        vocab_size=vocab_size,
        row_stride=logits.stride(0),
        num_threads=torch.get_num_threads(),
        type=NUMBER_TYPES[logits.dtype],
        least_temperature=reference.MIN_TEMPERATURE,
        top_p_slack=reference.TOP_P_SLACK,
        least_mass=1 / reference.MASS_SCALE,
        logits=logits.data_ptr(),
        token=token.data_ptr(),
        state=state.data_ptr(),
        **{name: None if column is None else column.data_ptr() for name, column in given.items()},
    )
    _library().tandem_sampling_draw(ctypes.byref(draws))
    undecided = (state == _UNDECIDED).nonzero()[:, 0]
    if len(undecided):
        token[undecided] = sampler.sample(logits[undecided], columns.select(undecided)).token
    return token, state > 0


@functools.cache
def _library() -> ctypes.CDLL:
    """The library with the types of what is called here."""
    library = load_library()
    library.tandem_sampling_draws_bytes.restype = ctypes.c_int64
    assert library.tandem_sampling_draws_bytes() == ctypes.sizeof(_Draws)
    library.tandem_sampling_draw.argtypes = (ctypes.POINTER(_Draws),)
    library.tandem_sampling_draw.restype = None
    return library
