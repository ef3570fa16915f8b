"""Data that the core keeps of a request, from submission to its end."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler_svc.core.request.new_request import NewRequest
from tandem.errors import InternalError
from tandem.link.batch import Int32Column


class FinishReason(enum.IntEnum):
    """Reason why a choice ended; numbers are those of `tandem.common.v1.FinishReason`."""

    EOS = 1
    STOP_TOKEN = 2
    STOP_STRING = 3
    MAX_TOKENS = 4
    CONTEXT_LIMIT = 5
    DEADLINE = 6
    CANCELLED = 7


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
class Terms:
    """
    Lengths on which a request was accepted.

    Attributes:
        stop_len: Tokens of prompt plus output at which it ends.
        num_prior: Output tokens it came with.
        num_truncated_tokens: Oldest tokens of its prompt that were cut when it was submitted.
        queued_tokens: Uncached tokens of its prompt when it was submitted, for max_queued_tokens.
    """

    stop_len: int
    num_prior: int = 0
    num_truncated_tokens: int = 0
    queued_tokens: int = 0

    def note_queued(self, num_tokens: int) -> None:
        """Note how many tokens must be computed before its first new one; it counts at least 1."""
        self.queued_tokens = max(num_tokens, 1)

    def shorten(self, max_model_len: int) -> None:
        """Let it end at this length at the latest."""
        self.stop_len = min(self.stop_len, max_model_len)


@dataclass(slots=True, eq=False, kw_only=True)
class Place:
    """
    Slot of a request, or what it took along from its latest one.

    Attributes:
        slot: Its slot; None while it has none.
        key: Slot and generation that its results in flight carry, once it had a slot.
        planned: Tokens sent for computing in its latest slot, set when it loses that slot.
        applied: Planned tokens with results seen, set when it loses its slot.
    """

    slot: int | None = None
    key: tuple[int, int] = (-1, 0)
    planned: int = 0
    applied: int = 0

    @property
    def num_in_flight(self) -> int:
        """Tokens of its latest slot with results yet to come, since it lost that slot."""
        return self.planned - self.applied

    def enter(self, slot: int, generation: int) -> None:
        """Note that it got a slot, under this generation."""
        self.slot, self.key = slot, (slot, generation)

    def leave(self, planned: int, applied: int) -> None:
        """Note that it lost its slot with so many tokens sent for computing and results seen."""
        self.slot, self.planned, self.applied = None, planned, applied

    def note_applied(self, num_tokens: int) -> None:
        """Note that results of so many more tokens were seen, after it lost its slot."""
        self.applied += num_tokens


@dataclass(slots=True, eq=False, kw_only=True)
class Times:
    """
    Times of a request, on the clock the core is driven with; None before they were reached.

    Attributes:
        scheduled_s: Its first admission.
        first_token_s: Its first token.
        last_token_s: Its latest token, set when it loses its slot.
        waited_s: Seconds it waited in all before its latest admission.
    """

    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    waited_s: float = 0.0

    def note_first_token(self, now: float) -> None:
        """Note the time of its first token."""
        self.first_token_s = now

    def note_token(self, now: float) -> None:
        """Note the time of its latest token, while it has no slot."""
        self.last_token_s = now


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixUse:
    """
    KV that a request shares with others.

    Attributes:
        digests: Digests of its leading full blocks, as far as they were needed.
        writers: Keys, as of `prefix_cache.writer_key`, of the requests that computed the KV it
            found cached.
        num_cached_tokens: Prompt tokens found cached when it was first admitted.
        is_alone: True when it computes everything itself, as KV that it shared may have been wrong.
    """

    digests: list[bytes] = field(default_factory=list)
    writers: frozenset[int] = frozenset()
    num_cached_tokens: int = 0
    is_alone: bool = False

    def add_digests(self, digests: list[bytes]) -> None:
        """Add the digests of the full blocks behind those that are known."""
        self.digests += digests

    def share(self, writers: frozenset[int]) -> None:
        """Note the writers of the KV that it shares from its admission on."""
        self.writers = writers

    def forget_writers(self) -> None:
        """Share no KV any more, as what it computed or found is gone."""
        self.writers = frozenset()

    def share_nothing(self) -> None:
        """Have it compute everything itself from now on."""
        self.forget_writers()
        self.is_alone = True


@dataclass(slots=True, eq=False, kw_only=True)
class Setbacks:
    """
    Preemptions and the like of a request, for rules that treat it better or worse next time.

    Attributes:
        num_preemptions: Number of times it lost its slot, losses of the executor not counted.
        num_out_of_memory: Number of small steps with it alone that ran out of executor memory.
        was_aged: True when it had waited so long by its latest admission that it went ahead of all
            that had not.
        gave_way: True when it lost a slot to a request of better priority; that happens once.
    """

    num_preemptions: int = 0
    num_out_of_memory: int = 0
    was_aged: bool = False
    gave_way: bool = False

    def note_preemption(self) -> None:
        """Count one more loss of its slot."""
        self.num_preemptions += 1

    def note_out_of_memory(self) -> None:
        """Count one more small step with it alone that ran out of memory."""
        self.num_out_of_memory += 1

    def give_way(self) -> None:
        """Note that a request of better priority takes its slot."""
        self.gave_way = True


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

    def ends_by_context(self) -> bool:
        """Return True when the context bounds the output, not the `max_tokens` asked for."""
        is_cut = self.terms.stop_len < self.prompt_len + self.new.max_tokens
        return is_cut or self.new.fills_context

    def known_tokens(self) -> Int32Column:
        """Return prompt and outputs so far, shape ``[P + N]``."""
        return np.concatenate([self.new.prompt, np.array(self.outputs, np.int32)])

    def join(self, choices: list[Request]) -> None:
        """Add it to the live choices of its request, a list that all of these share."""
        choices.append(self)
        self.siblings = choices

    def end_wait(self, waited_s: float, *, was_aged: bool) -> None:
        """Note how long it has waited in all, and if it goes ahead for that, as it is admitted."""
        self.times.waited_s = waited_s
        self.setbacks.was_aged = was_aged

    def note_scheduled(self, now: float, num_cached: int) -> None:
        """Note an admission that found so many tokens cached; only the first one counts."""
        if self.times.scheduled_s is None:
            self.times.scheduled_s = now
            self.prefix.num_cached_tokens = min(num_cached, self.prompt_len)

    def append_output(self, token: int) -> None:
        """Append one output token."""
        self.outputs.append(token)

    def append_column(self, tokens: memoryview) -> None:
        """Append output tokens, given as the bytes of an int32 column."""
        self.outputs.frombytes(tokens)

    def forget_digests(self) -> None:
        """Forget the digests of its blocks, as blocks have another size from now on."""
        self.prefix.digests.clear()
        self.new = replace(self.new, block_digests=b"")

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
