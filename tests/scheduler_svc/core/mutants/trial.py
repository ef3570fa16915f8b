"""
Trials of mutants by the core's fast tests: one forked process per mutant.

The process is forked from one that has imported all but the core and its tests, and compiles the
mutant in place of the module: nothing on disk changes.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import sys
from pathlib import Path

import hypothesis.stateful  # noqa: F401  # imported before the fork
import numpy  # noqa: F401, ICN001  # likewise
import pytest

from tests.scheduler_svc.core.mutants.mutations import Mutant

ROOT = Path(__file__).parents[4]
TESTS = ROOT / "tests/scheduler_svc/core"
NOT_RUN = {
    "test_mutants.py",
    "test_planted_bugs.py",
    "test_planted_lane_bugs.py",
    "test_properties.py",
    "test_random_walks.py",
}
SELECTED = "not test_any_ and not very_deep"
"""
Expression that leaves out tests that search at random, so that a verdict can be repeated, and tests
that take long.
"""
NUM_WALKS = 30
MAX_CPU_S = {True: 50, False: 200}
"""Most CPU seconds of a brief trial and of any other; a mutant that never ends is noticed."""

RELATED = {
    "admitted_columns": ("slots", "decode_rows", "ends", "planner"),
    "admission": ("limits", "overlength", "choices", "recovery", "prior_outputs"),
    "prefill_admission": ("planner", "prefix_cache", "choices", "swapping", "prefills", "trials"),
    "output_processor": ("ends", "recovery", "planner", "prefix_cache", "prior_outputs"),
    "cell": ("admission", "ends", "request_events"),
    "deaths": ("trials", "trials_told", "suspects", "unproven_deaths", "recovery"),
    "decode_rows": ("planner", "retraction", "slots"),
    "lookahead": ("running_ahead", "trials"),
    "distrust": ("prefix_cache", "recovery"),
    "batch_builder": ("planner", "prefix_cache", "swapping"),
    "end_ids": ("ends", "slots"),
    "events": ("ends", "planner"),
    "executor_loss": ("recovery", "trials", "unproven_deaths"),
    "parallel_sampling": ("choices", "prior_outputs"),
    "gate": ("replica", "suspension", "binding", "coming_and_going"),
    "geometry": ("admission", "recovery"),
    "block_allocation": ("retraction", "preemption", "pausing", "prefills"),
    "headroom": ("new_token_ratio", "retraction", "planner"),
    "host_blocks": ("swapping",),
    "keyed_heap": ("queue", "policies"),
    "kv_cache": ("swapping", "prefix_cache", "recovery", "preemption"),
    "listing": ("request_events",),
    "live_requests": ("ends", "admission", "limits", "queue", "choices"),
    "options": (
        *("request_events", "admission", "new_token_ratio", "prefills", "policies"),
        *("whole_prefills",),
    ),
    "pausing": ("retraction",),
    "planned_rows": ("slots", "decode_rows", "ends"),
    "planner": ("prefills", "pausing", "preemption", "trials"),
    "precautions": ("trials", "out_of_memory", "poison"),
    "prefix_cache": ("prefix_index", "choices"),
    "request": ("ends", "recovery", "priority_preemption", "preemption"),
    "request_parts": ("request", "preemption", "priority_preemption", "limits", "ends"),
    "quarantine": ("poison", "trials"),
    "replica": ("ends", "recovery", "prefix_cache", "swapping", "pausing", "preemption"),
    "result_check": ("recovery", "ends", "planner", "running_ahead"),
    "retry_advice": ("limits",),
    "row_errors": ("prefix_cache", "bounds", "distrust"),
    "scheduler": (
        *("ends", "recovery", "admission", "suspension", "trials", "preemption"),
        *("priority_preemption",),
    ),
    "sent_steps": ("replica", "recovery", "running_ahead"),
    "shortage": ("retraction", "pausing", "preemption"),
    "slot_blocks": ("decode_rows", "planner"),
    "slot_tokens": ("decode_rows", "ends"),
    "slots": ("decode_rows", "ends", "planner"),
    "stats": ("counters", "ends", "planner", "admission"),
    "step_report": ("step_log", "swapping"),
    "step_room": ("out_of_memory", "trials"),
    "suspects": ("trials",),
    "swapping": ("suspension",),
    "telemetry": ("admission", "ends", "request_events", "step_log"),
    "tenant_queue": ("fair_queue", "queue", "policies"),
    "tenants": ("limits",),
    "token_counters": ("fair_queue",),
    "trial_lines": ("trials_told", "trials"),
    "trials": ("suspects", "trials_told", "unproven_deaths"),
    "victims": ("preemption", "retraction"),
}
"""Tests to try first on a mutant of a module, besides those named for it."""


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer of one module from a changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self._path = ROOT / mutant.path
        self._name = mutant.path.removesuffix(".py").replace("/", ".")
        self._source = mutant.apply(self._path.read_text())

    def find_spec(self, fullname, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        """Find the module that is changed, and no other."""
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(self._path))

    def exec_module(self, module) -> None:
        """Run the changed source."""
        module.__file__ = str(self._path)
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


class _FirstFailure:
    """The first test that failed."""

    def __init__(self) -> None:
        self.test = ""

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Note a report that came in."""
        if report.failed and not self.test:
            self.test = report.nodeid.split("/")[-1]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test's report; called by pytest."""
        self.note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a report of test collection; called by pytest."""
        self.note(report)


def begin(mutant: Mutant | None, *, is_brief: bool) -> tuple[int, int]:
    """
    Start a trial, which ends by itself; `is_brief` tries only the walks and the tests of the
    mutant's module.

    Returns:
        The process and a pipe that gives the verdict: the test that failed first, or nothing.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    os.setsid()  # else all trials together get one process's share of a machine others use too
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S[is_brief], MAX_CPU_S[is_brief]))
    os.write(writing, _verdict(mutant, is_brief=is_brief).encode())
    os._exit(0)


def _verdict(mutant: Mutant | None, *, is_brief: bool) -> str:
    names = {path.name for path in TESTS.rglob("test_*.py")} - NOT_RUN
    first: set[str] = set()
    if mutant is not None:
        sys.meta_path.insert(0, _Mutated(mutant))
        stem = Path(mutant.path).stem
        first = {f"test_{name}.py" for name in (stem, "bounds", *RELATED.get(stem, ()))} & names
    try:
        walks = importlib.import_module("tests.scheduler_svc.core.properties.random_walk")
        walks.walk_all(range(NUM_WALKS), num_events=25)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the mutant is noticed
        return f"walks: {type(error).__name__}"
    noticed_by = _test(first) if first else ""
    if not noticed_by and not is_brief:
        noticed_by = _test(names - first)
    return noticed_by


def _test(names: set[str]) -> str:
    failure = _FirstFailure()
    pytest.main(
        [
            "-x", "-q", "--tb=no", "-m", "not slow", "-k", SELECTED, "-p", "no:cacheprovider",
            "--timeout=0", f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}",
            *(str(path) for path in sorted(TESTS.rglob("test_*.py")) if path.name in names),
        ],
        plugins=[failure],
    )  # fmt: skip
    return failure.test
