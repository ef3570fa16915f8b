"""
The cluster's part of `python -m tests.deploy.cluster.run`, which runs in namespaces of its own.

Results are written into README.md. Exit status: 0 only if the API server takes every rendering and
no stream failed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.cluster import admission, policies
from tests.deploy.cluster.cluster import EXECUTORS, HOST, NAMESPACE, Cluster, Kubectl, KubectlError
from tests.deploy.cluster.events import EVENTS
from tests.deploy.cluster.node import settings
from tests.deploy.cluster.node.build import KUBERNETES_VERSION
from tests.deploy.cluster.node.images import COREDNS, ImageError
from tests.deploy.cluster.node.processes import Node, NodeError
from tests.deploy.cluster.walkthrough import CommandFailed, Walkthrough
from tests.deploy.events.event import NUM_EXECUTORS, Event
from tests.deploy.events.measure import measure
from tests.deploy.events.streams.callers import Access, PythonCaller
from tests.deploy.events.streams.load import Load, Outputs, UndisturbedFailed, undisturbed
from tests.deploy.events.streams.prompts import TOKENS
from tests.deploy.events.table import COLUMNS, RESULTS, Row, lines_of, write_between
from tests.waiting import TooLate

PAGE = Path(__file__).with_name("README.md")
POLICIES = "<!-- policies -->\n"
ACCESS = Access(scheduler=f"{HOST}:50051")
MAX_TOLD = 5
"""Failed streams that are told of an event."""
ERRORS = (CommandFailed, ImageError, KubectlError, NodeError, TooLate, UndisturbedFailed)
"""Errors that end a run, each of which is told in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Results of a whole run, for the page."""

    num_definitions: int
    num_admitted: int
    first_stream_s: float
    num_streams: int
    rows: list[Row]

    def __str__(self) -> str:
        when = dt.datetime.now(tz=dt.UTC).date()
        told = (
            f"Written on {when}: Kubernetes {KUBERNETES_VERSION}, {os.cpu_count()} cores. The API "
            f"server takes all {self.num_admitted} renderings and templates of pods, with the "
            f"{self.num_definitions} custom resource definitions of the projects that the components "
            f"need. {self.first_stream_s:.0f} s from the first command of the walkthrough to its "
            f"last, a stream and `tandem top` among them. Then {self.num_streams} streams at a time "
            f"of {TOKENS} tokens. {COLUMNS}"
        )
        lines = [f"{told}\n", *lines_of(self.rows)]
        return "\n".join(lines) + "\n"


def prepare(kubectl: Kubectl, state: Path) -> None:
    """Create what a cluster has before Tandem comes, and look names up in it from now on."""
    disk = state / "disk"
    disk.mkdir()
    text = (Path(__file__).parent / "node/system.yaml").read_text()
    for name, value in {
        "CLUSTER_COREDNS": COREDNS,
        "CLUSTER_DOMAIN": settings.DOMAIN,
        "CLUSTER_DNS_ADDRESS": settings.DNS_ADDRESS,
        "CLUSTER_DISK": str(disk),
        "CLUSTER_NODE": settings.NODE,
    }.items():
        text = text.replace(name, value)
    kubectl("apply", "--filename", "-", content=text)
    kubectl("--namespace=kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s")
    names = state / "clients.conf"
    names.write_text(f"nameserver {settings.DNS_ADDRESS}\n")
    subprocess.run(["mount", "--bind", str(names), "/etc/resolv.conf"], check=True)


def are_enforced(cluster: Cluster) -> bool:
    """Try connections with policies, write their table, and return whether all were right."""
    verdicts = policies.verdicts(cluster)
    lines = [
        "| from | to | without policies | with them |",
        "|---|---|---|---|",
        *(str(one) for one in verdicts),
    ]
    print("\n".join(lines), flush=True)
    if are_right := all(one.is_right for one in verdicts):
        write_between(PAGE, POLICIES, "\n".join(lines) + "\n")
    else:
        print("the policies allow or refuse other connections than they have to", file=sys.stderr)
    return are_right


def stream_through(cluster: Cluster, event: Event[Cluster], outputs: Outputs, num: int) -> Row:
    """Let an event happen under a number of streams, and return what became of them."""
    cluster.wait_for(NUM_EXECUTORS)
    resumes = event.ends_scheduler
    callers = [PythonCaller(ACCESS, resumes=resumes) for _ in range(num)]
    row = measure(event, cluster, Load(callers, outputs, resumes=resumes))
    print(row, flush=True)
    for problem in (*row.problems, *row.failures[:MAX_TOLD]):
        print(f"failed: {problem}", file=sys.stderr)
    return row


def observe(node: Node, chosen: argparse.Namespace) -> int:
    """Check admission, follow the walkthrough, let the events happen; return the exit status."""
    kubectl = Kubectl.of(node.kubeconfig)
    cluster = Cluster(kubectl, node.runtime)
    prepare(kubectl, chosen.state)
    num_definitions = admission.install(kubectl, chosen.definitions)
    faults, num_admitted = admission.faults(kubectl)
    for fault in faults:
        print(f"refused: {fault}", file=sys.stderr)
    print(f"{num_admitted} renderings and templates, {len(faults)} faults", flush=True)
    rows: list[Row] = []
    try:
        began_s = time.monotonic()
        Walkthrough(kubectl).follow()
        first_stream_s = time.monotonic() - began_s
        cluster.in_namespace("scale", EXECUTORS, f"--replicas={NUM_EXECUTORS}")
        cluster.wait_for(NUM_EXECUTORS)
        outputs = undisturbed(ACCESS)
        for event in EVENTS:
            if any(text in event.text for text in chosen.only):
                rows.append(stream_through(cluster, event, outputs, chosen.streams))
                node.check()
        is_enforced = are_enforced(cluster)
    except (CommandFailed, KubectlError, TooLate, UndisturbedFailed):
        print(cluster.diagnostics(), file=sys.stderr)
        raise
    kubectl("delete", "namespace", NAMESPACE)
    if len(rows) == len(EVENTS) and not faults:
        findings = Findings(
            num_definitions=num_definitions,
            num_admitted=num_admitted,
            first_stream_s=first_stream_s,
            num_streams=chosen.streams,
            rows=rows,
        )
        write_between(PAGE, RESULTS, str(findings))
    return 1 if faults or not is_enforced or not all(row.is_good for row in rows) else 0


def main() -> int:
    """Run a cluster, and what `run` was asked for."""
    parser = argparse.ArgumentParser(description="Run in namespaces of its own; see run.")
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--definitions", type=Path, nargs="*", default=[])
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--only", nargs="+", default=[""])
    chosen = parser.parse_args()
    node = Node(chosen.programs, chosen.state, chosen.images)
    try:
        node.start()
        return observe(node, chosen)
    except ERRORS as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        node.stop()


if __name__ == "__main__":
    sys.exit(main())
