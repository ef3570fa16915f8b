"""
Cost of TLS on the public port: the same streams with and without it, in turns.

Load of other programs comes and goes during a run. The order changes from turn to turn and each
turn has a ratio of its own, so the spread of the ratios says how far the median can be trusted.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem_bench.command_line import print_line, print_row
from tandem_bench.stream.certificate import SelfMadeCertificate

_HEADINGS = (
    "turn",
    "plain tokens/s",
    "TLS tokens/s",
    "ratio",
    "plain us/token",
    "TLS us/token",
    "CPU ratio",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """
    Result of one measurement.

    Attributes:
        tokens_per_s: Tokens that all clients got, per second.
        scheduler_us_per_token: CPU of the core and all frontends per token, microseconds.
    """

    tokens_per_s: float
    scheduler_us_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One measurement in plain text and one with TLS; ratios are those of TLS to plain text."""

    plain: Rates
    tls: Rates

    @property
    def tokens_ratio(self) -> float:
        """Tokens per second with TLS, as a multiple of those in plain text."""
        return self.tls.tokens_per_s / self.plain.tokens_per_s

    @property
    def cpu_ratio(self) -> float:
        """CPU per token with TLS, as a multiple of that in plain text."""
        return self.tls.scheduler_us_per_token / self.plain.scheduler_us_per_token


def compare(
    measure: Callable[[SelfMadeCertificate | None], Rates], num_turns: int, *, as_json: bool
) -> None:
    """
    Measure in turns and print each, then the median of the ratios with the least and the largest.

    Args:
        measure: Measures a service with this certificate on its public port, or in plain text.
        num_turns: Number of turns; every other one begins with TLS.
        as_json: Print one JSON object at the end, and no table.
    """
    turns: list[Turn] = []
    if not as_json:
        print_line("The same streams in plain text and with TLS on the public port, in turns.")
        print_row(_HEADINGS, _HEADINGS)
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as name:
        certificate = SelfMadeCertificate.make(Path(name))
        for number in range(num_turns):
            turns.append(_turn(measure, certificate, is_tls_first=number % 2 == 1))
            if not as_json:
                print_row(_cells(number + 1, turns[-1]), _HEADINGS)
    ratios = {
        "tokens_ratio": spread([turn.tokens_ratio for turn in turns]),
        "cpu_ratio": spread([turn.cpu_ratio for turn in turns]),
    }
    if as_json:
        print_line(json.dumps({"turns": [asdict(turn) for turn in turns], **ratios}))
        return
    for key, what in (("tokens_ratio", "tokens/s"), ("cpu_ratio", "CPU per token")):
        one = ratios[key]
        print_line(
            f"{what} with TLS: {one['median']:.3f} times that in plain text "
            f"(least {one['least']:.3f}, most {one['most']:.3f} of {num_turns} turns)"
        )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median of the values, the least and the largest one."""
    found = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 4) for name, value in found.items()}


def _turn(
    measure: Callable[[SelfMadeCertificate | None], Rates],
    certificate: SelfMadeCertificate,
    *,
    is_tls_first: bool,
) -> Turn:
    if is_tls_first:
        tls = measure(certificate)
        return Turn(plain=measure(None), tls=tls)
    plain = measure(None)
    return Turn(plain=plain, tls=measure(certificate))


def _cells(number: int, turn: Turn) -> list[str]:
    return [
        str(number),
        f"{turn.plain.tokens_per_s:.0f}",
        f"{turn.tls.tokens_per_s:.0f}",
        f"{turn.tokens_ratio:.3f}",
        f"{turn.plain.scheduler_us_per_token:.2f}",
        f"{turn.tls.scheduler_us_per_token:.2f}",
        f"{turn.cpu_ratio:.3f}",
    ]
