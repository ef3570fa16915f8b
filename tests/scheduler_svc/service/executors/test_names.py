"""Names that mean several executors."""

from __future__ import annotations

import socket
import threading

import pytest

from scheduler_svc.service.executors.names import ExecutorNames, host_of, look_up

NAME = "dns:///executors:50061"


class Resolver:
    """Answers lookups as the test says, one by one; the last answer for ever."""

    def __init__(self, *answers: list[str] | OSError) -> None:
        self._answers = list(answers)
        self.is_done = threading.Event()

    def __call__(self, name: str) -> list[str]:
        answer = self._answers[0]
        if len(self._answers) > 1:
            self._answers.pop(0)
        else:
            self.is_done.set()
        if isinstance(answer, OSError):
            raise answer
        return answer


def told_by(resolver: Resolver) -> list[dict[str, str]]:
    """Return what is told until the resolver has given its last answer twice."""
    told: list[dict[str, str]] = []
    names = ExecutorNames([NAME], told.append, look_up=resolver, interval_s=0.0)
    names.start()
    assert resolver.is_done.wait(30.0)
    resolver.is_done.clear()
    assert resolver.is_done.wait(30.0)
    names.stop()
    return told


class TestExecutorNames:
    def test_tells_what_a_name_means_when_it_has_changed(self):
        """Each address comes with the host whose certificate it must have."""
        first, both = {"10.0.0.1:50061": "executors"}, ["10.0.0.1:50061", "10.0.0.2:50061"]
        told = told_by(Resolver(list(first), list(first), both))
        assert [first, dict.fromkeys(both, "executors")] == told

    def test_name_that_cannot_be_looked_up_means_what_it_did(self):
        """A name server that is away takes no executor away."""
        told = told_by(Resolver(["10.0.0.1:50061"], OSError("away"), OSError("away")))
        assert [{"10.0.0.1:50061": "executors"}] == told

    def test_unknown_name_means_no_executor(self):
        """The service waits for one."""
        assert [{}] == told_by(Resolver(OSError("unknown")))


class TestLookUp:
    def test_local_name_is_found(self):
        """The system's resolver answers; a host with both kinds of address is named by IPv4."""
        assert ["127.0.0.1:50061"] == look_up("dns:localhost:50061")

    def test_addresses_of_ipv6_have_brackets(self, monkeypatch):
        """They are addresses that can be connected to."""
        answer = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 50061, 0, 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
        assert ["[fd00::1]:50061"] == look_up(NAME)

    @pytest.mark.parametrize("name", ["dns:///executors:1", "dns:executors:1"])
    def test_host_is_the_name_without_scheme_and_port(self, name):
        """That is what certificates name."""
        assert "executors" == host_of(name)
