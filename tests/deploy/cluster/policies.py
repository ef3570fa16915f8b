"""Connections between pods, with and without the component network-policies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.deploy.cluster.cluster import EXECUTORS, LIMIT_S, LOOK_S, NAMESPACE, Cluster
from tests.deploy.cluster.node import settings
from tests.deploy.cluster.node.images import POLICIES, TANDEM
from tests.deploy.cluster.node.processes import run
from tests.deploy.kubernetes.manifests import combination
from tests.waiting import wait_until

CALLERS = "callers"
"""A namespace that has nothing to do with Tandem."""
QUEUE = "100"
CONNECT = """\
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()
except OSError:
    print("closed")
else:
    print("open")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """
    A connection that a pod tries.

    Attributes:
        caller: Name of the pod, or of a pod of Tandem.
        text: The caller in words.
        to: Name of the Service that is called.
        port: Port that is called.
        is_allowed: Whether policies have to let it through.
    """

    caller: str
    text: str
    to: str
    port: int
    is_allowed: bool


LABELS = {
    "client": {"tandem-client": "true"},
    "reader": {"tandem-metrics": "true"},
    "other": {"some": "label"},
}
"""Labels of the pods in the namespace of callers, by name."""
CLIENT, READER, OTHER = (
    "a pod with the label `tandem-client`",
    "a pod with the label `tandem-metrics`",
    "a pod with another label",
)
SERVED, LINK = "tandem-scheduler", "tandem-executor"
CONNECTIONS = tuple(
    Connection(caller=caller, text=text, to=to, port=port, is_allowed=is_allowed)
    for caller, text, to, port, is_allowed in (
        ("client", CLIENT, SERVED, 50051, True),
        ("client", CLIENT, SERVED, 9464, False),
        ("client", CLIENT, LINK, 50061, False),
        ("reader", READER, SERVED, 9464, True),
        ("reader", READER, SERVED, 50051, False),
        ("other", OTHER, SERVED, 50051, False),
        ("other", OTHER, SERVED, 9464, False),
        ("other", OTHER, LINK, 50061, False),
        ("scheduler", "the scheduler", LINK, 50061, True),
        ("executor", "an executor", SERVED, 50051, False),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A connection, and whether it was open without policies and with them."""

    connection: Connection
    before: str
    after: str

    @property
    def is_right(self) -> bool:
        """True if it was open at first, and is open with policies if they have to allow it."""
        return self.before == "open" and (self.after == "open") == self.connection.is_allowed

    def __str__(self) -> str:
        one = self.connection
        return f"| {one.text} | `{one.to}:{one.port}` | {self.before} | {self.after} |"


def enforce(cluster: Cluster) -> None:
    """
    Start the engine, and hand it the first packet of each connection between pods.

    The engine would make that rule by itself, with an expression of nftables that a kernel may lack;
    this one comes through the table of iptables, which is older.
    """
    text = (Path(__file__).parent / "node/policies.yaml").read_text()
    text = text.replace("CLUSTER_POLICIES", POLICIES).replace("CLUSTER_NODE", settings.NODE)
    cluster.kubectl("apply", "--filename", "-", content=text)
    engine = "daemonset/kube-network-policies"
    cluster.kubectl("--namespace=kube-system", "rollout", "status", engine, "--timeout=120s")
    run(
        *("iptables", "--table", "mangle", "--append", "FORWARD"),
        *("--match", "conntrack", "--ctstate", "NEW", "--jump", "NFQUEUE", "--queue-num", QUEUE),
    )


def add_component(cluster: Cluster) -> None:
    """Apply dev again, with the component."""
    with combination("dev", ("network-policies",)) as folder:
        cluster.kubectl("apply", "--kustomize", str(folder))
    cluster.in_namespace("rollout", "status", EXECUTORS, "--timeout=300s")


def start_callers(cluster: Cluster) -> None:
    """Start the pods that call."""
    cluster.kubectl("create", "namespace", CALLERS)
    for name, labels in LABELS.items():
        cluster.kubectl(
            *("--namespace", CALLERS, "run", name, f"--image={TANDEM[0]}"),
            *("--labels", ",".join(f"{key}={value}" for key, value in labels.items())),
            *("--command", "--", "python", "-c", "import time; time.sleep(86400)"),
        )
    cluster.kubectl(
        *("--namespace", CALLERS, "wait", "--for=condition=Ready", "pod", "--all"),
        "--timeout=120s",
    )


def state_of(cluster: Cluster, one: Connection) -> str:
    """Return whether a connection is open or closed."""
    names = {
        "scheduler": (NAMESPACE, cluster.scheduler_pod()),
        "executor": (NAMESPACE, "tandem-executor-0"),
    }
    namespace, pod = names.get(one.caller, (CALLERS, one.caller))
    address = str(cluster.found("service", one.to)["spec"]["clusterIP"])
    if address == "None":  # headless: it means its pods, and an executor may look up no name
        executors = cluster.found("pods", f"--selector=app.kubernetes.io/name={one.to}")["items"]
        address = str(executors[0]["status"]["podIP"])
    return cluster.kubectl(
        *("--namespace", namespace, "exec", pod, "--", "python", "-c", CONNECT),
        *(address, str(one.port)),
    )


def verdicts(cluster: Cluster) -> list[Verdict]:
    """
    Try all connections without the component, add it, and try them again.

    Raises:
        KubectlError: A pod does not start.
        TooLate: Policies never take effect.
    """
    start_callers(cluster)
    before = [state_of(cluster, one) for one in CONNECTIONS]
    enforce(cluster)
    add_component(cluster)
    refused = next(one for one in CONNECTIONS if not one.is_allowed)
    wait_until(
        lambda: state_of(cluster, refused) == "closed",
        "the policies refuse a connection",
        LIMIT_S,
        LOOK_S,
    )
    after = [state_of(cluster, one) for one in CONNECTIONS]
    cluster.wait_for(1)
    return [
        Verdict(connection=one, before=first, after=second)
        for one, first, second in zip(CONNECTIONS, before, after, strict=True)
    ]
