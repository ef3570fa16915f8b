"""The definition of patch_rows."""

from __future__ import annotations

from torch import Tensor


def patch_rows(words: Tensor, patch: Tensor) -> None:
    """Write words; arguments are as in the package's `patch_rows`, unchecked."""
    place, word = patch
    is_used = place >= 0
    words[place[is_used].long()] = word[is_used]
