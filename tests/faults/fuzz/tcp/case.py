"""Cases of the TCP ports: bytes, and the way in which they are sent."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tests.faults.fuzz.cases import Case


class Manner(enum.Enum):
    """Way in which a connection is used."""

    FINISH = "finish"
    """All bytes, then the end of this side; the server has to close the connection."""
    RESET = "reset"
    """All bytes, then a reset."""
    DRIP = "drip"
    """Bytes in pieces with pauses, then as FINISH."""
    LEAVE_OPEN = "leave open"
    """All bytes; the connection stays open while hundreds of others are made."""


@dataclass(frozen=True, slots=True)
class TcpCase(Case):
    """Bytes for a port; `method` names the attack."""

    manner: Manner = Manner.FINISH
