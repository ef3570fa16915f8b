"""Lines of the log about a request or a step have the ids by which they are joined."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.test_sizes import ROOT, python_files

CORE_PROCESS = ("service", "core", "executor_client")
STEP_EVENTS = {"step_failed", "step_abandoned", "step_stuck", "step_done", "batch_refused"}
"""Events of lines about one step."""


def log_calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "_log":
                yield node


def keywords(call: ast.Call) -> set[str | None]:
    return {one.arg for one in call.keywords}


def events(call: ast.Call) -> set[str]:
    return {
        node.value
        for argument in call.args[:1]
        for node in ast.walk(argument)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def sources() -> list[Path]:
    services = {"scheduler_svc", "executor_svc"}
    return [path for path in python_files() if path.relative_to(ROOT).parts[0] in services]


def test_core_process_names_requests_with_their_traces():
    """
    A line of the core process names a request by `log_ids`, which add the id of its trace. In a
    frontend the context of the call does that.
    """
    alone = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sources()
        if path.relative_to(ROOT).parts[:2] in {("scheduler_svc", part) for part in CORE_PROCESS}
        for call in log_calls(path)
        if keywords(call) & {"request_id", "trace_id"}
    ]
    assert [] == alone


def test_lines_about_a_step_have_its_id():
    """
    A line about one step has `step_id`, in both services.
    """
    found: set[str] = set()
    without = []
    for path in sources():
        for call in log_calls(path):
            about = events(call) & STEP_EVENTS
            found |= about
            if about and "step_id" not in keywords(call):
                without.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert [] == without
    assert found == STEP_EVENTS
