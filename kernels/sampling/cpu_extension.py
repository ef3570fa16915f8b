"""
Sampling in C++ on the CPU: one call for all rows, with any parameters.

C++ computes noise and masses more precisely than float32 does, but not with the same bits. If the
difference could decide a row's token, in about one row of ten thousand, `sampler` draws it again;
so the tokens are those of the definition.

Source: FlashInfer's rejection sampling has the idea that the winner among all ids, if it lies in
the nucleus, is the nucleus's winner too, so that no threshold has to be searched. Here noise is a
function of the id, so that a second try needs no new random number, and the result is exact.
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
from kernels.sampling.edits.reference import LogitEdits
from kernels.sampling.fixed_point import MASS_SCALE
from kernels.sampling.logprobs.cpu_extension import logprobs

_UNDECIDED, _NO_SUCH_ID = 2, 3

_COLUMNS = ("temperature", "top_k", "top_p", "least_scaled", "seed", "position", "choice")
_ALLOWED = ("first_allowed", "allowed_token")
_BIASES = ("first_bias", "bias_token", "bias_value")
_PENALTIES = (
    *("penalty", "repetition", "frequency", "presence"),
    *("prompt_len", "history_len", "history"),
)


class _Draws(ctypes.Structure):
    """The struct `Draws` of sampling/sampling.cpp, where the fields are described."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "row_stride")),
        *((name, ctypes.c_int64) for name in ("num_threads", "type")),
        *((name, ctypes.c_double) for name in ("least_temperature", "top_p_slack", "least_mass")),
        *(
            (name, ctypes.c_void_p)
            for name in ("logits", *_COLUMNS, *_ALLOWED, *_BIASES, *_PENALTIES)
        ),
        ("history_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("token", "state")),
    )


def sample(
    logits: Tensor,
    columns: SamplingColumns,
    *,
    edits: LogitEdits | None = None,
    num_logprobs: Tensor | None = None,
    margin_eps: float | None = None,
) -> Sampled:
    """
    Draw one token per row; arguments are as in the package's `sample`, unchecked.

    Raises:
        IndexError: An edit names a row, a token or a place of a history that does not exist.
    """
    if margin_eps is not None:
        return reference.sample(
            logits, columns, edits=edits, num_logprobs=num_logprobs, margin_eps=margin_eps
        )
    if logits.stride(1) != 1 or logits.dtype not in NUMBER_TYPES:
        logits = logits.float().contiguous()
    token, state, num_open = _drawn(logits, columns, edits)
    if num_open:
        _settle(token, state, logits, columns, edits)
    told = None if num_logprobs is None else logprobs(logits, token, num_logprobs)
    return Sampled(token=token, valid=state.view(torch.bool), logprobs=told)


def _drawn(
    logits: Tensor, columns: SamplingColumns, edits: LogitEdits | None
) -> tuple[Tensor, Tensor, int]:
    """
    Draw in C++. Return tokens, int64 ``[R]``; the states of rows, int8 ``[R]``: 0 is not valid, 1
    is valid; and the number of rows in another state.
    """
    num_rows, vocab_size = logits.shape
    given = {name: getattr(columns, name) for name in _COLUMNS if name != "least_scaled"}
    if columns.min_p is not None:
        given["least_scaled"] = reference.min_p_threshold(columns.min_p)
    if edits is not None:
        given |= _edits_by_row(edits, num_rows)
    held = {name: column.contiguous() for name, column in given.items()}
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
        least_mass=1 / MASS_SCALE,
        logits=logits.data_ptr(),
        history_stride=held["history"].shape[1] if "history" in held else 0,
        token=token.data_ptr(),
        state=state.data_ptr(),
        **{name: column.data_ptr() for name, column in held.items()},
    )
    return token, state, _library().tandem_sampling_draw(ctypes.byref(draws))


def _settle(
    token: Tensor,
    state: Tensor,
    logits: Tensor,
    columns: SamplingColumns,
    edits: LogitEdits | None,
) -> None:
    """Draw the rows that C++ left undecided, in place."""
    vocab_size = logits.shape[1]
    for row in (state == _NO_SUCH_ID).nonzero()[:1, 0].tolist():
        raise IndexError(
            f"an edit of row {row} names a token outside the {vocab_size} there are, or more of "
            "its history than there is"
        )
    rows = (state == _UNDECIDED).nonzero()[:, 0]
    again = logits[rows].float()
    if edits is not None:
        edits.apply(again, rows)
    token[rows] = sampler.sample(again, columns.select(rows)).token
    state[rows] = 1


def _edits_by_row(edits: LogitEdits, num_rows: int) -> dict[str, Tensor]:
    """Return the tensors for the fields of `_Draws` after the columns."""
    found = {}
    if edits.allowed is not None and len(edits.allowed.row):
        found["first_allowed"], order = _by_row(edits.allowed.row, num_rows, "allowed ids")
        found["allowed_token"] = edits.allowed.token[order]
    if edits.biases is not None and len(edits.biases.row):
        found["first_bias"], order = _by_row(edits.biases.row, num_rows, "biases")
        found["bias_token"] = edits.biases.token[order]
        found["bias_value"] = edits.biases.value[order]
    if edits.penalties is not None:
        found["penalty"] = torch.full((num_rows,), -1)
        found["penalty"][edits.penalties.row] = torch.arange(len(edits.penalties.row))
        found |= {name: getattr(edits.penalties, name) for name in _PENALTIES if name != "penalty"}
    return found


def _by_row(row: Tensor, num_rows: int, what: str) -> tuple[Tensor, Tensor]:
    """Return each row's first entry in the order of rows, ``[num_rows + 1]``, and that order."""
    row, order = row.sort(stable=True)
    if int(row[0]) < 0 or int(row[-1]) >= num_rows:
        raise IndexError(f"{what} of rows {int(row[0])} to {int(row[-1])} of {num_rows}")
    return torch.searchsorted(row, torch.arange(num_rows + 1)), order


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the library and declare the types of the functions called here."""
    library = load_library()
    library.tandem_sampling_draws_bytes.restype = ctypes.c_int64
    assert library.tandem_sampling_draws_bytes() == ctypes.sizeof(_Draws)
    library.tandem_sampling_draw.argtypes = (ctypes.POINTER(_Draws),)
    library.tandem_sampling_draw.restype = ctypes.c_int64
    return library
