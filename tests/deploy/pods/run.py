"""
Runs the pods of overlays/local-podman and local-podman-tls under podman, streams to them from this
machine by clients of several languages, and does to them what happens to pods:
`python -m tests.deploy.pods.run`. README.md says what it needs.

The table of results is written into README.md. Exit status: 0 only if no stream failed and
Prometheus counted what the clients did; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import subprocess
import sys
from collections.abc import Sequence

from tests.deploy.events.event import NUM_EXECUTORS, Event
from tests.deploy.events.measure import measure
from tests.deploy.events.streams.load import Failure, Load, UndisturbedFailed
from tests.deploy.events.streams.mix import callers_of_all
from tests.deploy.events.streams.programs import ProgramMissing
from tests.deploy.events.table import Row
from tests.deploy.kubernetes.manifests import KubectlMissing, RenderingError
from tests.deploy.podman import PodmanError
from tests.deploy.pods.cluster import Cluster, Watched, running
from tests.deploy.pods.counting.accounts import Accounts
from tests.deploy.pods.counting.monitors import MonitorError
from tests.deploy.pods.events import EVENTS, ROTATIONS
from tests.deploy.pods.setting import encrypted, plain
from tests.deploy.pods.table import Counted, Results, write
from tests.deploy.pods.translate import TranslationError
from tests.deploy.prometheus import PrometheusError
from tests.waiting import TooLate

LANGUAGES = ("go", "typescript")
"""Clients beside those in Python and over HTTP, unless others are named."""
EXIT_INTERRUPTED = 130
MAX_TOLD = 2
"""Failed streams of each client that are told of an event."""
MAX_LINES = 12
"""Lines of each pod's log that are told with an event that failed."""
ERRORS = (
    *(KubectlMissing, MonitorError, PodmanError, ProgramMissing, PrometheusError, RenderingError),
    *(TooLate, TranslationError, UndisturbedFailed, subprocess.CalledProcessError),
)
"""Errors that end a run, each of which is told in one line."""
SEVERE = ('"level": "warning"', '"level": "error"', '"level": "critical"', "Traceback")


def count(watched: Watched, event: Event[Cluster], num_streams: int) -> Counted:
    """Let an event happen under streams, and return what became of them and what was counted."""
    cluster = watched.cluster
    cluster.wait_for(NUM_EXECUTORS)
    cluster.pods.forget_logs()
    accounts = Accounts(watched)
    callers = callers_of_all(
        cluster.access,
        watched.programs,
        num_streams,
        resumes=event.ends_scheduler,
        fails_over=event.ends_gateway,
    )
    row = measure(event, cluster, Load(callers, watched.outputs, resumes=event.ends_scheduler))
    counts, mismatches = accounts.close(row)
    row = dataclasses.replace(row, problems=[*row.problems, *mismatches])
    return Counted(row=row, counts=counts)


def tell(watched: Watched, row: Row) -> None:
    """Print what failed in an event, and what the pods' logs say about it."""
    for problem in row.problems:
        print(f"failed: {row.event}: {problem}", file=sys.stderr)
    told = [one for outcome in row.outcomes.values() for one in outcome.failures[:MAX_TOLD]]
    for failure in told:
        print(f"failed: {row.event}: {failure}", file=sys.stderr)
    if len(row.failures) > len(told):
        print(f"failed: and {len(row.failures) - len(told)} more streams", file=sys.stderr)
    for pod in watched.cluster.translation.pods:
        for line in _lines(watched, told, pod.name):
            print(f"  {pod.name}: {line}", file=sys.stderr)


def _lines(watched: Watched, failures: Sequence[Failure], name: str) -> list[str]:
    """Return the last lines of a pod about streams that failed, or else those about errors."""
    pods, pod = watched.cluster.pods, watched.cluster.named(name)
    ids = [one.request_id for one in failures if one.request_id]
    found = pods.lines_with(pod, ids) if ids else []
    return [*pods.lines_with(pod, SEVERE)[-MAX_LINES:], *found[-MAX_LINES:]]


def run(chosen: argparse.Namespace, results: list[Results]) -> None:
    """Run the events that were asked for, and add their rows to the results."""
    for make, events in ((plain, EVENTS), (encrypted, ROTATIONS)):
        of_cluster = [one for one in events if any(text in one.text for text in chosen.only)]
        if not of_cluster:
            continue
        setting = make()
        with running(setting, chosen.clients) as watched:
            counted: list[Counted] = []
            ready_s = watched.cluster.ready_s
            results.append(Results(setting=setting.name, ready_s=ready_s, counted=counted))
            for event in of_cluster:
                counted.append(count(watched, event, chosen.streams))
                row = counted[-1].row
                print(row, flush=True)
                if not row.is_good:
                    tell(watched, row)


def main() -> int:
    """Run, and write the table."""
    parser = argparse.ArgumentParser(description="Run the pods of overlays/local-podman.")
    parser.add_argument("--streams", type=int, default=16, help="streams at a time (default: 16)")
    parser.add_argument(
        "--clients", nargs="*", default=LANGUAGES, help="languages beside Python (go typescript)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="events with one of these texts; writes no table"
    )
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    results: list[Results] = []
    try:
        run(chosen, results)
    except KeyboardInterrupt:
        print("pods: interrupted; all that was started is removed", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ERRORS as error:
        print(f"pods: {error}", file=sys.stderr)
        return 1
    rows = [one.row for of_cluster in results for one in of_cluster.counted]
    if len(rows) == len(EVENTS) + len(ROTATIONS):
        write(results, chosen.streams)
    return 0 if rows and all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
