"""
How large steps may be after the executor ran out of memory in one.

    out of memory in a step of decodes          half as many requests run at a time from now on
    out of memory in a step with prompts        likewise, and steps compute half as many tokens
    so many steps without it                    twice as many again, up to the limits
    out of memory once more                     it takes twice as many steps until then
    so many steps within the limits without it  all that is forgotten
    it was one request alone that did not fit   it fails (`out_of_memory`), and steps grow soon

So what does not fit is cut down until it does, by as many failures as there are halvings, and what
was too much for good is tried again ever more rarely: n steps have about log2(n) failures. Each of
them costs all KV, which is why nothing is tried again as large as it was.

Source: halving and waits that double are as old as congestion control; we know of no serving engine
that applies them to its steps.
"""

from __future__ import annotations

FIRST_PATIENCE_STEPS = 1024
"""Steps that the first failure keeps small."""
SOON_STEPS = 16
"""Steps until steps grow once the request is gone that did not fit."""


class StepRoom:
    """
    What the executor turned out to have memory for.

    Attributes:
        max_rows: Most requests that run; None for as many as the limits allow.
        max_tokens: Most tokens of one step; None likewise.
        patience_steps: Steps after which steps grow if all of them fitted.
    """

    __slots__ = ("_grows_at", "max_rows", "max_tokens", "patience_steps")

    def __init__(self) -> None:
        self.max_rows: int | None = None
        self.max_tokens: int | None = None
        self.patience_steps = 0
        self._grows_at = 0

    def rows(self, limit: int) -> int:
        """Most requests that run, where the limits allow so many."""
        return limit if self.max_rows is None else min(limit, self.max_rows)

    def tokens(self, limit: int) -> int:
        """Most tokens of one step, where the limits allow so many."""
        return limit if self.max_tokens is None else min(limit, self.max_tokens)

    def note_failure(self, num_rows: int, num_tokens: int, num_steps: int) -> None:
        """
        A step ran out of memory.

        Args:
            num_rows: Its rows, at least 1.
            num_tokens: Its tokens; as many as rows where it decoded only.
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
        """What did not fit has left: let steps grow again, though not all at once."""
        self.patience_steps = SOON_STEPS
        self._grows_at = num_steps + SOON_STEPS

    def advance(self, num_steps: int, max_rows: int, max_tokens: int) -> bool:
        """
        Let steps grow if they fitted for long enough; returns whether they did.

        Args:
            num_steps: Results applied in all.
            max_rows: What the limits allow.
            max_tokens: Likewise.
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
