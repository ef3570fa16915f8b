"""Pods that run, with their clients and the Prometheus that reads them."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import TandemError
from tandem_client.admin.client import is_serving
from tandem_client.channel import ChannelOptions
from tests.deploy.events.event import NUM_EXECUTORS, num_attached
from tests.deploy.events.streams.callers import Access
from tests.deploy.events.streams.load import Outputs, undisturbed
from tests.deploy.events.streams.programs import Programs
from tests.deploy.pods.certificates.secret_folders import write_secrets
from tests.deploy.pods.counting.monitors import configuration, targets_of
from tests.deploy.pods.counting.scraping import INTERVAL_S, Prometheus
from tests.deploy.pods.podman import Pods
from tests.deploy.pods.setting import Setting
from tests.deploy.pods.translate import LocalPod, Translation
from tests.waiting import TooLate, wait_until

START_LIMIT_S = 300.0
SCHEDULER = "tandem-scheduler-0"
GATEWAY = "tandem-gateway-1"
"""The gateway that events befall; another one stays."""
FIRST, SECOND = "tandem-executor-0", "tandem-executor-1"
LATER = f"tandem-executor-{NUM_EXECUTORS}"
"""The executor that is not there at the start."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """
    Pods that run, by name.

    Attributes:
        setting: What was played.
        folder: Folder of the run.
        pods: The pods of podman.
        translation: All pods that may be played.
        access: Addresses and credentials for clients.
        ready_s: Seconds from the first pod until all executors served.
    """

    setting: Setting
    folder: Path
    pods: Pods
    translation: Translation
    access: Access
    ready_s: float = 0.0

    def named(self, name: str) -> LocalPod:
        """Return a pod of the translation."""
        return next(pod for pod in self.translation.pods if pod.name == name)

    @property
    def present(self) -> list[LocalPod]:
        """The pods that are there between events."""
        return [pod for pod in self.translation.pods if pod.name != LATER]

    def play(self, pod: LocalPod) -> None:
        """Start a pod; the scheduler and gateways have addresses that stay."""
        self.pods.play(pod, has_fixed_address=pod.workload != "tandem-executor")

    def replace(self, name: str) -> None:
        """End a pod with SIGTERM and its grace time, and start a new one."""
        pod = self.named(name)
        self.pods.stop(pod)
        self.play(pod)

    def kill_and_restart(self, name: str) -> None:
        """Kill a pod's processes, as a lack of memory does, and start its containers again."""
        pod = self.named(name)
        self.pods.kill(pod)
        self.pods.restart(pod)

    def options(self) -> ChannelOptions:
        """Return how the harness itself connects to the public port."""
        return ChannelOptions(**self.access.paths(), server_name=self.access.server_name)

    def wait_for(self, num_executors: int) -> None:
        """
        Wait until the scheduler serves with a number of executors, and the gateways see it.

        Raises:
            TooLate: They do not within `START_LIMIT_S`.
        """
        host = self.access.scheduler.rpartition(":")[0]
        problem = ""

        def is_served() -> bool:
            nonlocal problem
            try:
                is_ready = is_serving(
                    self.access.scheduler, "tandem.ready", timeout_s=5, options=self.options()
                )
                attached = num_attached(host)
                if is_ready and attached == num_executors and self._gateways_serve():
                    return True
                problem = f"ready: {is_ready}, executors: {attached}"
            except (TandemError, OSError) as error:
                problem = str(error)  # it does not listen yet
            return False

        try:
            wait_until(is_served, f"{num_executors} executors", START_LIMIT_S, 0.5)
        except TooLate as error:
            logs = "\n".join(self.pods.logs(pod) for pod in self.present)
            raise TooLate(f"{error} ({problem}):\n{logs}") from error

    def write_secrets(self) -> None:
        """Write the present content of all Secrets over the files that pods and clients read."""
        self.access.files = self.setting.write_client(self.folder / "clients")
        secrets = self.folder / "secrets"
        write_secrets(self.setting.translate(secrets).files, secrets)

    def _gateways_serve(self) -> bool:
        for gateway in self.access.gateways:
            try:
                with urllib.request.urlopen(f"http://{gateway}/health", timeout=5):
                    pass
            except urllib.error.HTTPError:  # 503: it sees no scheduler that serves
                return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """
    A cluster with what loads and reads it.

    Attributes:
        cluster: The pods.
        programs: Programs of clients in other languages.
        prometheus: The Prometheus that reads the pods.
        pages: Names of the pods that it reads.
        outputs: Tokens of each request when nothing disturbs it.
    """

    cluster: Cluster
    programs: Programs
    prometheus: Prometheus
    pages: frozenset[str]
    outputs: Outputs


@contextmanager
def running(setting: Setting, languages: Sequence[str]) -> Iterator[Watched]:
    """Start all pods and their clients, and remove everything at the end, whatever ends it."""
    stack = ExitStack()
    try:
        yield _start(setting, languages, stack)
    finally:
        with _uninterrupted():
            stack.close()


def _start(setting: Setting, languages: Sequence[str], stack: ExitStack) -> Watched:
    """Start everything; the stack removes it."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-pods-")))
    folder.chmod(0o755)  # the pods' user reads the files of Secrets
    pods = Pods(folder, f"tandem-pods-{os.getpid()}")
    stack.callback(pods.close)
    cluster = _play(setting, folder, pods)
    host = cluster.access.scheduler.rpartition(":")[0]
    programs = Programs(languages, folder, host)
    stack.callback(programs.close)
    targets = targets_of(setting.documents, cluster.present)
    content = configuration(
        targets, lambda name: pods.address(cluster.named(name)), f"{INTERVAL_S}s"
    )
    prometheus = Prometheus(folder / "prometheus", content)
    stack.callback(prometheus.close)
    return Watched(
        cluster=cluster,
        programs=programs,
        prometheus=prometheus,
        pages=frozenset(one.pod for one in targets),
        outputs=undisturbed(cluster.access),
    )


def _play(setting: Setting, folder: Path, pods: Pods) -> Cluster:
    began_s = time.monotonic()
    cluster = Cluster(
        setting=setting,
        folder=folder,
        pods=pods,
        translation=setting.translate(folder / "secrets"),
        access=Access(scheduler="", gateways=()),
    )
    cluster.write_secrets()
    for pod in cluster.present:
        cluster.play(pod)
    gateways = [pod for pod in cluster.present if pod.workload == "tandem-gateway"]
    cluster.access.scheduler = f"{pods.address(cluster.named(SCHEDULER))}:50051"
    cluster.access.gateways = tuple(f"{pods.address(pod)}:8000" for pod in gateways)
    cluster.access.token = setting.token
    cluster.access.server_name = "tandem-scheduler" if setting.certificates else None
    cluster.wait_for(NUM_EXECUTORS)
    cluster.ready_s = time.monotonic() - began_s
    return cluster


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM change nothing."""
    before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
