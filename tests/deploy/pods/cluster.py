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
from tests.deploy.pods.certificates.secret_folders import write_secrets
from tests.deploy.pods.counting.monitors import configuration, targets_of
from tests.deploy.pods.counting.scraping import INTERVAL_S, Prometheus
from tests.deploy.pods.podman import Pods
from tests.deploy.pods.setting import NUM_EXECUTORS, Setting
from tests.deploy.pods.streams.callers import Access
from tests.deploy.pods.streams.load import Outputs, undisturbed
from tests.deploy.pods.streams.programs import Programs
from tests.deploy.pods.translate import LocalPod, Translation

START_LIMIT_S = 300.0
SCHEDULER = "tandem-scheduler-0"
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

    def num_attached(self) -> int:
        """Return how many executors the scheduler says are attached."""
        host = self.access.scheduler.rpartition(":")[0]
        with urllib.request.urlopen(f"http://{host}:9464/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        values = [
            line.split()[-1] for line in lines if line.startswith("tandem_each_executor_attached{")
        ]
        return sum(float(value) == 1.0 for value in values)

    def options(self) -> ChannelOptions:
        """Return how the harness itself connects to the public port."""
        return ChannelOptions(**self.access.paths(), server_name=self.access.server_name)

    def wait_for(self, num_executors: int) -> None:
        """
        Wait until the scheduler serves with a number of executors, and the gateways see it.

        Raises:
            TimeoutError: They do not within `START_LIMIT_S`.
        """
        until = time.monotonic() + START_LIMIT_S
        problem = ""
        while time.monotonic() < until:
            try:
                is_ready = is_serving(
                    self.access.scheduler, "tandem.ready", timeout_s=5, options=self.options()
                )
                attached = self.num_attached()
                if is_ready and attached == num_executors and self._gateways_serve():
                    return
                problem = f"ready: {is_ready}, executors: {attached}"
            except (TandemError, OSError) as error:
                problem = str(error)  # it does not listen yet
            time.sleep(0.5)
        logs = "\n".join(self.pods.logs(pod) for pod in self.present)
        raise TimeoutError(
            f"no {num_executors} executors within {START_LIMIT_S:g} s ({problem}):\n{logs}"
        )

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
        pods.play(pod, has_fixed_address=pod.name == SCHEDULER)
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
