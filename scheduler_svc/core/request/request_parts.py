"""
Parts of a request: what it was accepted for, where it is, and what happened to it.

Each part is written by its own methods only.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, kw_only=True)
class Terms:
    """
    Lengths on which a request was accepted.

    Attributes:
        stop_len: Tokens of prompt plus output at which it ends.
        num_prior: Output tokens it came with.
        num_truncated_tokens: Oldest tokens of its prompt that were cut when it was submitted.
        queued_tokens: Uncached tokens of its prompt when it was submitted, for max_queued_tokens.
        num_unfilled: Places of `stop_len` that no token takes: 1 where no output is produced, as
            the place of the first output ends the request.
    """

    stop_len: int
    num_prior: int = 0
    num_truncated_tokens: int = 0
    queued_tokens: int = 0
    num_unfilled: int = 0

    @property
    def longest(self) -> int:
        """Most tokens of prompt and output."""
        return self.stop_len - self.num_unfilled

    def note_queued(self, num_tokens: int) -> None:
        """Note how many tokens must be computed before its first new one; it counts at least 1."""
        self.queued_tokens = max(num_tokens, 1)

    def shorten(self, max_model_len: int) -> None:
        """Let it end at this length at the latest."""
        self.stop_len = min(self.stop_len, max_model_len + self.num_unfilled)


@dataclass(slots=True, eq=False, kw_only=True)
class Place:
    """
    Slot of a request, or what it took along from its latest one.

    Attributes:
        replica: Number of the executor that it was admitted to last, which has all that there is of
            it outside of the queue; None before its first admission.
        slot: Its slot; None while it has none.
        key: Slot and generation that its results in flight carry, once it had a slot.
        planned: Tokens sent for computing in its latest slot, set when it loses that slot.
        applied: Planned tokens with results seen, set when it loses its slot.
    """

    replica: int | None = None
    slot: int | None = None
    key: tuple[int, int] = (-1, 0)
    planned: int = 0
    applied: int = 0

    @property
    def num_in_flight(self) -> int:
        """Tokens of its latest slot with results yet to come, since it lost that slot."""
        return self.planned - self.applied

    def bind(self, replica: int) -> None:
        """Note that it is admitted to an executor."""
        self.replica = replica

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

    def note_waited(self, waited_s: float) -> None:
        """Note how long it has waited in all, as it is admitted."""
        self.waited_s = waited_s

    def note_scheduled(self, now: float) -> None:
        """Note the time of its first admission."""
        self.scheduled_s = now

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

    def forget_digests(self) -> None:
        """Forget all digests, as blocks have another size from now on."""
        self.digests.clear()

    def note_cached(self, num_tokens: int) -> None:
        """Note the prompt tokens that its first admission found cached."""
        self.num_cached_tokens = num_tokens

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
class Scoring:
    """
    Log probabilities of a request's prompt tokens, where it asks for them.

    Attributes:
        next_position: First prompt position whose log probabilities were not reported yet; the
            first token of a prompt has none.
    """

    next_position: int = 1

    def note_told(self, position: int) -> None:
        """Note that the log probabilities up to this position were reported."""
        self.next_position = position + 1


@dataclass(slots=True, eq=False, kw_only=True)
class Setbacks:
    """
    Preemptions and the like of a request, for rules that treat it better or worse next time.

    Attributes:
        num_preemptions: Number of times it lost its slot, losses of the executor not counted.
        num_out_of_memory: Number of small steps with it alone that ran out of executor memory.
        min_blocks: KV blocks of the executors that it is left to, while there are such, as smaller
            ones lacked memory for it; 0 where it is left to all.
        was_aged: True when it had waited so long by its latest admission that it went ahead of all
            that had not.
        gave_way: True when it lost a slot to a request of better priority; that happens once.
    """

    num_preemptions: int = 0
    num_out_of_memory: int = 0
    min_blocks: int = 0
    was_aged: bool = False
    gave_way: bool = False

    def note_admission(self, *, was_aged: bool) -> None:
        """Note whether it is admitted ahead of others for how long it has waited."""
        self.was_aged = was_aged

    def note_preemption(self) -> None:
        """Count one more loss of its slot."""
        self.num_preemptions += 1

    def note_out_of_memory(self) -> None:
        """Count one more small step with it alone that ran out of memory."""
        self.num_out_of_memory += 1

    def leave_to(self, min_blocks: int) -> None:
        """Leave it to executors with so many KV blocks, on which it counts anew."""
        self.min_blocks, self.num_out_of_memory = min_blocks, 0

    def give_way(self) -> None:
        """Note that a request of better priority takes its slot."""
        self.gave_way = True
