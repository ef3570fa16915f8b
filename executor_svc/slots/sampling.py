"""Sampling parameters of each slot, on the host, and the columns of one step's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.slots.logits_hook import DrawnRows, LogitsHook
from executor_svc.slots.metadata import SAMPLING_DTYPES, MetadataType
from executor_svc.slots.numbers import SlotNumbers
from executor_svc.slots.tokens import SlotTokens
from kernels.patch_rows import RowField
from kernels.sampling import (
    Allowed,
    Biases,
    LogitEdits,
    Penalties,
    Sampled,
    SamplingColumns,
    VocabularyShard,
    sample,
)
from tandem.errors import SessionLost
from tandem.link.batch import Admission, Float32Column, Int32Column
from tandem.sampling_params import SamplingParams

SAMPLING_FIELDS = tuple(
    RowField(name=name, dtype=getattr(torch, dtype)) for name, dtype in SAMPLING_DTYPES.items()
)
"""
Columns of `SlotSampling.parameters` on a device; rows of padding have zeros, except for top_p.
"""

_GRAPH_PARAMS = frozenset(field.name for field in SAMPLING_FIELDS)
"""Parameters that captured graphs read, by slot."""
_POSITIONAL_PARAMS = frozenset({"min_tokens", "end_ids"})
"""Parameters that change the logits of a slot's first outputs alone; they need no graph later."""
_PROMPT_PARAMS = frozenset({"prompt_logprobs"})
"""Parameters of the prompt alone, which change no draw."""
_OFF_IN_GRAPHS = tuple(
    (param.name, param.default)
    for param in fields(SamplingParams)
    if param.name not in _GRAPH_PARAMS | _POSITIONAL_PARAMS | _PROMPT_PARAMS
)
"""
All other parameters, those of a later release too, with their defaults. A captured graph ignores
them, so that it may draw only for slots where they have their defaults.
"""


class _IdLists:
    """A list of ids with a number each, by slot, padded to the longest list so far."""

    def __init__(self, num_slots: int) -> None:
        self.count = np.zeros(num_slots, np.int64)
        self._ids = np.zeros((num_slots, 0), np.int64)
        self._values = np.zeros((num_slots, 0), np.float32)

    def put(self, slot: int, ids: NDArray[np.int64], values: Float32Column) -> None:
        """Replace a slot's list."""
        count, width = len(ids), self._ids.shape[1]
        if count > width:
            more = ((0, 0), (0, count - width))
            self._ids, self._values = np.pad(self._ids, more), np.pad(self._values, more)
        self.count[slot] = count
        self._ids[slot, :count], self._values[slot, :count] = ids, values

    def of(self, slot: Int32Column) -> tuple[NDArray[np.int64], NDArray[np.int64], Float32Column]:
        """Return these slots' entries: index of the slot in `slot`, id and number, ``[E]`` each."""
        is_entry = np.arange(self._ids.shape[1]) < self.count[slot][:, None]
        row, column = is_entry.nonzero()
        return row, self._ids[slot[row], column], self._values[slot[row], column]


class SlotSampling:
    """
    Sampling parameters and metadata by slot; owned by the runner.

    A feature that no slot has ever used costs a step nothing; one that no row of the step uses
    costs one look at a column.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        *,
        hook: LogitsHook | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._hook = hook
        types = [MetadataType(name, dtype, False) for name, dtype in SAMPLING_DTYPES.items()]
        by_label = {one.label: one for one in (*types, *(() if hook is None else hook.types))}
        self._numbers = SlotNumbers(num_slots, by_label.values(), device)
        self._has_filters = np.zeros(num_slots, np.bool_)
        """True for slots that draw with noise and have min_p, top_k or top_p set."""
        self._has_penalties = np.zeros(num_slots, np.bool_)
        self._repetition = np.ones(num_slots, np.float32)
        self._frequency = np.zeros(num_slots, np.float32)
        self._presence = np.zeros(num_slots, np.float32)
        self._prompt_len = np.zeros(num_slots, np.int64)
        self._first_end = np.zeros(num_slots, np.int64)
        """Position from which a slot's end ids may be sampled."""
        self._end_ids = _IdLists(num_slots)
        self._biases = _IdLists(num_slots)
        self._allowed = _IdLists(num_slots)
        self._logprob_ids = _IdLists(num_slots)
        self._num_logprobs = np.full(num_slots, -1, np.int64)
        self._beyond_graphs = np.zeros(num_slots, np.bool_)
        """True for slots with a parameter of `_OFF_IN_GRAPHS` away from its default."""
        self._num_prompt_logprobs = np.full(num_slots, -1, np.int64)
        self._any_edits = self._any_min_p = self._any_logprobs = self._any_beyond_graphs = False
        self._any_prompt_logprobs = False

    def admit(self, admission: Admission) -> None:
        """Take over a slot; ids outside the vocabulary have no logit and are left out."""
        slot, sampling = admission.slot, admission.sampling
        numbers = {name: getattr(sampling, name) for name in SAMPLING_DTYPES}
        numbers["seed"] = int(np.uint64(sampling.seed).astype(np.int64))
        self._numbers.put(slot, numbers | dict(sampling.row_metadata))
        self._any_min_p |= sampling.min_p > 0
        is_greedy = sampling.temperature <= 0 or sampling.top_k == 1
        self._has_filters[slot] = not is_greedy and (
            sampling.min_p > 0 or sampling.top_k > 0 or sampling.top_p < 1
        )
        self._num_logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self._any_logprobs |= sampling.logprobs is not None
        requested = sampling.logprob_token_ids
        self._check_known(slot, "logprob_ids", requested)
        self._put(self._logprob_ids, slot, list(requested), [0.0] * len(requested))
        asked = sampling.prompt_logprobs
        self._num_prompt_logprobs[slot] = -1 if asked is None else asked
        self._any_prompt_logprobs |= asked is not None
        beyond = any(getattr(sampling, name) != off for name, off in _OFF_IN_GRAPHS)
        self._beyond_graphs[slot] = beyond
        self._any_beyond_graphs |= beyond
        self._admit_edits(admission)

    def parameters(
        self, slot: Int32Column
    ) -> Mapping[str, NDArray[np.int32 | np.int64 | np.float32]]:
        """Return the parameters that stay as they are while slots decode, by column names."""
        return {name: self._numbers.of(name, slot) for name in SAMPLING_DTYPES}

    def has_filters(self, slot: Int32Column) -> bool:
        """Tell whether any of these slots draws from fewer than all ids."""
        return bool(self._has_filters[slot].any())

    def drawn_by_graphs(
        self, slot: Int32Column, position: Int32Column, *, margin_eps: float | None
    ) -> bool:
        """
        Tell whether a captured graph may draw the tokens of these slots at `position`.

        It may not if a slot has a parameter that graphs do not know away from its default, if end
        ids are banned at the position, if margins are computed, or if there is a hook.
        """
        if margin_eps is not None or self._hook is not None:
            return False
        if not self._any_beyond_graphs and not self._any_edits:
            return True
        return not (self._beyond_graphs[slot] | self._bans_ends(slot, position)).any()

    def columns(self, slot: Int32Column, position: Int32Column) -> SamplingColumns:
        """Return the columns, on the host, by which slots draw their token at `position`."""
        found = {name: torch.from_numpy(one) for name, one in self.parameters(slot).items()}
        if not self._any_min_p:
            found.pop("min_p")
        return SamplingColumns(**found, position=torch.from_numpy(position.astype(np.int64)))

    def draw(
        self,
        logits: Tensor,
        slot: Int32Column,
        position: Int32Column,
        tokens: SlotTokens,
        *,
        margin_eps: float | None,
        shard: VocabularyShard | None,
    ) -> Sampled:
        """
        Draw the tokens of slots at `position` from their logits as their requests ask, after the
        hook changed these; `margin_eps` and `shard` are as in `kernels.sampling.sample`.
        """
        if self._hook is not None:
            logits = self._hook.changed(logits, DrawnRows(self._numbers, tokens, slot, position))
        return sample(
            logits,
            self.columns(slot, position),
            edits=self.edits(slot, position, tokens),
            num_logprobs=self.num_logprobs(slot),
            logprob_ids=self.logprob_ids(slot),
            margin_eps=margin_eps,
            shard=shard,
        )

    def edits(
        self, slot: Int32Column, position: Int32Column, tokens: SlotTokens
    ) -> LogitEdits | None:
        """Return the edits of slots' logits before their token at `position` is drawn, or None."""
        if not self._any_edits:
            return None
        allowed = self._allowed_of(slot)
        biases = self._biases_of(slot, position)
        penalties = self._penalties_of(slot, position, tokens)
        if allowed is None and biases is None and penalties is None:
            return None
        return LogitEdits(allowed=allowed, biases=biases, penalties=penalties)

    def num_logprobs(self, slot: Int32Column) -> torch.Tensor | None:
        """
        Return the number of top logprobs to report for each slot's token, int64, -1 for none at
        all; None if no slot asks for logprobs.
        """
        if not self._any_logprobs:
            return None
        asked = self._num_logprobs[slot]
        return torch.from_numpy(asked) if (asked >= 0).any() else None

    def prompt_logprobs(
        self, slot: Int32Column
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """
        Return the number of top logprobs to report for each prompt token of these slots, -1 for
        none at all, and the lengths of their prompts; None if no slot ever asked.
        """
        if not self._any_prompt_logprobs:
            return None
        return self._num_prompt_logprobs[slot], self._prompt_len[slot]

    def logprob_ids(self, slot: Int32Column) -> torch.Tensor | None:
        """
        Return the ids whose logprobs each slot requests, int64 ``[R, W]``, -1 after the last; None
        if there are none.
        """
        count = self._logprob_ids.count[slot]
        if not count.any():
            return None
        _, ids, _ = self._logprob_ids.of(slot)
        found = np.full((len(slot), int(count.max())), -1, np.int64)
        found[np.arange(found.shape[1]) < count[:, None]] = ids
        return torch.from_numpy(found)

    def _admit_edits(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        self._prompt_len[slot] = admission.num_prompt_tokens
        self._has_penalties[slot] = sampling.has_penalties
        self._repetition[slot] = sampling.repetition_penalty
        self._frequency[slot] = sampling.frequency_penalty
        self._presence[slot] = sampling.presence_penalty
        self._first_end[slot] = admission.num_prompt_tokens + sampling.min_tokens
        bias = dict(sampling.logit_bias)
        self._put(self._biases, slot, list(bias), list(bias.values()))
        end_ids = sampling.end_ids if sampling.min_tokens else ()
        self._put(self._end_ids, slot, list(end_ids), [-np.inf] * len(end_ids))
        self._admit_allowed(slot, sampling.allowed_token_ids)
        self._any_edits |= bool(sampling.allowed_token_ids)
        self._any_edits |= sampling.has_penalties or bool(bias) or bool(end_ids)

    def _admit_allowed(self, slot: int, ids: tuple[int, ...]) -> None:
        self._check_known(slot, "allowed_ids", ids)  # none left would allow all
        self._put(self._allowed, slot, list(ids), [0.0] * len(ids))

    def _check_known(self, slot: int, name: str, ids: tuple[int, ...]) -> None:
        outside = [token_id for token_id in ids if not 0 <= token_id < self._vocab_size]
        if outside:
            raise SessionLost(
                f"{name} of slot {slot} has {outside[0]}, outside [0, {self._vocab_size})"
            )

    def _put(self, lists: _IdLists, slot: int, ids: list[int], values: list[float]) -> None:
        if not ids:
            lists.count[slot] = 0
            return
        column = np.array(ids, np.int64)
        is_known = (column >= 0) & (column < self._vocab_size)
        lists.put(slot, column[is_known], np.array(values, np.float32)[is_known])

    def _allowed_of(self, slot: Int32Column) -> Allowed | None:
        if not self._allowed.count[slot].any():
            return None
        row, ids, _ = self._allowed.of(slot)
        return Allowed(row=torch.from_numpy(row), token=torch.from_numpy(ids))

    def _bans_ends(self, slot: Int32Column, position: Int32Column) -> NDArray[np.bool_]:
        """Tell for each slot whether its end ids may not be sampled at its position."""
        return (self._end_ids.count[slot] > 0) & (position < self._first_end[slot])

    def _biases_of(self, slot: Int32Column, position: Int32Column) -> Biases | None:
        biased = (self._biases.count[slot] > 0).nonzero()[0]
        ending = self._bans_ends(slot, position).nonzero()[0]
        if not len(biased) and not len(ending):
            return None
        entries = []
        for rows, lists in ((biased, self._biases), (ending, self._end_ids)):
            row, ids, values = lists.of(slot[rows])
            entries.append((rows[row], ids, values))
        row, ids, values = (np.concatenate(column) for column in zip(*entries, strict=True))
        return Biases(
            row=torch.from_numpy(row), token=torch.from_numpy(ids), value=torch.from_numpy(values)
        )

    def _penalties_of(
        self, slot: Int32Column, position: Int32Column, tokens: SlotTokens
    ) -> Penalties | None:
        row = self._has_penalties[slot].nonzero()[0]
        if not len(row):
            return None
        slot, position = slot[row], position[row]
        return Penalties(
            row=torch.from_numpy(row),
            repetition=torch.from_numpy(self._repetition[slot]),
            frequency=torch.from_numpy(self._frequency[slot]),
            presence=torch.from_numpy(self._presence[slot]),
            prompt_len=torch.from_numpy(self._prompt_len[slot]),
            history_len=torch.from_numpy(position.astype(np.int64)),
            history=tokens.histories(slot, int(position.max())),
        )
