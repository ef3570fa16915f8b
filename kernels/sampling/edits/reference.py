"""Edits of some rows' logits before the temperature: biases, then penalties on past tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.transfer import to_device

_MAX = torch.finfo(torch.float32).max

_ALLOWED_TYPES = {"row": torch.int64, "token": torch.int64}
_BIAS_TYPES = {"row": torch.int64, "token": torch.int64, "value": torch.float32}
_PENALTY_TYPES = {
    "row": torch.int64,
    "repetition": torch.float32,
    "frequency": torch.float32,
    "presence": torch.float32,
    "prompt_len": torch.int64,
    "history_len": torch.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """
    The only ids that some rows may draw, shape ``[A]`` each; a row without an entry may draw all.

    Attributes:
        row: int64, row of the logits.
        token: int64, id that the row may draw.
    """

    row: Tensor
    token: Tensor

    def select(self, part: Tensor) -> Allowed:
        """Return some of the entries, by a mask bool[A]."""
        return Allowed(row=self.row[part], token=self.token[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class Biases:
    """
    Numbers added to single logits, shape ``[B]`` each; -infinity bans an id.

    Attributes:
        row: int64, row of the logits.
        token: int64, id of the logit.
        value: float32, number to add.
    """

    row: Tensor
    token: Tensor
    value: Tensor

    def select(self, part: Tensor) -> Biases:
        """Return some of the biases, by a mask bool[B]."""
        return Biases(row=self.row[part], token=self.token[part], value=self.value[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """
    Penalties of P rows on their past tokens, shape ``[P]`` each except for `history`.

    Attributes:
        row: int64, rows of the logits, ascending.
        repetition: float32, above 0; divides positive and multiplies negative logits of ids in
            prompt or output. 1 = off.
        frequency: float32; subtracted once for each time that an id is in the output. 0 = off.
        presence: float32; subtracted once if an id is in the output. 0 = off.
        prompt_len: int64, number of tokens of the prompt.
        history_len: int64, number of tokens of prompt and output, 1 to L.
        history: int32 ``[P, L]`` on the logits' device: these tokens, then arbitrary ids.
    """

    row: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    prompt_len: Tensor
    history_len: Tensor
    history: Tensor

    def select(self, part: Tensor) -> Penalties:
        """Return the penalties of some of the P rows, by a mask bool[P] on the host."""
        if part.all():
            return self
        index = part.nonzero()[:, 0]  # on the host, so as not to wait for a device
        return Penalties(
            row=self.row[index],
            repetition=self.repetition[index],
            frequency=self.frequency[index],
            presence=self.presence[index],
            prompt_len=self.prompt_len[index],
            history_len=self.history_len[index],
            history=self.history.index_select(0, to_device(index, self.history.device)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """
    All edits of one batch of rows, on the host except for `Penalties.history`.

    Ids that are not allowed are ruled out first, then come biases, then repetition, frequency and
    presence. Finite logits of ids that are allowed stay finite.
    """

    allowed: Allowed | None = None
    biases: Biases | None = None
    penalties: Penalties | None = None

    @property
    def rows(self) -> Tensor:
        """Rows of the logits that are edited, int64 ``[N]``, ascending."""
        edits = (self.allowed, self.biases, self.penalties)
        parts = [part.row for part in edits if part is not None]
        return torch.unique(torch.cat(parts)) if parts else torch.empty(0, dtype=torch.int64)

    def apply(self, logits: Tensor, rows: Tensor) -> None:
        """
        Edit rows in place.

        Args:
            logits: float32 ``[N, V]``.
            rows: int64 ``[N]`` on the host, ascending: indices of these rows in the batch. Edits of
                other rows are left out.
        """
        if self.allowed is not None:
            allowed = self.allowed.select(torch.isin(self.allowed.row, rows))
            rule_out_others(logits, allowed, torch.searchsorted(rows, allowed.row))
        if self.biases is not None:
            biases = self.biases.select(torch.isin(self.biases.row, rows))
            add_biases(logits, biases, torch.searchsorted(rows, biases.row))
        if self.penalties is not None:
            penalties = self.penalties.select(torch.isin(self.penalties.row, rows))
            row = torch.searchsorted(rows, penalties.row)
            _penalise(logits, row.to(logits.device), penalties)


def check_edits(edits: LogitEdits) -> None:
    """
    Check types and shapes, which costs nothing; values are left to the code that reads them.

    Raises:
        ValueError: A type or shape is not as the classes describe it.
    """
    for part, types in (
        (edits.allowed, _ALLOWED_TYPES),
        (edits.biases, _BIAS_TYPES),
        (edits.penalties, _PENALTY_TYPES),
    ):
        if part is None:
            continue
        shape = part.row.shape
        for name, dtype in types.items():
            column: Tensor = getattr(part, name)
            if column.dtype != dtype or column.shape != shape or len(shape) != 1:
                raise ValueError(
                    f"{name} must be {dtype} of shape {list(shape[:1])}, got {column.dtype} "
                    f"{list(column.shape)}"
                )
    if edits.penalties is not None:
        num_rows, history = len(edits.penalties.row), edits.penalties.history
        if history.dtype != torch.int32 or history.ndim != 2 or len(history) != num_rows:
            raise ValueError(
                f"history must be torch.int32 of shape [{num_rows}, L], got {history.dtype} "
                f"{list(history.shape)}"
            )


def rule_out_others(logits: Tensor, allowed: Allowed, row: Tensor) -> None:
    """
    Take the logits of all ids that are not allowed to -infinity, in place, in rows `row` of ``[N,
    V]`` instead of `allowed.row`. NaN and +infinity become NaN: such rows stay invalid.

    Args:
        logits: Floating ``[N, V]``.
        allowed: The ids, on the host.
        row: int64 ``[A]`` on the host.
    """
    device = logits.device
    rows, place = torch.unique(row, return_inverse=True)
    added = torch.full((len(rows), logits.shape[1]), -torch.inf, device=device)
    # A host's number would make a device's copy, and wait for it.
    nothing = torch.zeros((), device=device)
    added.index_put_((to_device(place, device), to_device(allowed.token, device)), nothing)
    logits.index_add_(0, to_device(rows, device), added)


def add_biases(logits: Tensor, biases: Biases, row: Tensor) -> None:
    """Add biases in place, to rows `row` of ``[N, V]`` instead of `biases.row`."""
    device = logits.device
    place = (row.to(device), biases.token.to(device))
    # Only bans can share an id with another entry: the order of the sum does not matter.
    logits.index_put_(place, biases.value.to(device), accumulate=True)


def _penalise(logits: Tensor, row: Tensor, penalties: Penalties) -> None:
    """
    Change only the logits of past tokens, in place.

    Every place of the history reads and writes its own id's logit: an id that is there more than
    once is written more than once, each time with the same value.
    """
    device = logits.device
    position = torch.arange(penalties.history.shape[1], device=device)
    known = position < penalties.history_len.to(device)[:, None]
    is_output = known & (position >= penalties.prompt_len.to(device)[:, None])
    ids = torch.where(known, penalties.history, penalties.history[:, :1]).long()
    # gather and scatter along rows are several times as fast as indexing with both
    mine = logits if len(row) == len(logits) else logits[row]
    before = mine.gather(1, ids)
    counts = None
    if penalties.frequency.any() or penalties.presence.any():
        counts = torch.zeros_like(mine).scatter_add_(1, ids, is_output.float()).gather(1, ids)
    mine.scatter_(1, ids, penalised(before, counts, penalties))
    if mine is not logits:
        logits[row] = mine


def penalised(logits: Tensor, counts: Tensor | None, penalties: Penalties) -> Tensor:
    """
    Return the logits, after penalties, of ids that are all in prompt or output.

    Args:
        logits: float32 ``[P, ...]``.
        counts: float32, same shape: number of times each id is in the output; None if no row has a
            frequency or presence penalty.
        penalties: Penalties of the same P rows.

    Returns:
        float32, same shape; finite where `logits` is.
    """
    device = logits.device
    repetition = penalties.repetition.to(device)[:, None]
    after = torch.where(logits > 0, logits / repetition, logits * repetition)
    if counts is not None:
        after = after - penalties.frequency.to(device)[:, None] * counts
        after = after - penalties.presence.to(device)[:, None] * counts.clamp(max=1.0)
    return torch.where(logits.isfinite(), after.clamp(-_MAX, _MAX), logits)
