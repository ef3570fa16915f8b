"""The real Prometheus with the rules of deploy/monitoring, all times of which are shortened."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from tests.deploy.monitoring.promql import MONITORING
from tests.deploy.prometheus import PrometheusProcess

WINDOW = "20s"
SHORTER = (
    (re.compile(r"\[6h\] offset 15m"), "[60s] offset 25s"),
    (re.compile(r"\[(5|10|15)m\]"), f"[{WINDOW}]"),
    (re.compile(r"\bfor: (\d|\d\ds)\w?$", re.MULTILINE), "for: 2s"),
    (re.compile(r"\bfor: \d\dm$", re.MULTILINE), "for: 10s"),
)
"""Replacements that make a rule of minutes one of seconds; names of recorded metrics stay."""


class Prometheus(PrometheusProcess):
    """
    A Prometheus that scrapes and evaluates every second.

    Attributes:
        scheduler_targets: File of the scheduler's targets, which is read again when it changes.
    """

    def __init__(self, folder: Path, *, scheduler: str, gateway: str) -> None:
        """
        Args:
            folder: Folder for its files.
            scheduler: Address of the scheduler's page.
            gateway: Address of the gateway's.

        Raises:
            PrometheusError: It is missing, or does not start.
        """
        self._scheduler = scheduler
        self.scheduler_targets = folder / "scheduler.json"
        self.know_scheduler(is_known=True)
        rules = folder / "rules"
        rules.mkdir()
        for path in (MONITORING / "rules").glob("*.yml"):
            text = path.read_text()
            for long, short in SHORTER:
                text = long.sub(short, text)
            (rules / path.name).write_text(text)
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        config["rule_files"] = ["rules/*.yml"]  # with the rules that few want
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        of_scheduler, of_gateway = config["scrape_configs"]
        of_scheduler["file_sd_configs"] = [
            {"files": [str(self.scheduler_targets)], "refresh_interval": "1s"}
        ]
        del of_scheduler["static_configs"]
        of_gateway["static_configs"] = [{"targets": [gateway]}]
        super().__init__(folder, config)

    def know_scheduler(self, *, is_known: bool) -> None:
        """Write the scheduler's target, or none."""
        targets = [{"targets": [self._scheduler]}] if is_known else []
        partial = self.scheduler_targets.with_suffix(".new")
        partial.write_text(json.dumps(targets))
        partial.replace(self.scheduler_targets)

    def values(self, query: str) -> list[float]:
        """
        Return the values that a query has now, NaN left out.

        Raises:
            PrometheusError: Prometheus refused the query.
        """
        return [one.value for one in self.samples(query)]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        alerts = self.get("alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def broken_rules(self) -> dict[str, str]:
        """Return the rules whose last evaluation failed, with the error."""
        groups = self.get("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return {rule["name"]: rule["lastError"] for rule in rules if rule["health"] == "err"}
