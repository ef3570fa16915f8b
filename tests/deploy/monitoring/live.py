"""
Watch a real system with the real Prometheus: `python -m tests.deploy.monitoring.live`.

Under load every query of the dashboard and every rule must have an answer. Then each fault is
caused, and must bring its alerts and no others; all times of the rules are shortened for that. The
results are written to live_results.md. It takes about twenty minutes, and needs `prometheus`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tandem.errors import TandemError
from tests.deploy.monitoring.live_faults import FAULTS, NOT_CAUSED, Fault, flood
from tests.deploy.monitoring.prometheus import WINDOW, Prometheus
from tests.deploy.monitoring.promql import dashboard_queries, rules
from tests.deploy.monitoring.system import Load, System
from tests.deploy.prometheus import PrometheusError
from tests.e2e.cluster import ROOT

RESULTS = ROOT / "tests/deploy/monitoring/live_results.md"
NUMBERS = RESULTS.with_suffix(".json")
"""Numbers that the page is made from; a run of some faults replaces theirs alone."""
FIRES_WITHIN_S = 90.0
LINGER_S = 4.0
"""Seconds for which a fault goes on after its alerts fired, so that others show."""
CLEARS_WITHIN_S = 120.0
LOOK_S = 0.5
QUIET_S = 4.0
"""Seconds without an alert after which all is healthy: what ended last may yet be scraped."""
HEAD = """# The monitoring, watched

Written by `python -m tests.deploy.monitoring.live`: two executors, a scheduler with two frontends, a gateway, load,
and the real Prometheus, which scrapes every second. All times of the rules are shortened, windows to {window} and `for`
to 2 s (10 s where it is ten minutes or more). Other work shared the two cores, so seconds are rough. "Also fired" are
alerts that may follow from the fault; one that may not makes the row wrong.
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """Alerts that a fault brought, and seconds until all due fired and until none did."""

    fired: list[str]
    fires_s: float | None
    clears_s: float | None
    day: str

    def is_right(self, fault: Fault) -> bool:
        """Return True if all fired that must, none that may not, and all ended afterwards."""
        fired = set(self.fired)
        return fault.must <= fired <= fault.must | fault.may and self.clears_s is not None


def main() -> int:
    """Run the check; return 0 if everything was as it must be."""
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.monitoring.live")
    parser.add_argument("--only", nargs="+", help="run only faults whose name has such a text")
    parser.add_argument("--keep", type=Path, help="folder for logs; default: a temporary one")
    given = parser.parse_args()
    chosen = [one for one in FAULTS if any(text in one.name for text in given.only or [""])]
    numbers = json.loads(NUMBERS.read_text()) if given.only and NUMBERS.exists() else {}
    with contextlib.ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        system = System(folder)
        stack.callback(system.close)
        pages = {"scheduler": system.ports["metrics"], "gateway": system.ports["gateway"]}
        try:
            prometheus = Prometheus(folder, **pages)
        except PrometheusError as error:
            raise SystemExit(str(error)) from error
        stack.callback(prometheus.close)
        load = Load(system)
        stack.callback(load.close)
        numbers["answers"] = ask_everything(system, prometheus)
        numbers["broken"] = sorted(prometheus.broken_rules())
        for fault in chosen:
            seen = watch(fault, system, prometheus)
            numbers.setdefault("faults", {})[fault.name] = asdict(seen)
            numbers["broken"] = sorted({*numbers["broken"], *prometheus.broken_rules()})
            NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
            RESULTS.write_text(page(numbers))
    return 0 if is_right(numbers, chosen) else 1


def is_right(numbers: dict[str, Any], faults: list[Fault]) -> bool:
    """Return True if every query had an answer and every fault its alerts and no others."""
    verdicts = [Seen(**numbers["faults"][fault.name]).is_right(fault) for fault in faults]
    return all(numbers["answers"].values()) and not numbers["broken"] and all(verdicts)


def ask_everything(system: System, prometheus: Prometheus) -> dict[str, int]:
    """Return the number of series of every query of the dashboard and of every recorded metric."""
    with flood(system, prometheus):  # refusals have series once there was one
        time.sleep(8)
    with system.client() as client:  # requests that end in every way that has a name in vLLM
        client.complete(token_ids=[20, 21], max_tokens=9, allowed_token_ids=[5], stop_token_ids=[5])
        with contextlib.suppress(TandemError):
            client.complete(token_ids=[20, 21], max_tokens=400, ignore_eos=True, deadline_s=0.05)
    time.sleep(30)
    queries = dashboard_queries(WINDOW)
    queries |= {rule["record"]: rule["record"] for rule in rules() if "record" in rule}
    return {place: len(prometheus.values(query)) for place, query in queries.items()}


def watch(fault: Fault, system: System, prometheus: Prometheus) -> Seen:
    """Cause a fault in a healthy system, and note the alerts until all is healthy again."""
    settle(prometheus, set())
    fired: set[str] = set()
    began_s = time.monotonic()
    fires_s = None
    with fault.cause(system, prometheus):
        until_s = began_s + FIRES_WITHIN_S
        while time.monotonic() < until_s:
            fired |= prometheus.firing()
            if fires_s is None and fault.must <= fired:
                fires_s = time.monotonic() - began_s
                until_s = time.monotonic() + LINGER_S
            time.sleep(LOOK_S)
    ended_s = time.monotonic()
    is_clear = settle(prometheus, fired)
    clears_s = time.monotonic() - ended_s if is_clear else None
    seen = Seen(sorted(fired), fires_s, clears_s, f"{datetime.now(UTC):%Y-%m-%d}")
    verdict = "ok" if seen.is_right(fault) else "WRONG"
    sys.stderr.write(f"{verdict}: {fault.name}: {seen.fired}\n")
    return seen


def settle(prometheus: Prometheus, fired: set[str]) -> bool:
    """
    Wait until no alert has fired for `QUIET_S`, adding those that do; return False if some still do
    in the end.
    """
    began_s = quiet_since_s = time.monotonic()
    while (now_s := time.monotonic()) - quiet_since_s < QUIET_S:
        if firing := prometheus.firing():
            fired |= firing
            quiet_since_s = now_s
        if now_s - began_s > CLEARS_WITHIN_S:
            return False
        time.sleep(LOOK_S)
    return True


def page(numbers: dict[str, Any]) -> str:
    """Return the results as a page."""
    answers, broken = numbers["answers"], numbers["broken"]
    empty = [place for place, num_series in answers.items() if not num_series]
    without = f": {', '.join(empty)}" if empty else ""
    lines = [HEAD.format(window=WINDOW)]
    lines.append(f"Queries and recorded metrics asked under load: {len(answers)}. ")
    lines[-1] += f"Without an answer: {len(empty)}{without}."
    lines.append(f"Rules whose evaluation failed: {', '.join(broken) or 'none'}.")
    lines += [
        "",
        "| fault | must fire | also fired | fired after, s | cleared after, s | right | day |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    lines += [
        row(fault, Seen(**numbers["faults"][fault.name]))
        for fault in FAULTS
        if fault.name in numbers["faults"]
    ]
    not_run = [fault.name for fault in FAULTS if fault.name not in numbers["faults"]]
    lines += ["", f"Faults that were NOT RUN: {'; '.join(not_run) or 'none'}."]
    lines += [
        "",
        "Alerts that no fault here causes; their series are played by promtool alone:",
        "",
    ]
    lines += [f"- {alert}: {why}" for alert, why in NOT_CAUSED.items()]
    return "\n".join(lines) + "\n"


def row(fault: Fault, seen: Seen) -> str:
    """Return the row of a fault."""
    others = set(seen.fired) - fault.must
    wrong = listed(others - fault.may)
    cells = (
        fault.name,
        listed(fault.must),
        listed(others),
        seconds(seen.fires_s),
        seconds(seen.clears_s),
        "yes" if seen.is_right(fault) else f"NO {wrong}".strip(),
        seen.day,
    )
    return f"| {' | '.join(cells)} |"


def listed(alerts: Iterable[str]) -> str:
    """Return names of alerts without what all have in common."""
    return ", ".join(sorted(name.removeprefix("Tandem") for name in alerts))


def seconds(number: float | None) -> str:
    """Return a time for the table."""
    return "never" if number is None else f"{number:.0f}"


if __name__ == "__main__":
    sys.exit(main())
