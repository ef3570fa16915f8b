"""Which rank of a model this process is, and where rank 0 is met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.errors import InvalidConfig

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
"""Port at which ranks meet where the launcher names none, as in torchrun."""
PARENT_VARIABLE = "TANDEM_RANK_PARENT"
"""Variable by which rank 0 tells the ranks that it starts its process id: they end with it."""
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
_LEADER_WORKER_SET = ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """
    The place of this process among the ranks of its model.

    Attributes:
        rank: Its rank; rank 0 serves.
        size: Number of ranks.
        pp_size: Number of stages that they make up, of as many ranks each.
        local_rank: Its number among the ranks of this machine, which is that of its GPU.
        host: Host of rank 0.
        port: Port where ranks meet; 0 where rank 0 takes a free one.
        parent: Process id of rank 0, where that started this process.
        starts_others: True if this is rank 0, and no launcher starts the others.
        has_store: True if the launcher serves the store in which ranks meet, as torchrun does.
        attempt: Number of this start in such a store, which outlives the ranks.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    pp_size: int = 1
    parent: int | None = None
    starts_others: bool = False
    has_store: bool = False
    attempt: str = "0"

    @property
    def tp_size(self) -> int:
        """Number of ranks of each stage."""
        return self.size // self.pp_size


def place_of(tp_size: int, environ: Mapping[str, str], *, pp_size: int = 1) -> RankPlace:
    """
    Return the place that a launcher gives this process, or that of a rank 0 without one.

    Args:
        tp_size: Number of ranks of each stage as set.
        environ: The environment: variables of torchrun, or of a Kubernetes LeaderWorkerSet.
        pp_size: Number of stages as set.

    Raises:
        InvalidConfig: A variable is malformed, or they speak of another number of ranks.
    """
    alone = RankPlace(
        rank=0,
        size=tp_size * pp_size,
        pp_size=pp_size,
        local_rank=0,
        host=LOOPBACK,
        port=0,
        starts_others=True,
    )
    for names in (_TORCHRUN, _LEADER_WORKER_SET):
        if all(environ.get(name) for name in names):
            return _launched(alone, environ, *names)
    return alone


def _launched(
    alone: RankPlace, environ: Mapping[str, str], rank_name: str, size_name: str, host_name: str
) -> RankPlace:
    size, pp_size = alone.size, alone.pp_size
    rank = _number(environ, rank_name)
    launched = _number(environ, size_name)
    if launched != size:
        product = "" if pp_size == 1 else f" and pp_size {pp_size}, together {size}"
        raise InvalidConfig(
            f"tp_size is {alone.tp_size}{product}, but the launcher of this process speaks of "
            f"{launched} ranks ({size_name}): set both to the same number"
        )
    if rank >= size:
        raise InvalidConfig(f"{rank_name} must be below {size_name}, {size}, got {rank}")
    parent = environ.get(PARENT_VARIABLE)
    return RankPlace(
        rank=rank,
        size=size,
        pp_size=pp_size,
        local_rank=_number(environ, "LOCAL_RANK", rank if rank_name == "RANK" else 0),
        host=environ[host_name],
        port=_number(environ, "MASTER_PORT", DEFAULT_PORT),
        parent=None if parent is None else int(parent),
        has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if not text and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise InvalidConfig(f"{name} must be a number of 0 or more, got {text!r}")
    return int(text)
