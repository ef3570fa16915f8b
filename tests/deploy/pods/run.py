"""
Runs the pods of overlays/local-podman under podman, streams to them from this machine, and does to
them what happens to pods: `python -m tests.deploy.pods.run`. README.md says what it needs.

The table of results is written into README.md. Exit status: 0 only if no stream failed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import secrets
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import TandemError
from tandem_client.admin.client import is_serving
from tests.deploy.kubernetes.manifests import KUBERNETES, ROOT, render
from tests.deploy.podman import PodmanError
from tests.deploy.pods.load import TOKENS, Load
from tests.deploy.pods.podman import Pods
from tests.deploy.pods.translate import LocalPod, Translation, translate

PAGE = Path(__file__).with_name("README.md")
MARK = "<!-- results -->\n"
START_LIMIT_S = 300.0
SCHEDULER = "tandem-scheduler-0"
NUM_EXECUTORS = 2
"""Executors at the start; one more joins and leaves."""
PAUSED_S = 8.0
SETTLED_S = 3.0
"""Seconds that streams run before an event, and after it."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Pods that run, by name."""

    pods: Pods
    translation: Translation

    def named(self, name: str) -> LocalPod:
        """Return a pod of the translation."""
        return next(pod for pod in self.translation.pods if pod.name == name)

    @property
    def scheduler(self) -> str:
        """Address of the scheduler's host."""
        return self.pods.address(self.named(SCHEDULER))

    def num_attached(self) -> int:
        """Return how many executors the scheduler says are attached."""
        with urllib.request.urlopen(f"http://{self.scheduler}:9464/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        values = [
            line.split()[-1] for line in lines if line.startswith("tandem_each_executor_attached{")
        ]
        return sum(float(value) == 1.0 for value in values)

    def wait_for(self, num_executors: int) -> None:
        """
        Wait until the scheduler serves with a number of executors.

        Raises:
            TimeoutError: It does not within `START_LIMIT_S`.
        """
        until = time.monotonic() + START_LIMIT_S
        while time.monotonic() < until:
            try:
                is_ready = is_serving(f"{self.scheduler}:50051", "tandem.ready", timeout_s=5)
                if is_ready and self.num_attached() == num_executors:
                    return
            except (TandemError, OSError):
                pass  # it does not listen yet
            time.sleep(0.5)
        logs = "\n".join(self.pods.logs(pod) for pod in self.translation.pods)
        raise TimeoutError(f"no {num_executors} executors within {START_LIMIT_S:g} s:\n{logs}")


def kill(cluster: Cluster) -> None:
    """Kill an executor, as a lack of memory does, and start its container again."""
    one = cluster.named("tandem-executor-1")
    cluster.pods.kill(one)
    cluster.pods.restart(one)


def stop(cluster: Cluster) -> None:
    """End an executor with SIGTERM and its grace time, and start a new pod."""
    one = cluster.named("tandem-executor-1")
    cluster.pods.stop(one)
    cluster.pods.play(one)


def pause(cluster: Cluster) -> None:
    """Let an executor stand still, and go on."""
    one = cluster.named("tandem-executor-0")
    cluster.pods.pause(one)
    time.sleep(PAUSED_S)
    cluster.pods.unpause(one)


def replace_all(cluster: Cluster) -> None:
    """Replace the executors one after another, as a rollout of their StatefulSet does."""
    for name in ("tandem-executor-1", "tandem-executor-0"):
        one = cluster.named(name)
        cluster.pods.stop(one)
        cluster.pods.play(one)
        cluster.wait_for(NUM_EXECUTORS)


def cut_off(cluster: Cluster) -> None:
    """Let an executor's network be gone for a while."""
    one = cluster.named("tandem-executor-1")
    cluster.pods.cut_off(one)
    time.sleep(PAUSED_S)
    cluster.pods.join(one)


def run_out_of_memory(cluster: Cluster) -> None:
    """Let the kernel kill an executor for its memory limit, and start its container again."""
    one = cluster.named("tandem-executor-1")
    cluster.pods.fill_memory(one)
    cluster.pods.restart(one)


def scale_out_and_in(cluster: Cluster) -> None:
    """Let a third executor join, and leave again."""
    third = cluster.named("tandem-executor-2")
    cluster.pods.play(third)
    cluster.wait_for(3)
    time.sleep(SETTLED_S)
    cluster.pods.stop(third)
    cluster.pods.remove(third)


def replace_scheduler(cluster: Cluster) -> None:
    """End the scheduler with SIGTERM and its grace time, and start a new pod at its address."""
    one = cluster.named(SCHEDULER)
    cluster.pods.stop(one)
    cluster.pods.play(one, has_fixed_address=True)


def kill_scheduler(cluster: Cluster) -> None:
    """Kill the scheduler, and start its container again."""
    one = cluster.named(SCHEDULER)
    cluster.pods.kill(one)
    cluster.pods.restart(one)


@dataclass(frozen=True, slots=True)
class Event:
    """
    One event that a row of the table is about.

    Attributes:
        text: The event in words.
        happen: Lets it happen.
        resumes: True where clients resume their streams, as theirs end with the scheduler.
    """

    text: str
    happen: Callable[[Cluster], None]
    resumes: bool = False


EVENTS = (
    Event("one executor of two killed (SIGKILL), its container started again", kill),
    Event("one executor of two told to stop (SIGTERM), then a new pod", stop),
    Event(f"one executor of two paused for {PAUSED_S:g} s", pause),
    Event(f"one executor of two cut off from the network for {PAUSED_S:g} s", cut_off),
    Event("one executor of two killed for its memory limit, started again", run_out_of_memory),
    Event("a third executor joins, and leaves (SIGTERM)", scale_out_and_in),
    Event("both executors replaced, one after another", replace_all),
    Event("scheduler replaced (SIGTERM, then a new pod); clients resume", replace_scheduler, True),
    Event("scheduler killed (SIGKILL) and started again; clients resume", kill_scheduler, True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table: an event, and the streams that ran meanwhile."""

    event: str
    num_running: int
    finished: int
    failed: int
    longest_pause_s: float

    def __str__(self) -> str:
        return (
            f"| {self.event} | {self.num_running} | {self.finished} | {self.failed} | "
            f"{self.longest_pause_s:.1f} s |"
        )


@contextmanager
def running(translate_into: Callable[[str], Translation]) -> Iterator[Cluster]:
    """Start all pods, and remove them at the end."""
    with tempfile.TemporaryDirectory(prefix="tandem-pods-") as made:
        folder = Path(made)
        folder.chmod(0o755)  # the pods' user reads the files of Secrets
        translation = translate_into(str(folder / "secrets"))
        Pods.write_files(translation, folder / "secrets")
        pods = Pods(folder, f"tandem-pods-{os.getpid()}")
        try:
            for pod in translation.pods:
                if pod.name != f"tandem-executor-{NUM_EXECUTORS}":
                    pods.play(pod, has_fixed_address=pod.name == SCHEDULER)
            yield Cluster(pods, translation)
        finally:
            pods.close()


def measure(cluster: Cluster, event: Event, num_streams: int) -> Row:
    """Let an event happen under streams, and return what became of them."""
    cluster.wait_for(NUM_EXECUTORS)
    load = Load(f"{cluster.scheduler}:50051", num_streams, resumes=event.resumes)
    load.start()
    time.sleep(SETTLED_S)
    num_running = load.num_running
    event.happen(cluster)
    cluster.wait_for(NUM_EXECUTORS)
    time.sleep(SETTLED_S)
    outcome = load.end()
    for message in outcome.messages:
        print(f"failed: {message}", file=sys.stderr)
    return Row(
        event=event.text,
        num_running=num_running,
        finished=outcome.finished,
        failed=outcome.failed,
        longest_pause_s=outcome.longest_pause_s,
    )


def write(rows: list[Row], num_streams: int, ready_s: float) -> None:
    """Write the table into README.md, in place of the one before."""
    head = PAGE.read_text().partition(MARK)[0]
    when = dt.datetime.now(tz=dt.UTC).date()
    told = (
        f"Written on {when}: {num_streams} streams at a time of {TOKENS} tokens, {os.cpu_count()} "
        f"cores; {ready_s:.0f} s from nothing until both executors served."
    )
    lines = [
        MARK,
        f"{told}\n",
        "| event | streams running | finished | failed | longest pause of a stream |",
        "|---|---:|---:|---:|---:|",
        *(str(row) for row in rows),
    ]
    PAGE.write_text(head + "\n".join(lines) + "\n")


def main() -> int:
    """Run the events that were asked for, and write the table."""
    parser = argparse.ArgumentParser(description="Run the pods of overlays/local-podman.")
    parser.add_argument("--streams", type=int, default=16, help="streams at a time (default: 16)")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="events with one of these texts; writes no table"
    )
    chosen = parser.parse_args()
    documents = render(KUBERNETES / "overlays/local-podman")
    for document in documents:
        if document["kind"] == "StatefulSet":
            document["spec"]["replicas"] = NUM_EXECUTORS + 1
    token = secrets.token_hex(32).encode()

    def translated(folder: str) -> Translation:
        return translate(
            documents,
            secrets={"tandem-link": {"token": token}},
            claims={"tandem-models": str(ROOT / "deploy/models")},
            folder=folder,
        )

    rows: list[Row] = []
    began_s = time.monotonic()
    try:
        with running(translated) as cluster:
            cluster.wait_for(NUM_EXECUTORS)
            ready_s = time.monotonic() - began_s
            for event in EVENTS:
                if not any(text in event.text for text in chosen.only):
                    continue
                rows.append(measure(cluster, event, chosen.streams))
                print(rows[-1], flush=True)
    except (PodmanError, TimeoutError) as error:
        print(f"pods: {error}", file=sys.stderr)
        return 1
    if len(rows) == len(EVENTS):
        write(rows, chosen.streams, ready_s)
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
