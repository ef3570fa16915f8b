"""Runs of tests under other settings, as the command makes and reports them."""

from __future__ import annotations

import json

import pytest

from tests.processors import run
from tests.processors.run import SETTINGS, chosen, environment, outcome, table

UNDER = {
    "machine": "2 cores",
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
    page = table(UNDER, {"threads=2": outcome("threads=2", 1, "FAILED a.py::b\n1 failed in 1s", 1)})
    assert len(SETTINGS) - 1 == page.count("| NOT RUN |")
    assert "| `threads=2` | 1 | 1 failed | 1 |" in page
    assert "- `threads=2`: `a.py::b`" in page


def test_results_of_another_commit_are_not_kept(tmp_path):
    """
    Outcomes stay beside new ones under the same conditions alone.
    """
    path = tmp_path / "results.json"
    kept = {"setting": "unset", "exit_code": 0, "summary": "1 passed", "seconds": 1.0, "failed": []}
    path.write_text(json.dumps({"conditions": UNDER, "outcomes": [kept]}))
    assert ["unset"] == list(run.kept_outcomes(path, UNDER))
    assert {} == run.kept_outcomes(path, {**UNDER, "commit": "def"})


def test_a_pattern_that_matches_nothing_is_refused():
    """
    A misspelt setting is an error with the names there are, not a run of nothing.
    """
    assert ["threads=1", "threads=2"] == chosen(["threads*"])
    with pytest.raises(SystemExit, match="no setting matches 'treads'; they are unset"):
        chosen(["treads"])
