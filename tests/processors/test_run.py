"""Runs of tests under other settings, as the command makes and reports them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.processors import run
from tests.processors.run import NO_INSTRUCTION, SETTINGS, chosen, environment, outcome, page

UNDER = {
    "machine": "2 cores",
    "vectors": "AVX2",
    "python": "3.11",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "numpy": "2.3.5",
    "commit": "abc",
    "command": ["pytest", "-q"],
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_changes_one_variable_and_unsets_the_others(setting):
    """
    A process sees the variables of its own setting and none of the others', whatever is set
    outside.
    """
    outer = {name: "outer" for each in SETTINGS.values() for name in each} | {"HOME": "/root"}
    assert {"HOME": "/root", **SETTINGS[setting]} == environment(setting, outer)


def test_counts_and_failures_are_read():
    """
    Failed tests and errors are named, and the last line's counts are the summary.
    """
    said = "FAILED a.py::b[1] - assert 1\nERROR c.py::d\n1 failed, 2 passed, 1 error in 3.40s (0:00:03)\n"
    found = outcome("unset", 1, said, 3.4)
    assert ("a.py::b[1]", "c.py::d") == found.failed
    assert "1 failed, 2 passed, 1 error" == found.summary


def test_a_run_that_ends_early_has_no_counts():
    """
    Neither a process that was stopped nor one that said nothing passes for a result.
    """
    assert "out of time" == outcome("unset", None, "1 passed in 2s", 9.0).summary
    assert "no summary" == outcome("unset", -9, "...", 9.0).summary


def test_a_setting_without_a_run_says_so():
    """
    Each setting has a line, and one that was not run claims nothing.
    """
    one = outcome("threads=2", 1, "FAILED a.py::b\n1 failed in 1s", 1)
    written = page([(UNDER, {"threads=2": one})])
    assert len(SETTINGS) - 1 == written.count("| NOT RUN |")
    assert "| `threads=2` | 1 | 1 failed | 1 |" in written
    assert "- `threads=2`: `a.py::b`" in written


def test_a_setting_that_computes_the_same_as_without_is_marked():
    """
    A line says whether the probe computed the same bits as without a setting.
    """
    passed = outcome("unset", 0, "1 passed in 1s", 1)
    outcomes = {
        name: replace(passed, setting=name, probe=digest)
        for name, digest in (("unset", "a"), ("threads=1", "a"), ("threads=2", "b"))
    }
    lines = page([(UNDER, outcomes)]).splitlines()
    assert "| `unset` | 0 | 1 passed | 1 |" in lines
    assert "| `threads=1` = | 0 | 1 passed | 1 |" in lines
    assert "| `threads=2` | 0 | 1 passed | 1 |" in lines


def test_a_setting_that_the_processor_lacks_is_not_run(monkeypatch, tmp_path):
    """
    Where the probe meets an illegal instruction, pytest is not begun, the line says why, and the
    command does not count it as a failure.
    """
    monkeypatch.setattr(run, "PROBE", tmp_path / "probe.py")
    run.PROBE.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    assert 0 == run.main(["--settings", "*=avx512", "--out", str(tmp_path), "--", "-q"])
    written = (tmp_path / "results.md").read_text()
    assert f"| `ATEN_CPU_CAPABILITY=avx512` | | NOT RUN: {NO_INSTRUCTION} | |" in written


@pytest.mark.slow
def test_the_probe_computes_the_same_twice():
    """
    A setting that changes nothing is recognized, because the probe's inputs never change.
    """
    assert run.probe("unset") == run.probe("unset") != ""


def test_results_of_another_commit_are_replaced(tmp_path):
    """
    Outcomes stay beside new ones under the same conditions alone, and give way to those of another
    commit.
    """
    kept = {"unset": outcome("unset", 0, "1 passed in 1s", 1)}
    run.write_records(tmp_path, [(UNDER, kept)])
    records = run.read_records(tmp_path / "results.json")
    assert kept == run.record_of(records, UNDER)
    assert {} == run.record_of(records, {**UNDER, "commit": "def"})
    assert ["def"] == [under["commit"] for under, _ in records]


def test_results_of_another_processor_or_of_other_tests_stay():
    """
    A record of wider vectors, or of other arguments to pytest, is kept with its commit.
    """
    records = [({**UNDER, "vectors": "AVX-512"}, {"unset": outcome("unset", 0, "1 passed", 1)})]
    assert {} == run.record_of(records, {**UNDER, "commit": "def"})
    assert {} == run.record_of(records, {**UNDER, "command": ["pytest", "a"]})
    assert ["abc", "def", "abc"] == [under["commit"] for under, _ in records]
    assert records[0][1]


def test_a_pattern_that_matches_nothing_is_refused():
    """
    A misspelt setting is an error with the names there are, not a run of nothing.
    """
    assert ["threads=1", "threads=2"] == chosen(["threads*"])
    with pytest.raises(SystemExit, match="no setting matches 'treads'; they are unset"):
        chosen(["treads"])
