"""Commands to pods that fail are told, also where podman's own exit status tells nothing."""

from __future__ import annotations

import json

import pytest

from tests.deploy.podman import PodmanError
from tests.deploy.pods import podman
from tests.deploy.pods.podman import Pods
from tests.deploy.pods.translate import LocalPod

POD = LocalPod(
    name="one",
    workload="one",
    document={"spec": {"containers": [{"name": "service"}]}},
    aliases=(),
    grace_s=1,
    pre_stop_s=0,
)


class Commands:
    """Commands of podman about one container, whose state is given."""

    def __init__(self, state: dict[str, object]) -> None:
        self._state = state

    def __call__(self, *arguments: str) -> str:
        assert arguments == ("inspect", "one-service")
        return json.dumps([{"State": self._state}])

    def attempt(self, *arguments: str) -> bool:
        return arguments[0] != "exec"


def pods(monkeypatch, state: dict[str, object]) -> Pods:
    monkeypatch.setattr(podman, "STOP_LIMIT_S", 0.0)
    made = Pods.__new__(Pods)
    made._podman = Commands(state)
    return made


class TestFillMemory:
    def test_container_that_runs_on_is_an_error(self, monkeypatch):
        """
        A container whose service the kernel did not kill is named in an error.
        """
        running = pods(monkeypatch, {"OOMKilled": False, "Status": "running"})
        with pytest.raises(PodmanError, match="one-service runs on without memory"):
            running.fill_memory(POD)

    @pytest.mark.parametrize(
        "state",
        [{"OOMKilled": True, "Status": "running"}, {"OOMKilled": False, "Status": "exited"}],
        ids=["killed for its memory", "ended"],
    )
    def test_container_that_ended_is_what_was_asked_for(self, monkeypatch, state):
        """
        A container that podman calls killed for its memory, or ended, is no error.
        """
        pods(monkeypatch, state).fill_memory(POD)
