"""Cases of the matrix: model families on so many ranks, stages and executors."""

from __future__ import annotations

from dataclasses import dataclass

from tests.model_zoo import FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """
    A family, and the processes that compute it.

    Attributes:
        family: Name of the model's builder.
        tp: Ranks of each stage.
        pp: Stages of each executor.
        dp: Executors.
    """

    family: str
    tp: int
    pp: int
    dp: int

    @property
    def num_processes(self) -> int:
        """Number of processes that compute at the same time."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"{self.family}-tp{self.tp}-pp{self.pp}-dp{self.dp}"


TP, PP, DP = (1, 2, 4), (1, 2), (1, 2)

MATRIX = [
    Case(family=family, tp=tp, pp=pp, dp=dp)
    for family in FAMILIES
    for tp in TP
    for pp in PP
    for dp in DP
]
"""Every family in every shape; that of one process compares an executor with the embedded engine."""

_TURNS = (
    {1: (2, 2), 2: (1, 2)},
    {1: (1, 2), 2: (2, 1)},
    {1: (2, 1), 2: (2, 2)},
)
"""Stages and executors by the ranks of a stage, for families in turn."""
_FOUR_RANKS = ((2, 1), (1, 1), (1, 2))
"""The same for four ranks of the first families; the others take four processes, which is faster."""
PAIRWISE = [
    Case(family=family, tp=tp, pp=pp, dp=dp)
    for number, family in enumerate(FAMILIES)
    for tp, (pp, dp) in (
        *_TURNS[number % len(_TURNS)].items(),
        (4, _FOUR_RANKS[number] if number < len(_FOUR_RANKS) else (1, 1)),
    )
]
"""Cases in which any two values of any two of family, tp, pp and dp meet."""
