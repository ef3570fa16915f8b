"""The monitoring files as tests read them: rules, dashboard queries, and the metrics that they name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "deploy/monitoring"
PROMTOOL_MISSING = 75
"""Exit status of deploy/local/promtool where there is no promtool."""

_KEYWORDS = frozenset({"and", "or", "unless", "offset", "bool"})
_NOT_METRICS = re.compile(
    r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)'
)
_NAME = re.compile(r"(?<![\w:.])([A-Za-z_:][\w:]*)(?!\s*\()(?![\w:])")


def promtool(*arguments: object) -> str:
    """Run promtool, which must succeed; without one the test fails in CI and is skipped elsewhere."""
    command = [str(ROOT / "deploy/local/promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == PROMTOOL_MISSING and not os.environ.get("CI"):
        pytest.skip(f"NOT TESTED: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(*arguments: str) -> str:
    """Run a script of the project and return what it prints."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def rules(*files: str) -> list[dict]:
    """Return the rules of the named files, of all without a name."""
    paths = [MONITORING / f"rules/{file}.yml" for file in files]
    found = []
    for path in paths or sorted((MONITORING / "rules").glob("*.yml")):
        for group in yaml.safe_load(path.read_text())["groups"]:
            found += group["rules"]
    return found


def dashboard() -> dict:
    """Return the dashboard."""
    return json.loads((MONITORING / "dashboard.json").read_text())


def dashboard_queries(window: str = "5m") -> dict[str, str]:
    """Return the dashboard's queries as Prometheus takes them, for all instances, by their place."""
    values = {"$job": ".+", "$instance": ".+", "$__rate_interval": window}
    queries = {}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in values.items():
                query = query.replace(name, value)
            queries[f"{panel['title']}: {target['legendFormat']}"] = query
    return queries


def metrics_of(query: str) -> set[str]:
    """Return the names of the metrics that a query asks for."""
    return set(_NAME.findall(_NOT_METRICS.sub(" ", query))) - _KEYWORDS
