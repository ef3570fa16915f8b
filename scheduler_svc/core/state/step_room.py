"""
Size of steps after the executor ran out of memory in one.

    out of memory in a step of decodes          half as many requests run at a time from now on
    out of memory in a step with prompts        likewise, and steps compute half as many tokens
    `patience_steps` steps without it           both are doubled again, up to the limits
    out of memory once more                     halved as above, and `patience_steps` is doubled
    `patience_steps` steps at the limits        `patience_steps` starts over at the next failure
    one request alone does not fit              it fails (`out_of_memory`), and steps grow soon

So a step that does not fit is halved until it does, at one failure per halving, and a size that
never fits is tried again ever more rarely: n steps have about log2(n) failures. Each failure costs
all KV, which is why a step that failed is not tried again at the same size.

Source: halving and waits that double are as old as congestion control; we know of no serving engine
that applies them to its steps.
"""

from __future__ import annotations

from scheduler_svc.core.invariants import require

FIRST_PATIENCE_STEPS = 1024
"""Number of steps that stay small after the first failure."""
SOON_STEPS = 16
"""Number of steps until steps grow, once the request that did not fit is gone."""


class StepRoom:
    """
    Size of steps for which the executor turned out to have memory.

    Attributes:
        max_rows: Most requests that run; None for as many as the limits allow.
        max_tokens: Most tokens of one step; None likewise.
        patience_steps: Number of steps after which steps grow if all of them fitted.
    """

    __slots__ = ("_grows_at", "max_rows", "max_tokens", "patience_steps")

    def __init__(self) -> None:
        self.max_rows: int | None = None
        self.max_tokens: int | None = None
        self.patience_steps = 0
        self._grows_at = 0

    def rows(self, limit: int) -> int:
        """Return the most requests that may run, at most `limit`."""
        return limit if self.max_rows is None else min(limit, self.max_rows)

    def tokens(self, limit: int) -> int:
        """Return the most tokens that one step may have, at most `limit`."""
        return limit if self.max_tokens is None else min(limit, self.max_tokens)

    def note_failure(self, num_rows: int, num_tokens: int, num_steps: int) -> None:
        """
        Note that a step ran out of memory.

        Args:
            num_rows: Rows of that step, at least 1.
            num_tokens: Tokens of that step; as many as rows where it decoded only.
            num_steps: Results applied in all.
        """
        if self.max_rows is None and num_steps >= self._grows_at:
            self.patience_steps = 0
        self.max_rows = max(self.rows(num_rows) // 2, 1)
        if num_tokens > num_rows:
            self.max_tokens = max(self.tokens(num_tokens) // 2, self.max_rows)
        self.patience_steps = max(2 * self.patience_steps, FIRST_PATIENCE_STEPS)
        self._grows_at = num_steps + self.patience_steps

    def note_culprit_gone(self, num_steps: int) -> None:
        """
        Let steps grow again soon, though not all at once, as the request that did not fit is gone.
        """
        self.patience_steps = SOON_STEPS
        self._grows_at = num_steps + SOON_STEPS

    def run_one(self, num_steps: int) -> None:
        """Run one request at a time, and more again soon, as the executor died of anything."""
        self.max_rows = 1
        self.note_culprit_gone(num_steps)

    def advance(self, num_steps: int, max_rows: int, max_tokens: int) -> bool:
        """
        Let steps grow if they fitted for long enough; returns True if they grew.

        Args:
            num_steps: Results applied in all.
            max_rows: Most running requests that the limits allow.
            max_tokens: Most tokens of one step that the limits allow.
        """
        if self.max_rows is None or num_steps < self._grows_at:
            return False
        self._grows_at = num_steps + self.patience_steps
        self.max_rows *= 2
        if self.max_tokens is not None:
            self.max_tokens *= 2
        if self.rows(max_rows) == max_rows and self.tokens(max_tokens) == max_tokens:
            self.max_rows = self.max_tokens = None
        return True

    def check_integrity(self, num_steps: int) -> None:
        """
        Compare the sizes with one another, and the step at which they grow with `num_steps`, the
        number of results applied in all.

        Raises:
            InternalError: A step may have no row or fewer tokens than rows, or stays small for
                longer than it should.
        """
        max_rows = 0 if self.max_rows is None else self.max_rows
        require(self.max_rows is None or max_rows > 0, "steps have room for no row")
        has_room = self.max_tokens is None or self.max_tokens >= max_rows > 0
        require(has_room, "steps have room for fewer tokens than rows")
        grows_soon = self._grows_at <= num_steps + self.patience_steps
        require(grows_soon, "steps stay small for too long")
