"""The rank that a fault strikes, and how it is left; processes that sleep stand for ranks."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import psutil
import pytest

from tests.faults.injecting import one_rank
from tests.faults.schedule import Fault, Kind
from tests.waiting import wait_until

LEADER = """
import os, subprocess, time
for own in ({}, {"RANK": "1"}, {}):
    subprocess.Popen(["sleep", "600"], env={**os.environ, **own})
time.sleep(600)
"""
"""A rank 0 that has a rank 1, and two children that are no ranks: one is older, one younger."""


@pytest.fixture
def leader():
    env = {name: text for name, text in os.environ.items() if name != "RANK"}
    process = psutil.Popen([sys.executable, "-c", LEADER], env=env)
    names = ["sleep"] * 3
    try:
        wait_until(lambda: names == [one.name() for one in process.children()], "its children")
        yield process
    finally:
        for one in (*process.children(), process):
            one.kill()
        process.wait()


class TestOneRank:
    def test_children_that_are_no_ranks_are_left_out(self, leader):
        """
        The ranks of an executor are its rank 0 and those children of it that are ranks.
        """
        _, rank_1, _ = leader.children()
        assert [leader.pid, rank_1.pid] == [one.pid for one in one_rank.ranks_of(leader)]

    @pytest.mark.parametrize("number", [0, 1])
    def test_a_slow_rank_goes_on_though_the_fault_is_cut_short(self, leader, number, monkeypatch):
        """
        A rank that stands still when the test fails is not left so.
        """
        executor = SimpleNamespace(pid=leader.pid, process=lambda: leader)
        target = SimpleNamespace(rig=SimpleNamespace(working_executor=lambda: executor))
        fault = Fault(kind=Kind.RANK_SLOWED, is_upward=False, lasts_s=60.0, wait_s=0.0, draw=number)
        monkeypatch.setattr(one_rank, "STOPPED_S", -1.0)
        with pytest.raises(ValueError, match="sleep length"):
            one_rank.RANK_ACTIONS[Kind.RANK_SLOWED](fault, target)
        states = [one.status() for one in (leader, *leader.children())]
        assert psutil.STATUS_STOPPED not in states
