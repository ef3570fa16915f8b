"""
Logprobs of prompt tokens: each prompt token is scored by the hidden state of the position before.

Only rows that ask are scored. Logits exist for a bounded number of positions at a time, whatever
the length of the prompts, and what remains of each position is a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.device.queue import DeviceQueue
from executor_svc.device.upload import upload
from executor_svc.memory.activations import scored_positions
from executor_svc.model.decoder import Decoder
from executor_svc.slots.sampling import SlotSampling
from executor_svc.slots.tokens import SlotTokens
from executor_svc.step.batch_inputs import token_rows
from executor_svc.step.outcome import logprob_columns
from kernels.sampling import Logprobs, token_scores
from tandem.link.batch import Batch, Int32Column, UInt32Column
from tandem.link.logprobs import PromptLogprobColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """
    The prompt tokens that a step scores, Q in batch order.

    Attributes:
        slot: int32 ``[Q]``.
        position: int32 ``[Q]``, position of the prompt token, at least 1.
        hidden_row: int64 ``[Q]``, index among the step's T tokens of the position before.
        num_top: int64 ``[Q]``, number of likeliest ids to report.
    """

    slot: Int32Column
    position: Int32Column
    hidden_row: NDArray[np.int64]
    num_top: NDArray[np.int64]


def scored_tokens(batch: Batch, sampling: SlotSampling) -> ScoredTokens | None:
    """Return the prompt tokens that a batch's rows ask to have scored; None if there are none."""
    asked = sampling.prompt_logprobs(batch.row_slot)
    if asked is None:
        return None
    num_top, prompt_len = asked
    if not ((num_top >= 0) & (batch.row_start + 1 < prompt_len)).any():
        return None
    row, position = token_rows(batch)
    hidden_row = ((num_top[row] >= 0) & (position + 1 < prompt_len[row])).nonzero()[0]
    row = row[hidden_row]
    return ScoredTokens(
        slot=batch.row_slot[row],
        position=(position[hidden_row] + 1).astype(np.int32),
        hidden_row=hidden_row.astype(np.int64),
        num_top=num_top[row],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """
    Scores of a step's prompt tokens, ``[Q]`` or ``[Q, K]`` each, on the device or on the host.

    Attributes:
        tokens: The tokens.
        valid: bool, False where the logits held NaN or infinity.
        chosen: float32, logprob of the token.
        rank: int64, place of the token among all ids.
        top_token: int64 ``[Q, K]``, likeliest ids, K the most that any token asks for.
        top: float32 ``[Q, K]``, their logprobs.
    """

    tokens: ScoredTokens
    valid: Tensor
    chosen: Tensor
    rank: Tensor
    top_token: Tensor
    top: Tensor

    def fetch(self, queue: DeviceQueue) -> Callable[[], PromptScores]:
        """Begin to copy the scores to the host; return a function that waits for them."""
        wait = queue.fetch([self.valid, self.chosen, self.rank, self.top_token, self.top])

        def collect() -> PromptScores:
            valid, chosen, rank, top_token, top = wait()
            return PromptScores(
                tokens=self.tokens,
                valid=valid,
                chosen=chosen,
                rank=rank,
                top_token=top_token,
                top=top,
            )

        return collect

    @property
    def bad_slots(self) -> list[int]:
        """Slots with a position whose logits held NaN or infinity; the scores are on the host."""
        slots: list[int] = np.unique(self.tokens.slot[~self.valid.numpy()]).tolist()
        return slots

    def columns(
        self, generation: UInt32Column, failed: NDArray[np.int64]
    ) -> PromptLogprobColumns | None:
        """
        Return the scores on the host as a result's columns, None if no token is left.

        Args:
            generation: Generation of every slot, ``[S]``.
            failed: Slots whose rows failed; their tokens are left out.
        """
        tokens, slot = self.tokens, self.tokens.slot
        found = PromptLogprobColumns(
            slot=slot,
            generation=generation[slot],
            position=tokens.position,
            rank=self.rank.numpy().astype(np.int32),
            columns=logprob_columns(
                Logprobs(
                    row=torch.arange(len(slot)),
                    num_top=torch.from_numpy(tokens.num_top).clamp(max=self.top.shape[1]),
                    chosen=self.chosen,
                    top_token=self.top_token,
                    top=self.top,
                )
            ),
        )
        if len(failed):
            found = found.select(~np.isin(slot, failed))
        return found if len(found) else None


def score(
    hidden: Tensor, scored: ScoredTokens, tokens: SlotTokens, decoder: Decoder
) -> PromptScores:
    """
    Score prompt tokens by the hidden states of a step.

    Args:
        hidden: Hidden states of the step, ``[T, hidden_size]``.
        scored: The tokens.
        tokens: Token histories of the slots.
        decoder: Computes the logits of hidden states.
    """
    device = hidden.device
    width = int(scored.num_top.max())
    rows = upload(scored.hidden_row, device)
    actual = tokens.gather(scored.slot, scored.position.astype(np.int64)).long()
    per_part = scored_positions(decoder.num_logits, on_gpu=device.type == "cuda")
    parts = []
    for first in range(0, len(rows), per_part):
        token = actual[first : first + per_part]
        logits = decoder.project(hidden.index_select(0, rows[first : first + per_part]))
        told = token_scores(logits, token, width, shard=decoder.shard)
        parts.append((told.valid, told.chosen, told.rank, told.top_token, told.top))
    valid, chosen, rank, top_token, top = (torch.cat(part) for part in zip(*parts, strict=True))
    return PromptScores(
        tokens=scored, valid=valid, chosen=chosen, rank=rank, top_token=top_token, top=top
    )
