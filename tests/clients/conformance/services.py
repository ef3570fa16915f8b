"""Real services of the scenarios, and what happens to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from tandem_client import Client
from tests.certificates import Authority
from tests.e2e.access.secured_system import SecuredSystem
from tests.e2e.cluster import BUNDLED_MODEL, Cluster, num_requests
from tests.e2e.recovery.failover import NO_LEASE_MS
from tests.ports import free_port
from tests.scheduler_svc.frontend.identity.credentials import OTHER, USER
from tests.waiting import LIMIT_S, wait_until

BYTE_IDS = range(2, 258)
"""Ids of the bundled model's 256 tokens of one byte each, which come after two special ones."""
NUM_HELD = 20
"""Ids that a caller brings who goes on with an output."""
_SCHEDULER = ["--drain-grace-s=0", "--frontends=2", f"--lease-ms={NO_LEASE_MS}"]


class Services:
    """
    One or two systems that serve the bundled model.

    Attributes:
        targets: Addresses that clients get.
        names: Values of the texts that begin with `$` in a scenario.
    """

    def __init__(self, clusters: list[Cluster], names: dict[str, Any] | None = None) -> None:
        self._clusters = clusters
        self.targets = [one.address for one in clusters] or [f"127.0.0.1:{free_port()}"]
        self.names = names or {}

    @property
    def lasting_targets(self) -> list[str]:
        """The target that no scenario kills for good."""
        return self.targets[-1:]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold all executors during the block."""
        with contextlib.ExitStack() as stack:
            for one in self._clusters:
                stack.enter_context(one.held())
            yield

    def allow(self, num_steps: int) -> None:
        """Let executors that are held begin so many steps."""
        for one in self._clusters:
            one.gate.allow(num_steps)

    def wait_for_requests(self, number: int) -> None:
        """Wait until so many requests run or wait, among them those of other callers."""
        wait_until(lambda: self._count(num_requests) == number, f"{number} requests")

    def wait_idle(self) -> None:
        """Wait until no request is left."""
        self.wait_for_requests(0)

    def strike(self, what: str) -> None:
        """Do to the services what a scenario names."""
        {
            "kill scheduler": self._kill_scheduler,
            "drain scheduler": self._drain_scheduler,
            "kill executor": self._kill_executor,
            "kill first target": self._clusters[0].scheduler.kill,
        }[what]()

    def mend(self) -> None:
        """Start what a scenario left dead."""
        for one in self._clusters:
            if one.scheduler.process.poll() is not None:
                one.start_scheduler()
                wait_until(one.is_ready, "tandem.ready")

    def close(self) -> None:
        """Kill all services."""
        for one in self._clusters:
            one.close()

    def _count(self, counter: Callable[[Any], int]) -> int:
        return sum(counter(one.stats()) for one in self._clusters)

    def _kill_scheduler(self) -> None:
        self._clusters[0].scheduler.kill()
        self._clusters[0].gate.open()  # an executor that is held at a session's end exits
        self._clusters[0].start_scheduler()

    def _drain_scheduler(self) -> None:
        cluster = self._clusters[0]
        cluster.scheduler.process.terminate()
        cluster.gate.open()
        assert 0 == cluster.scheduler.process.wait(LIMIT_S)
        cluster.start_scheduler()

    def _kill_executor(self) -> None:
        cluster = self._clusters[0]
        assert cluster.executor is not None
        cluster.executor.kill()
        cluster.gate.open()
        cluster.start_executor(ready=False)


def start(kind: str, folder: Path) -> Services:
    """Start the services that scenarios call `kind`."""
    folder.mkdir()
    match kind:
        case "none":
            return Services([])
        case "one":
            cluster = _cluster(folder, "one")
            return Services([cluster], _names(cluster))
        case "two":
            return Services([_cluster(folder, "first"), _cluster(folder, "second")])
        case "full":
            return Services([_cluster(folder, "full", "--max-batch-size=1")])
        case "secured":
            return _secured(folder)
    raise AssertionError(kind)


@contextlib.contextmanager
def filled(services: Services) -> Iterator[None]:
    """Let one request take all rows of the executor during the block, which is held."""
    with services.held(), Client(services.targets[0]) as client:
        stream = client.generate("import os", max_tokens=400, ignore_eos=True)
        next(stream)  # it is accepted
        try:
            yield
        finally:
            stream.close()


def _cluster(folder: Path, name: str, *limits: str) -> Cluster:
    (folder / name).mkdir()
    cluster = Cluster(BUNDLED_MODEL, folder / name, list(limits), list(_SCHEDULER))
    cluster.start_executor()
    return cluster


def _secured(folder: Path) -> Services:
    system = SecuredSystem(BUNDLED_MODEL, folder)
    pair = system.right.pair
    assert pair is not None
    names = {
        "$ca": str(system.servers_ca.file),
        "$other_ca": str(Authority(folder, "other-ca").file),
        "$cert": str(pair.certificate),
        "$key": str(_as_pkcs8(pair.key)),
        "$token": USER,
        "$other_token": OTHER,
    }
    return Services([system], names)


def _as_pkcs8(key: Path) -> Path:
    """Write a key in the only form that Java's gRPC reads; all others read it too."""
    loaded = serialization.load_pem_private_key(key.read_bytes(), password=None)
    written = key.with_suffix(".pkcs8")
    written.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return written


def _names(cluster: Cluster) -> dict[str, Any]:
    """
    Return values that depend on the model: a stop string over two tokens, ids of bytes, and both
    parts of an output.
    """
    with cluster.client() as client:
        whole = client.complete(
            "import os", max_tokens=40, ignore_eos=True, temperature=1.0, seed=5
        )
        ends = [
            len(client.detokenize(whole.token_ids[:number]))
            for number in range(1, len(whole.token_ids))
        ]
        text = whole.text
        stops = [(text[end - 2 : end + 2], end - 2) for end in ends if end > 12]
        stop, at = next((stop, at) for stop, at in stops if text.index(stop) == at)
        output = client.complete("import os", max_tokens=120, ignore_eos=True, temperature=0.0)
        held = output.token_ids[:NUM_HELD]
        rest_text = output.text.removeprefix(client.detokenize(held))
    return {
        "$stop": stop,
        "$before_stop": text[:at],
        "$bytes": list(BYTE_IDS),
        "$held": list(held),
        "$rest": list(output.token_ids[NUM_HELD:]),
        "$rest_text": rest_text,
    }
