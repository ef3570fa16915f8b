"""Waiting of OpenMP's threads, asleep or spinning."""

from __future__ import annotations

import pytest

from executor_svc.device.idle_threads import let_idle_threads_sleep


class TestLetIdleThreadsSleep:
    def test_waiting_is_passive_by_default(self):
        """
        With nothing set, threads sleep while they wait.
        """
        environ = {"PATH": "/bin"}
        let_idle_threads_sleep(environ)
        assert {"PATH": "/bin", "OMP_WAIT_POLICY": "PASSIVE"} == environ

    @pytest.mark.parametrize(
        "chosen",
        [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}, {"KMP_BLOCKTIME": "0"}],
        ids=str,
    )
    def test_choice_of_the_environment_stands(self, chosen):
        """
        A choice in the environment of how threads wait, for any OpenMP library, stands.
        """
        environ = dict(chosen)
        let_idle_threads_sleep(environ)
        assert chosen == environ
