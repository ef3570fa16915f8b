"""Beginnings of prompts that a faulty executor obeys; no other prompt begins like them."""

from __future__ import annotations

POISON_MARK = (77, 78, 79, 77)
"""Mark of a row that kills its executor whenever it is computed."""
POISON_LATER_MARK = (78, 77, 79, 78)
"""Mark of a row that kills its executor from the fourth output token on."""
BAD_ROW_MARK = (79, 79, 77, 77)
"""Mark of a row with logits that are not numbers."""
MARK_LEN = 4
