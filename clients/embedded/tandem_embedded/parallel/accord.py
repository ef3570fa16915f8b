"""
Agreement of the ranks of one engine on calls, times and seeds.

Every rank has a scheduler core of its own and makes the same calls on it. The core is a pure
function of its calls, so that all plan the same batches, draw the same tokens and return the same
results. What would differ between processes is taken from rank 0 at each meeting: the time, which
orders requests and ends overdue ones, and the seed of a request that gives none. Meetings also
compare what ranks did since the last one.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from tandem.errors import ExecutorLost, InternalError, TandemError

if TYPE_CHECKING:
    from torch import Tensor

    from executor_svc.parallel.process_groups import ProcessGroups


def is_of_computing(error: Exception) -> bool:
    """Return True for an error that PyTorch or a lack of memory causes, rather than a bug."""
    is_bug = isinstance(error, NotImplementedError | RecursionError)  # RuntimeErrors to Python
    return isinstance(error, RuntimeError | MemoryError) and not is_bug


class Meeting(enum.IntEnum):
    """Occasions on which all ranks meet: calls that they make together, and parts of these."""

    START = 1
    SUBMIT = 2
    STEP = 3
    """A step is planned and not begun."""
    RESULTS = 4
    """The results of a step that are due are known and not applied."""
    ABORT = 5
    PREEMPT = 6
    SUSPEND = 7
    RESUME = 8


class Accord:
    """
    The accord of an engine in one process, which has its own time and seeds.

    Attributes:
        is_shared: True where there are other ranks.
        rank: Number of this process among the ranks.
    """

    is_shared = False
    rank = 0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    @property
    def has_stopped(self) -> bool:
        """
        True after an error that ended the agreement: other ranks may have begun other steps than
        this one, or none.
        """
        return False

    def now(self) -> float:
        """Return the time, in monotonic seconds."""
        return self._clock()

    def meet(self, meeting: Meeting, facts: object = None, seed: int = 0) -> int:  # noqa: ARG002  # for several ranks
        """
        Agree on a call; returns the seed for it.

        Args:
            meeting: The call that is made, or a part of it.
            facts: What ranks must have in common: arguments, or results.
            seed: Seed of our own, from 0 to 2^64 - 1.

        Raises:
            InternalError: Ranks make different calls, or found different results.
            ExecutorLost: Another rank is gone, or this one has stopped before.
        """
        return seed

    def stop(self, error: Exception) -> None:
        """
        End the agreement after an error that other ranks may not have. Without other ranks nothing
        ends, and the caller goes on.

        Raises:
            ExecutorLost: There are other ranks, and the computation failed.
            Exception: There are other ranks; the error itself, if it says what it is or is a bug.
        """

    def close(self) -> None:
        """Let go of the other ranks: nothing is agreed on any more."""


class RanksAccord(Accord):
    """The accord of an engine on several ranks; between meetings time stands still."""

    is_shared = True

    def __init__(self, clock: Callable[[], float], groups: ProcessGroups, *, is_own: bool) -> None:
        """
        Args:
            clock: Clock in monotonic seconds; that of rank 0 counts.
            groups: The ranks.
            is_own: True for groups that nothing else uses, which `close` destroys.
        """
        super().__init__(clock)
        self._is_own = is_own
        self._group = groups.world
        self.rank, self._size = groups.rank, groups.size
        known = (groups.tensor, groups.pipeline, groups.tokens, groups.world)
        self._groups = tuple(dict.fromkeys(one for one in known if one is not None))
        self._now = 0.0
        self._why_stopped: str | None = None
        self.meet(Meeting.START)

    @property
    def has_stopped(self) -> bool:
        """See `Accord.has_stopped`."""
        return self._why_stopped is not None

    def now(self) -> float:
        """Return rank 0's time at the last meeting."""
        return self._now

    def meet(self, meeting: Meeting, facts: object = None, seed: int = 0) -> int:
        """See `Accord.meet`."""
        self._check_going()
        if not self._groups:  # closed
            return seed
        clock = struct.unpack("<q", struct.pack("<d", self._clock()))[0]
        own = [int(meeting), _digest(facts), clock, seed - (seed >> 63 << 64)]
        try:
            told = self._gathered(own)
        except RuntimeError as error:
            self.stop(error)
        for rank, one in enumerate(told):
            if one[:2] != told[0][:2]:
                text = _difference(rank, Meeting(one[0]), Meeting(told[0][0]))
                self.stop(InternalError(text))
        self._now = max(self._now, struct.unpack("<d", struct.pack("<q", told[0][2]))[0])
        return told[0][3] % 2**64

    def stop(self, error: Exception) -> NoReturn:
        """See `Accord.stop`: ranks never meet again, as they stopped at different places."""
        text = error.message if isinstance(error, TandemError) else str(error) or repr(error)
        why = self._why_stopped = text.partition("\n")[0]
        if is_of_computing(error):
            raise ExecutorLost(f"{self._rank_text()} cannot go on: {why}") from error
        raise error

    def close(self) -> None:
        """See `Accord.close`; nothing of the engine refers to the groups then."""
        from torch import distributed  # noqa: PLC0415  # there are groups, so it is there

        groups, self._groups, self._group = self._groups, (), None
        for group in groups:
            if self._is_own and distributed.is_initialized():
                distributed.destroy_process_group(group)

    def _check_going(self) -> None:
        """Raise ExecutorLost if the ranks never meet again."""
        if self.has_stopped:
            message = (
                f"{self._rank_text()} has stopped ({self._why_stopped}), and ranks that stopped at "
                "different places never meet again: end all processes and start them anew"
            )
            raise ExecutorLost(message)

    def _rank_text(self) -> str:
        return f"rank {self.rank} of the model"

    def _gathered(self, own: list[int]) -> list[list[int]]:
        # These import PyTorch, which is there since there are groups.
        import torch  # noqa: PLC0415
        from torch import distributed  # noqa: PLC0415

        device = "cuda" if distributed.get_backend(self._group) == "nccl" else "cpu"
        given = torch.tensor(own, dtype=torch.int64, device=device)
        told: list[Tensor] = [torch.empty_like(given) for _ in range(self._size)]
        distributed.all_gather(told, given, group=self._group)
        return [one.tolist() for one in told]


def accord_of(
    clock: Callable[[], float], groups: ProcessGroups | None, *, is_own: bool = False
) -> Accord:
    """Return the accord of an engine's ranks, or of one without any; all ranks call it together."""
    return Accord(clock) if groups is None else RanksAccord(clock, groups, is_own=is_own)


def _digest(facts: object) -> int:
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _difference(rank: int, meeting: Meeting, first: Meeting) -> str:
    if meeting is not first:
        return (
            f"the ranks of a model must make the same calls in the same order, but rank {rank} "
            f"made {meeting.name} and rank 0 {first.name}"
        )
    if meeting is Meeting.STEP:
        return f"rank {rank} planned another step than rank 0"
    if meeting is Meeting.RESULTS:
        return f"rank {rank} drew other tokens than rank 0"
    return f"rank {rank} made {meeting.name} with other arguments than rank 0"
