"""The requests of one engine, from submission until their result was delivered."""

from __future__ import annotations

import logging

import structlog

from scheduler_svc.core.events import CoreEvents, Ended
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.scheduler import Scheduler
from tandem.link.batch import StepResult
from tandem.link.logprobs import TokenLogprob
from tandem_embedded.errors import EngineError, engine_error
from tandem_embedded.params import GenerationParams
from tandem_embedded.results import CompletedRequest
from tandem_embedded.tokenizer import Tokenizer

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

_ENDS_WITHOUT_TEXT = {FinishReason.EOS, FinishReason.STOP_TOKEN}


class Entry:
    """One live request: what was asked, and its output so far."""

    __slots__ = (
        "created_at", "logprobs", "margins", "num_truncated", "outputs", "params", "prompt", "seed",
    )  # fmt: skip

    def __init__(
        self,
        prompt: list[int],
        params: GenerationParams,
        seed: int,
        created_at: float,
        *,
        num_truncated: int = 0,
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.seed = seed
        self.created_at = created_at
        self.num_truncated = num_truncated
        self.outputs: list[int] = []
        self.margins: dict[int, float] = {}
        self.logprobs: list[TokenLogprob] = []


class Ledger:
    """Turns the core's events into completed requests; whoever drives the core owns it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._completed: list[CompletedRequest] = []
        self.live: dict[int, Entry] = {}

    @property
    def num_undelivered(self) -> int:
        """Completed requests that were not taken."""
        return len(self._completed)

    def note_margins(self, core: Scheduler, result: StepResult) -> None:
        """Remember the margins of a result that is about to be applied."""
        if result.margin is None:
            return
        rows = zip(
            result.slot.tolist(),
            result.generation.tolist(),
            result.position.tolist(),
            result.margin.tolist(),
            strict=True,
        )
        for slot, generation, position, margin in rows:
            owner = core.row_owner(slot, generation)
            if owner is not None:
                entry = self.live[owner]
                entry.margins[position - len(entry.prompt)] = margin

    def note(self, events: CoreEvents) -> None:
        """Take over tokens and ends."""
        for handle, token in zip(events.token_handle.tolist(), events.token.tolist(), strict=True):
            self.live[handle].outputs.append(token)
        for told in events.logprobs:
            for handle, entry in zip(told.handle.tolist(), told.columns.entries(), strict=True):
                self.live[handle].logprobs.append(entry)
        for ended in events.ended:
            self._complete(ended.handle, ended, None)
        for failed in events.failed:
            self._complete(failed.handle, None, engine_error(failed.error))
        for line in events.log_lines:
            _log.log(logging.WARNING if line.is_warning else logging.INFO, line.text)

    def take(self) -> list[CompletedRequest]:
        """Completed requests, each once, in the order they completed."""
        completed, self._completed = self._completed, []
        return completed

    def _complete(self, handle: int, ended: Ended | None, error: EngineError | None) -> None:
        entry, reason = self.live.pop(handle), None if ended is None else ended.reason
        self._completed.append(
            CompletedRequest(
                request_id=handle,
                output_text=self._text(entry.outputs, reason),
                output_tokens=entry.outputs,
                finish_reason=reason,
                error=error,
                num_prompt_tokens=len(entry.prompt),
                seed=entry.seed,
                num_truncated_tokens=entry.num_truncated,
                num_cached_tokens=0 if ended is None else ended.num_cached_tokens,
                num_preemptions=0 if ended is None else ended.num_preemptions,
                margins=[entry.margins[at] for at in range(len(entry.outputs))]
                if entry.margins
                else [],
                logprobs=entry.logprobs,
            )
        )

    def _text(self, outputs: list[int], reason: FinishReason | None) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(outputs[:-1] if reason in _ENDS_WITHOUT_TEXT else outputs)
