"""Check that the ranks of a model compute alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.errors import InvalidConfig


def check_agreement(facts: Sequence[Mapping[str, str]]) -> None:
    """
    Compare what all ranks found out about their model and machine, as names and values, with what
    rank 0 did. Every rank checks the same list, so that all of them fail or none.

    Raises:
        InvalidConfig: A rank differs; names it and what differs.
    """
    for rank, own in enumerate(facts):
        for name, first in facts[0].items():
            if own[name] != first:
                raise InvalidConfig(
                    f"the ranks of a model must compute alike, but {name} is {own[name]} on rank "
                    f"{rank} and {first} on rank 0"
                )
