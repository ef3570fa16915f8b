"""Records of the requests of one engine, from submission until their results are delivered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field

import structlog

from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.core.request.events import CoreEvents, Ended, Failed, LogLine, TokenLogprobs
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.frontend.text.output import OutputChunk, OutputText
from tandem.errors import InternalError
from tandem.link.logprobs import TokenLogprob
from tandem.link.results import StepResult
from tandem_embedded.errors import EngineError, engine_error
from tandem_embedded.observe.logs import log_line
from tandem_embedded.params import GenerationParams
from tandem_embedded.results import CompletedChoice, CompletedRequest
from tandem_embedded.tokenizer import Tokenizer, detokenizer_of, output_text

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

_ENDS_WITHOUT_TEXT = {FinishReason.EOS, FinishReason.STOP_TOKEN}


@dataclass(slots=True, eq=False)
class Delivery:
    """Output of a request for the one caller that waits for it."""

    is_streamed: bool
    chunks: deque[tuple[int, OutputChunk]] = field(default_factory=deque)
    """Text that is certain but not taken yet, with its choice; empty unless `is_streamed`."""
    result: CompletedRequest | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """
    One live request.

    Attributes:
        params: Parameters in force, with all defaults filled in.
        ends: Ids that end the output: stop tokens, and end-of-sequence ids unless ignored.
        fills_context: True if the end of the context bounds the output, instead of a number of
            tokens that was asked for.
        delivery: Delivery to a waiting caller; None = the next step returns the result.
    """

    prompt: list[int]
    params: GenerationParams
    ends: frozenset[int]
    fills_context: bool
    seed: int
    delivery: Delivery | None
    request_id: int = -1
    created_at: float = 0.0
    num_truncated: int = 0
    num_cached: int = 0
    choices: list[Choice] = field(default_factory=list)

    @property
    def handles(self) -> range:
        """Handles of its choices in the core."""
        return range(self.request_id, self.request_id + self.params.n)


class Choice:
    """One completion of a live request: its output so far, and its result once it is over."""

    __slots__ = (
        "completed", "entry", "is_stopped", "logprobs", "margins", "number", "output",
        "prompt_logprobs", "text_error", "texts", "tokens",
    )  # fmt: skip

    def __init__(self, entry: Entry, number: int) -> None:
        self.entry = entry
        self.number = number
        self.output: OutputText | None = None
        """Incremental text of the output; None if the output is detokenized only at its end."""
        self.is_stopped = False
        """True after a stop string is complete; tokens that follow do not count."""
        self.texts: list[str] = []
        """Pieces of text that are certain."""
        self.text_error: InternalError | None = None
        """Error of a choice whose text the tokenizer failed to make; no more of it is made."""
        self.tokens: list[int] = []
        self.margins: dict[int, float] = {}
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.completed: CompletedChoice | None = None


class Ledger:
    """
    Live requests of an engine, and the completed ones made from the core's events. Not thread-safe:
    the engine guards it with its lock.

    A choice whose text the tokenizer fails to make ends with an error of its own: whatever else is
    going on when that comes out, in a step or a suspension, has no part in it.

    A request that is over in the core is live here until `settle` tells of it.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._completed: list[CompletedRequest] = []
        self._ending: list[Choice] = []
        """Choices that a stop string or an error has ended, which `settle` ends in the core."""
        self._tokens: Iterator[tuple[int, int]] = iter(())
        """Events that are not recorded yet, as the other iterators: each is taken once."""
        self._logprobs: Iterator[TokenLogprobs] = iter(())
        self._ended: Iterator[Ended] = iter(())
        self._failed: Iterator[Failed] = iter(())
        self._lines: Iterator[LogLine] = iter(())
        self._live: dict[int, Choice] = {}
        """Choices that are not over, by handle."""
        self.entries: dict[int, Entry] = {}
        """Live requests by id."""
        self.num_failed_at_end = 0
        """Number of choices that ended well in the core, and whose text failed."""

    @property
    def num_undelivered(self) -> int:
        """Number of completed requests that `take` has not returned yet."""
        return len(self._completed)

    @property
    def handles(self) -> KeysView[int]:
        """Handles of the choices that are not over."""
        return self._live.keys()

    def add(self, entry: Entry) -> None:
        """Add a request that the core has accepted."""
        delivery = entry.delivery
        follows = bool(entry.params.stop) or (delivery is not None and delivery.is_streamed)
        for number, handle in enumerate(entry.handles):
            choice = Choice(entry, number)
            entry.choices.append(choice)
            self._live[handle] = choice
            if follows:
                self._follow(choice)
        self.entries[entry.request_id] = entry

    def note_margins(self, port: ExecutorPort, result: StepResult) -> None:
        """Record the margins of an executor's result that is about to be applied."""
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
            owner = port.row_owner(slot, generation)
            if owner is not None:
                choice = self._live[owner]
                choice.margins[position - len(choice.entry.prompt)] = margin

    def settle(self, core: Scheduler, now: float) -> None:
        """
        Process all events of the core, and end the choices there that their text ends.

        It goes on where an interrupt, such as Ctrl-C, broke the last call off. What that one was
        about to record fails: its choice with the text, or its request when the core has no more.
        """
        self._record()
        self._note(core.take_events())
        while self._ending:
            choice = self._ending.pop()
            if choice.completed is None:
                self._end(core, choice, now)
                self._note(core.take_events())
        if self.entries and not core.num_requests:
            self._end_forgotten()

    def take(self) -> list[CompletedRequest]:
        """Return the completed requests, each once, in the order they completed."""
        completed, self._completed = self._completed, []
        return completed

    def _end(self, core: Scheduler, choice: Choice, now: float) -> None:
        handle = choice.entry.handles[choice.number]
        if choice.text_error is not None:
            core.fail_handles([handle], choice.text_error, now)
        else:
            assert choice.output is not None
            core.end_handle(handle, FinishReason.STOP_STRING, now, choice.output.num_tokens)

    def _note(self, events: CoreEvents) -> None:
        self._tokens = zip(events.token_handle.tolist(), events.token.tolist(), strict=True)
        self._logprobs, self._ended = iter(events.logprobs), iter(events.ended)
        self._failed, self._lines = iter(events.failed), iter(events.log_lines)
        self._record()

    def _record(self) -> None:
        """Record the events that are not yet."""
        for handle, token in self._tokens:
            self._push(self._live[handle], token)
        for told in self._logprobs:
            self._note_logprobs(told)
        for ended in self._ended:
            self._complete(self._live.pop(ended.handle), ended, None)
        for failed in self._failed:
            self._complete(self._live.pop(failed.handle), None, engine_error(failed.error))
        for line in self._lines:
            log_line(line)

    def _end_forgotten(self) -> None:
        """End requests that the core has no more, whose end was not recorded for an interrupt."""
        for entry in list(self.entries.values()):
            message = f"the end of request {entry.request_id} was not recorded: an interrupt came"
            for choice, handle in zip(entry.choices, entry.handles, strict=True):
                self._live.pop(handle, None)
                if choice.completed is None:
                    self._complete(choice, None, engine_error(InternalError(message)))
            if entry.request_id in self.entries:
                self._deliver_if_over(entry)

    def _note_logprobs(self, told: TokenLogprobs) -> None:
        entries = zip(told.handle.tolist(), told.columns.entries(), strict=True)
        if told.rank is None:
            for handle, logprob in entries:
                self._live[handle].logprobs.append(logprob)
            return
        for (handle, logprob), rank in zip(entries, told.rank.tolist(), strict=True):
            self._live[handle].prompt_logprobs.append(logprob._replace(rank=rank))

    def _push(self, choice: Choice, token: int) -> None:
        choice.tokens.append(token)
        output = choice.output
        if output is None or choice.is_stopped or choice.text_error is not None:
            return
        try:
            output.push_all([token])
            chunk = output.take()
        except Exception as error:  # noqa: BLE001  # whatever the tokenizer raises
            self._note_text_error(choice, error)
            return
        except BaseException as interrupt:
            self._note_text_error(choice, interrupt)  # the token may be missing in the text
            raise
        if output.stopped is not None:
            choice.is_stopped = True
            self._ending.append(choice)
        self._release(choice, chunk)

    def _note_text_error(self, choice: Choice, error: BaseException) -> None:
        """Let a choice fail, as the tokenizer raised an error."""
        request_id = choice.entry.request_id
        # The text of the error may quote the output, which is for the caller alone.
        error_type = type(error).__name__
        _log.warning("output_not_decoded", request_id=request_id, error=error_type)
        message = f"the tokenizer failed to decode an output of request {request_id}: {error!r}"
        # This may be the caller's own tokenizer, but no reason stands for code of theirs.
        choice.text_error = InternalError(message)
        self._ending.append(choice)

    def _release(self, choice: Choice, chunk: OutputChunk | None) -> None:
        if chunk is None:
            return
        choice.texts.append(chunk.text)
        delivery = choice.entry.delivery
        if delivery is not None and delivery.is_streamed:
            delivery.chunks.append((choice.number, chunk))

    def _complete(self, choice: Choice, ended: Ended | None, error: EngineError | None) -> None:
        entry, reason = choice.entry, None if ended is None else ended.reason
        text, stop_string = self._end_text(choice, reason)
        if choice.text_error is not None:
            self.num_failed_at_end += ended is not None
            reason, error = None, error or engine_error(choice.text_error)
        elif stop_string is not None:
            reason = FinishReason.STOP_STRING
        num_tokens = len(choice.tokens)
        if ended is not None and choice.number == 0:
            entry.num_cached = ended.num_cached_tokens
        choice.completed = CompletedChoice(
            output_text=text,
            output_tokens=choice.tokens,
            finish_reason=reason,
            error=error,
            stop_string=stop_string,
            num_preemptions=0 if ended is None else ended.num_preemptions,
            margins=[choice.margins[at] for at in range(num_tokens)] if choice.margins else [],
            logprobs=choice.logprobs[:num_tokens],
            prompt_logprobs=choice.prompt_logprobs,
        )
        self._deliver_if_over(entry)

    def _end_text(self, choice: Choice, reason: FinishReason | None) -> tuple[str, str | None]:
        """Return the text of an output that is over, cut at a stop string, and that string."""
        output = choice.output
        if choice.text_error is None:
            try:
                self._finish_text(choice, reason)
            except Exception as error:  # noqa: BLE001  # whatever the tokenizer raises
                self._note_text_error(choice, error)
        stopped = None if output is None else output.stopped
        if output is not None and stopped is not None:
            del choice.tokens[output.num_tokens :]
        return "".join(choice.texts), None if stopped is None else stopped.stop

    def _finish_text(self, choice: Choice, reason: FinishReason | None) -> None:
        """Release the text of an output that is over, as far as it is not released yet."""
        entry, output, tokens = choice.entry, choice.output, choice.tokens
        if output is not None:
            self._release(choice, output.finish())
            return
        cut = reason in _ENDS_WITHOUT_TEXT and not entry.params.include_stop
        told = tokens[:-1] if cut else tokens
        choice.texts.append(output_text(self._tokenizer, entry.prompt, told))

    def _deliver_if_over(self, entry: Entry) -> None:
        choices = [one.completed for one in entry.choices if one.completed is not None]
        if len(choices) < entry.params.n:
            return
        del self.entries[entry.request_id]
        result = CompletedRequest(
            request_id=entry.request_id,
            choices=tuple(choices),
            num_prompt_tokens=len(entry.prompt),
            num_truncated_tokens=entry.num_truncated,
            num_cached_tokens=entry.num_cached,
            seed=entry.seed,
        )
        if entry.delivery is None:
            self._completed.append(result)
        else:
            entry.delivery.result = result

    def _follow(self, choice: Choice) -> None:
        """Let a choice's text be made as its tokens come."""
        entry = choice.entry
        try:
            detokenizer = detokenizer_of(self._tokenizer, entry.prompt)
        except Exception as error:  # noqa: BLE001  # whatever the tokenizer raises
            self._note_text_error(choice, error)
            return
        choice.output = OutputText(
            detokenizer,
            stops=entry.params.stop,
            end_token_ids=frozenset() if entry.params.include_stop else entry.ends,
            includes_stop=entry.params.include_stop,
            min_tokens=entry.params.min_tokens,
        )
