"""An executor of two ranks, of which rank 1 alone runs out of memory."""

from __future__ import annotations

import threading

import pytest

from tandem.errors import OutOfMemory
from tandem_client import AdminClient, Client, KvMode
from tests.e2e.cluster import PATIENCE, Process
from tests.executor_svc.ranks.processes import is_ready, start_pods
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPT = list(range(100, 356))


class Pods:
    """Two processes, which are started again when one of them ends, as an orchestrator does."""

    def __init__(self, folder, model):
        self.listen = f"127.0.0.1:{free_port()}"
        self.limit_file = folder / "limit"
        self.generations = []
        self._folder, self._model = folder, model
        self._is_closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep)
        self._start()
        self._keeper.start()

    def log(self):
        return "".join(pod.log.read_text() for pods in self.generations for pod in pods)

    def close(self):
        self._is_closing.set()
        self._keeper.join()
        for pod in self.generations[-1]:
            pod.end()

    def _start(self):
        pods = start_pods(
            "tests.executor_svc.ranks.short_of_memory",
            self._model,
            self._folder,
            f"--listen={self.listen}",
            "--tp-size=2",
            generation=len(self.generations),
            env={"LIMIT_FILE": str(self.limit_file)},
        )
        self.generations.append(pods)

    def _keep(self):
        while not self._is_closing.wait(0.1):
            if any(pod.process.poll() is not None for pod in self.generations[-1]):
                for pod in self.generations[-1]:
                    pod.end()
                self._start()


@pytest.fixture
def pods(bundled_model, tmp_path):
    pods = Pods(tmp_path, bundled_model)
    yield pods
    pods.close()


@pytest.fixture
def scheduler(pods, tmp_path):
    ports = [f"--{name}listen=127.0.0.1:0" for name in ("", "admin-", "metrics-")]
    arguments = [f"--executor={pods.listen}", *ports, *PATIENCE]
    scheduler = Process("scheduler_svc", arguments, tmp_path, "scheduler")
    yield scheduler
    scheduler.end()


class TestShortOfMemory:
    def test_steps_become_smaller_until_rank_1_has_the_memory(self, pods, scheduler):
        """
        A step for which rank 1 alone has no memory is tried again in smaller ones, by the executor
        that is started in place of the one that ended, and the request gets its tokens.
        """
        addresses = scheduler.addresses()
        wait_until(lambda: is_ready(addresses["address"]), "both ranks")
        with Client(addresses["address"]) as client:
            before = client.complete(token_ids=PROMPT, max_tokens=8, temperature=0)
            with AdminClient(addresses["admin_address"]) as admin:
                admin.flush_prefix_cache()
            pods.limit_file.write_text("200")
            after = client.complete(token_ids=PROMPT, max_tokens=8, temperature=0)

        assert before.token_ids == after.token_ids
        assert 2 == len(pods.generations)
        assert "rank 1 of the model: out of memory while computing 256 tokens" in pods.log()

    def test_refused_suspension_is_told_and_not_tried_again(self, pods, scheduler):
        """
        Where the host of rank 1 alone has no room for a suspension with OFFLOAD, the operator gets
        its error, and the executor that is started again serves and is not suspended.
        """
        addresses = scheduler.addresses()
        wait_until(lambda: is_ready(addresses["address"]), "both ranks")
        with (
            Client(addresses["address"]) as client,
            AdminClient(addresses["admin_address"]) as admin,
        ):
            before = client.complete(token_ids=PROMPT, max_tokens=8, temperature=0)
            pods.limit_file.write_text("256")
            with pytest.raises(OutOfMemory, match=r"rank 1 of the model: the host has 0\.0"):
                admin.suspend(KvMode.OFFLOAD)
            after = client.complete(token_ids=PROMPT, max_tokens=8, temperature=0)
            assert not admin.stats().suspended

        assert before.token_ids == after.token_ids
        assert 2 == len(pods.generations)
