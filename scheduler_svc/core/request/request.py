"""Data that the core keeps of a request, from submission to its end."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.request_parts import (
    Place,
    PrefixUse,
    Scoring,
    Setbacks,
    Terms,
    Times,
)
from tandem.errors import InternalError
from tandem.link.batch import Int32Column
from tandem.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    """Reason why a choice ended; numbers are those of `tandem.common.v1.FinishReason`."""

    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    MAX_TOKENS = 4
    CONTEXT_LIMIT = 5
    DEADLINE = 6
    CANCELLED = 7
    SUPERSEDED = 8


class RequestState(enum.Enum):
    """
    State of a request; it is in exactly one, and moves only as `LEGAL_MOVES` allows.

    PAUSED keeps slot and blocks, but is in no step. DRAINING was preempted while results of it were
    in flight; it waits again once they have come.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"
    DRAINING = "draining"
    ENDED = "ended"


LEGAL_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.ENDED}),
    RequestState.PREFILL: frozenset(
        {RequestState.DECODE, RequestState.DRAINING, RequestState.WAITING, RequestState.ENDED}
    ),
    RequestState.DECODE: frozenset(
        {RequestState.PAUSED, RequestState.DRAINING, RequestState.WAITING, RequestState.ENDED}
    ),
    RequestState.PAUSED: frozenset(
        {RequestState.DECODE, RequestState.DRAINING, RequestState.WAITING, RequestState.ENDED}
    ),
    RequestState.DRAINING: frozenset({RequestState.WAITING, RequestState.ENDED}),
    RequestState.ENDED: frozenset(),
}
"""States to which a request may move from each state."""


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """
    A request in the system; the core is its one owner.

    While it holds a slot its counters live in the slot's columns and its latest tokens in the
    slot's tail; here they are up to date whenever it holds none.

    Attributes:
        new: The request as it was submitted.
        number: Number in the order of arrival; never reused.
        terms: Lengths on which it was accepted.
        state: See `RequestState`.
        outputs: Output tokens so far, those it came with included.
        place: Its slot.
        times: When it was admitted and produced tokens.
        prefix: KV that it shares with others.
        scoring: Log probabilities of its prompt tokens.
        setbacks: Preemptions and the like.
        siblings: The live choices of this request, in order; one list for all of them.
    """

    new: NewRequest
    number: int
    terms: Terms
    state: RequestState = RequestState.WAITING
    outputs: array[int] = field(default_factory=lambda: array("i"))
    place: Place = field(default_factory=Place)
    times: Times = field(default_factory=Times)
    prefix: PrefixUse = field(default_factory=PrefixUse)
    scoring: Scoring = field(default_factory=Scoring)
    setbacks: Setbacks = field(default_factory=Setbacks)
    siblings: list[Request] = field(default_factory=list)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.new.prompt)

    @property
    def num_known(self) -> int:
        """Tokens of prompt and outputs so far."""
        return len(self.new.prompt) + len(self.outputs)

    @property
    def produces(self) -> bool:
        """False for a request whose prompt is scored and that has no output."""
        return self.new.max_tokens > 0

    @property
    def needs_scores(self) -> bool:
        """
        True while log probabilities of its prompt tokens are to be reported, so that every position
        from the first on must be computed: what is cached has no logits.
        """
        asks = self.new.sampling.prompt_logprobs is not None
        return asks and self.scoring.next_position < self.prompt_len

    @property
    def row_sampling(self) -> SamplingParams:
        """Sampling params of its next admission: its prompt is scored once."""
        sampling = self.new.sampling
        if sampling.prompt_logprobs is None or self.needs_scores:
            return sampling
        return replace(sampling, prompt_logprobs=None)

    def ends_by_context(self) -> bool:
        """Return True when the context bounds the output, not the `max_tokens` asked for."""
        is_cut = self.terms.stop_len < self.prompt_len + self.new.max_tokens
        return is_cut or self.new.fills_context

    def known_tokens(self) -> Int32Column:
        """Return prompt and outputs so far, shape ``[P + N]``."""
        return np.concatenate([self.new.prompt, np.array(self.outputs, np.int32)])

    def join(self, choices: list[Request]) -> None:
        """Note the live choices of its request, a list that all of these share."""
        self.siblings = choices

    def end_wait(self, waited_s: float, *, was_aged: bool) -> None:
        """Note how long it has waited in all, and if it goes ahead for that, as it is admitted."""
        self.times.note_waited(waited_s)
        self.setbacks.note_admission(was_aged=was_aged)

    def note_scheduled(self, now: float, num_cached: int) -> None:
        """Note an admission that found so many tokens cached; only the first one counts."""
        if self.times.scheduled_s is None:
            self.times.note_scheduled(now)
            self.prefix.note_cached(min(num_cached, self.prompt_len))

    def append_output(self, token: int) -> None:
        """Append one output token."""
        self.outputs.append(token)

    def append_column(self, tokens: memoryview) -> None:
        """Append output tokens, given as the bytes of an int32 column."""
        self.outputs.frombytes(tokens)

    def forget_digests(self) -> None:
        """Forget the digests of its blocks, as blocks have another size from now on."""
        self.prefix.forget_digests()
        self.new = replace(self.new, block_digests=b"")

    def check_integrity(self) -> None:
        """
        Compare the parts of a live request with one another.

        Raises:
            InternalError: The first invariant that does not hold.
        """
        name, place = self.new.request_id, self.place
        require(self.state is not RequestState.ENDED, f"{name} has ended and is live")
        require(self in self.siblings, f"{name} is none of its own choices")
        require(len(self.outputs) >= self.terms.num_prior, f"{name} lost outputs it came with")
        require(self.num_known < self.terms.stop_len, f"{name} is past its end and is live")
        is_placed = place.slot is None or place.slot == place.key[0]
        require(is_placed, f"{name} has the key of another slot")
        require(place.num_in_flight >= 0, f"{name} computed more than was sent")
        setbacks, first_s, last_s = self.setbacks, self.times.first_token_s, self.times.last_token_s
        least = min(setbacks.num_preemptions, setbacks.num_out_of_memory)
        require(least >= 0, f"{name} has fewer setbacks than none")
        is_in_prompt = 1 <= self.scoring.next_position <= max(self.prompt_len, 1)
        require(is_in_prompt, f"{name} was told more of its prompt than it has")
        is_found = self.prefix.num_cached_tokens <= self.prompt_len
        require(is_found, f"{name} found more tokens cached than it has")
        is_ordered = first_s is None or last_s is None or first_s <= last_s
        require(is_ordered, f"{name} had its first token after its latest")

    def move(self, state: RequestState) -> None:
        """
        Change state.

        Raises:
            InternalError: The move is not legal.
        """
        if state not in LEGAL_MOVES[self.state]:
            message = (
                f"invalid state transition of {self.new.request_id}: {self.state.value} to "
                f"{state.value}"
            )
            raise InternalError(message)
        self.state = state
