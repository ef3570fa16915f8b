"""Outcome of a step's rows: tokens of rows that sampled, errors of rows that failed alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import Logprobs, Sampled
from tandem.link.batch import Float32Column, Int32Column, UInt32Column
from tandem.link.logprobs import LogprobColumns
from tandem.link.results import RowError, RowErrorKind


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """
    The rows that sampled, on the host, in batch order; shape ``[R]`` each.

    Attributes:
        slot: Slot of each token.
        position: Position of the token in its sequence.
        token: Sampled token, 0 where not valid.
        valid: False where the logits held NaN or infinity.
        margin: Margin by which each token won; None if not collected.
        logprobs: Logprobs of the rows that asked for them; None if no row did.
    """

    slot: Int32Column
    position: Int32Column
    token: Int32Column
    valid: NDArray[np.bool_]
    margin: Float32Column | None
    logprobs: LogprobColumns | None = None

    @classmethod
    def of(cls, slot: Int32Column, position: Int32Column, sampled: Sampled) -> StepOutcome:
        """Make the outcome of sampled tokens that are on the host."""
        margin, logprobs = sampled.margin, sampled.logprobs
        return cls(
            slot=slot,
            position=position,
            token=sampled.token.numpy().astype(np.int32),
            valid=sampled.valid.numpy(),
            margin=None if margin is None else margin.numpy(),
            logprobs=None if logprobs is None else logprob_columns(logprobs),
        )

    def row_errors(
        self,
        bad_input_slots: Iterable[int],
        generation: UInt32Column,
        vocab_size: int,
        *,
        bad_prompt_slots: Iterable[int] = (),
    ) -> tuple[RowError, ...]:
        """
        Return the errors of rows that failed, one per slot; an error of the input comes before one
        of the logits it led to.

        Args:
            bad_input_slots: Slots that computed a token outside the vocabulary.
            generation: Generation of every slot, ``[S]``.
            vocab_size: Size of the vocabulary, for the message.
            bad_prompt_slots: Slots with NaN or infinity in the logits of a prompt position.
        """
        out_of_range = f"an input token is outside [0, {vocab_size})"
        failed = dict.fromkeys(bad_input_slots, (RowErrorKind.TOKEN_OUT_OF_RANGE, out_of_range))
        invalid = (RowErrorKind.INVALID_LOGITS, "the model's logits hold NaN or infinity")
        for slot in [*self.slot[~self.valid].tolist(), *bad_prompt_slots]:
            failed.setdefault(slot, invalid)
        return tuple(
            RowError(slot=slot, generation=int(generation[slot]), kind=kind, message=message)
            for slot, (kind, message) in failed.items()
        )

    def without(self, errors: tuple[RowError, ...]) -> StepOutcome:
        """Return the rows that did not fail."""
        if not errors:
            return self
        good = ~np.isin(self.slot, [error.slot for error in errors])
        return StepOutcome(
            slot=self.slot[good],
            position=self.position[good],
            token=self.token[good],
            valid=self.valid[good],
            margin=None if self.margin is None else self.margin[good],
            logprobs=None if self.logprobs is None else self.logprobs.of_rows(good),
        )


def logprob_columns(logprobs: Logprobs) -> LogprobColumns:
    """
    Convert logprobs on the host to columns; each row has as many top ids as it asked for, then the
    ids that it requested.
    """
    count = logprobs.num_top.numpy()
    wanted = np.arange(logprobs.top_token.shape[1]) < count[:, None]
    top_token, top = logprobs.top_token.numpy(), logprobs.top.numpy()
    if logprobs.requested_ids is not None and logprobs.requested is not None:
        requested = logprobs.requested_ids.numpy()
        wanted = np.concatenate([wanted, requested >= 0], axis=1)
        top_token = np.concatenate([top_token, requested], axis=1)
        top = np.concatenate([top, logprobs.requested.numpy()], axis=1)
        count = wanted.sum(axis=1)
    return LogprobColumns(
        row=logprobs.row.numpy().astype(np.int32),
        chosen=logprobs.chosen.numpy(),
        top_start=np.concatenate([np.zeros(1, np.int32), np.cumsum(count, dtype=np.int32)]),
        top_token=top_token[wanted].astype(np.int32),
        top=top[wanted],
    )
