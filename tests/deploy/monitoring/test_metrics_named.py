"""Metrics that rules and dashboard name, against the pages of running services."""

from __future__ import annotations

import urllib.request

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tandem_openai_gateway.metrics import Metrics
from tests.deploy.monitoring import promql
from tests.deploy.monitoring.promql import MONITORING, dashboard, dashboard_queries, metrics_of
from tests.e2e.cluster import Cluster

SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}
PROMETHEUS_OWN = {"up"}
"""Metrics that Prometheus adds to each target."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return the names of all time series of a scheduler with an executor, and of a gateway."""
    folder = tmp_path_factory.mktemp("monitoring")
    cluster = Cluster(folder, folder, [], [])
    try:
        cluster.start_fixed_step_executor(1.0)
        address = cluster.scheduler.addresses()["metrics_address"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            page = answer.read().decode()
    finally:
        cluster.close()
    return names(page) | names(Metrics(lambda: 1.0).page().decode())


def names(page):
    """Return the names of the time series that a page may have."""
    return {
        f"{family.name}{suffix}"
        for family in text_string_to_metric_families(page)
        for suffix in SUFFIXES[family.type]
    }


def recorded():
    """Return the names of the metrics that rules record."""
    return {rule["record"] for rule in promql.rules() if "record" in rule}


class TestNames:
    def test_rules_name_metrics_that_exist(self, exported):
        """Every metric of a rule is exported by a service or recorded by another rule."""
        asked = {name for rule in promql.rules() for name in metrics_of(rule["expr"])}
        assert set() == asked - exported - recorded() - PROMETHEUS_OWN

    def test_dashboard_names_metrics_that_exist(self, exported):
        """Every metric of a panel is exported by a service or recorded by a rule."""
        asked = {name for query in dashboard_queries().values() for name in metrics_of(query)}
        assert set() == asked - exported - recorded()

    def test_units_are_base_units(self, exported):
        """Durations are in seconds and sizes in bytes, shares are ratios, and the name says so."""
        odd = ("_ms", "_milliseconds", "_minutes", "_kb", "_mb", "_percent", "_perc")
        assert [] == [name for name in exported if name.removesuffix("_total").endswith(odd)]
        assert all(name.startswith("tandem_") for name in exported)

    @pytest.mark.parametrize(
        ("query", "named"),
        [
            ('rate(a_total{reason="b c", x=~"d"}[5m]) / 2 > 0', {"a_total"}),
            ("sum by (job, le) (a:b_5m) unless on (x) c offset 5m", {"a:b_5m", "c"}),
            ("a * on (job) group_left (name) b and c or d", {"a", "b", "c", "d"}),
            ("histogram_quantile(0.5, sum by (le) (rate(h_bucket[1m]))) >= 0", {"h_bucket"}),
            ("min by (x) (a) - time() < 7 * 86400", {"a"}),
        ],
        ids=["matchers", "grouping", "matching", "functions", "numbers"],
    )
    def test_names_are_found_in_any_query(self, query, named):
        """Functions, labels, keywords and texts are no metrics."""
        assert named == metrics_of(query)


class TestDashboard:
    def test_file_is_what_its_source_makes(self):
        """dashboard.json is what dashboard.py writes."""
        done = promql.python("deploy/monitoring/dashboard.py", "--print")
        assert done == (MONITORING / "dashboard.json").read_text()

    def test_panels_have_places_of_their_own(self):
        """Panels have numbers and places of their own, in the width of the grid, and queries."""
        panels = dashboard()["panels"]
        places = [tuple(panel["gridPos"][key] for key in "xy") for panel in panels]
        assert len(panels) == len(set(places)) == len({panel["id"] for panel in panels})
        assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
        assert all(panel["targets"] for panel in panels if panel["type"] != "row")

    def test_every_query_parses(self, tmp_path):
        """Prometheus accepts each query of the dashboard."""
        queries = dashboard_queries()
        rules = [{"record": f"q:{at}", "expr": one} for at, one in enumerate(queries.values())]
        path = tmp_path / "queries.yml"
        path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
        promql.promtool("check", "rules", path)
        assert not [query for query in queries.values() if "$" in query]
