"""
Results of steps of a model of several stages: the last stage samples, and all others get its tokens
where their next steps may need them.

The first stage, with the rank that answers, gets all that a result holds, and so do others where
every rank answers. Nothing tells the shapes: they follow from the batch, which all stages have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from executor_svc.device.queue import DeviceQueue, Mark
from executor_svc.parallel.pipeline import StageLink
from executor_svc.slots.sampling import SlotSampling
from executor_svc.slots.tokens import SlotTokens
from executor_svc.step.batch_inputs import SamplingRows
from executor_svc.step.build_graphs import StepParts
from executor_svc.step.pending_step import Launched, fetch_sampled
from executor_svc.step.prompt_scores import PromptScores, ScoredTokens
from kernels.sampling import Logprobs, Sampled


class StageResults:
    """
    One stage's end of the way that results take: the last stage samples, those that answer have the
    same results, and others have the tokens alone.
    """

    def __init__(
        self,
        link: StageLink,
        tokens: SlotTokens,
        sampling: SlotSampling,
        *,
        vocab_size: int,
        with_margin: bool,
    ) -> None:
        """
        Args:
            link: Transfers to the other stages.
            tokens: Token histories of the slots.
            sampling: Sampling parameters of the slots.
            vocab_size: Number of logits of a row.
            with_margin: Margins are collected.
        """
        self._link = link
        self._tokens = tokens
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._with_margin = with_margin
        self._new = partial(torch.empty, device=tokens.history.device)

    @property
    def is_first(self) -> bool:
        """True for the stage that reads token ids, whose rank 0 answers."""
        return self._link.is_first

    @property
    def is_last(self) -> bool:
        """True for the stage that samples."""
        return self._link.is_last

    def send(self, sampled: Sampled, scores: PromptScores | None, *, num_tokens: int) -> None:
        """Send the results of a step of so many tokens; the other stages call `receive`."""
        token = torch.where(sampled.valid, sampled.token, -1).to(torch.int32)
        if len(token) == 0 and num_tokens:
            token = torch.zeros(1, dtype=torch.int32, device=token.device)
        self._link.send_back(token, _beside(sampled, scores))

    def receive(
        self,
        rows: SamplingRows,
        scored: ScoredTokens | None,
        started: Mark,
        forwarded: Mark,
        queue: DeviceQueue,
        *,
        num_tokens: int,
    ) -> Launched:
        """
        Begin to receive a step's results, and note its tokens as late ones. A step that computes
        tokens and samples none gets one number, by which it is known that the last stage is done.

        Args:
            rows: The rows that sample.
            scored: The prompt tokens that the step scores.
            started: As in `Launched`.
            forwarded: As in `Launched`.
            queue: Queue of the device.
            num_tokens: Number of tokens that the step computes.
        """
        count = len(rows.slot)
        sent = self._new(max(count, min(num_tokens, 1)), dtype=torch.int32)
        token = sent[:count]
        sampled, scores = Sampled(token=token, valid=token), None
        if self._link.answers:
            sampled = replace(sampled, margin=self._margin(rows), logprobs=self._logprobs(rows))
            scores = None if scored is None else self._scores(scored)
        arrival = self._link.receive_back([sent, *_beside(sampled, scores)])
        if count:
            self._tokens.write_late(rows.slot, rows.position, token, arrival)
        return Launched(
            fetch=partial(_fetch_received, sampled),
            started=started,
            forwarded=forwarded,
            scores=scores,
            queue=queue.after(arrival.wait),
        )

    def _margin(self, rows: SamplingRows) -> Tensor | None:
        return self._new(len(rows.slot)) if self._with_margin else None

    def _logprobs(self, rows: SamplingRows) -> Logprobs | None:
        """Return logprobs of the shapes that `sample` gives, with undefined contents."""
        asked = self._sampling.num_logprobs(rows.slot)
        if asked is None:
            return None
        row = (asked >= 0).nonzero()[:, 0]
        num_top = asked[row].clamp(max=self._vocab_size)
        width, requested, requested_ids = int(num_top.max()), None, None
        if (ids := self._sampling.logprob_ids(rows.slot)) is not None:
            width, requested_ids = max(1, width), ids[row]  # they are told from the best id's
            requested = self._new(requested_ids.shape)
        return Logprobs(
            row=row,
            num_top=num_top,
            chosen=self._new(len(row)),
            top_token=self._new(len(row), width, dtype=torch.int64),
            top=self._new(len(row), width),
            requested_ids=requested_ids,
            requested=requested,
        )

    def _scores(self, scored: ScoredTokens) -> PromptScores:
        """Return scores of the shapes that `score` gives, with undefined contents."""
        count = len(scored.slot)
        width = min(int(scored.num_top.max()), self._vocab_size)
        return PromptScores(
            tokens=scored,
            valid=self._new(count, dtype=torch.bool),
            chosen=self._new(count),
            rank=self._new(count, dtype=torch.int64),
            top_token=self._new(count, width, dtype=torch.int64),
            top=self._new(count, width),
        )


def stage_results(parts: StepParts) -> StageResults | None:
    """Return the way that results of a runner's steps take; None for a model of one stage."""
    decoder = parts.decoder
    if decoder.link is None:
        return None
    return StageResults(
        decoder.link,
        parts.tokens,
        parts.sampling,
        vocab_size=decoder.vocab_size,
        with_margin=parts.margin_eps is not None,
    )


def _beside(sampled: Sampled, scores: PromptScores | None) -> list[Tensor]:
    """Return what a result on a device holds beside tokens, in the order in which it travels."""
    told = sampled.logprobs
    found = [sampled.margin]
    if told is not None:
        found += [told.chosen, told.top_token, told.top, told.requested]
    if scores is not None:
        found += [scores.valid, scores.chosen, scores.rank, scores.top_token, scores.top]
    return [tensor for tensor in found if tensor is not None]


def _fetch_received(sampled: Sampled, queue: DeviceQueue) -> Callable[[], Sampled]:
    """As `fetch_sampled`, of tokens that are below 0 where not valid."""
    collect = fetch_sampled(sampled, queue)

    def known() -> Sampled:
        found = collect()
        token = found.token.clamp(min=0).to(torch.int64)
        return replace(found, token=token, valid=found.token >= 0)

    return known
