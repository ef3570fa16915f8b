"""Alerts: each fires in its fault case and only there, and has its section in the runbook."""

from __future__ import annotations

import re

import yaml

from tests.deploy.monitoring.alert_cases import CASES, FAULT_MINUTE, HEALTHY, INTERVAL_S
from tests.deploy.monitoring.promql import MONITORING, promtool, rules

FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'
SEVERITIES = {"critical", "warning", "info"}


def firing(alerts, minute):
    """Return the check that these alerts fire at a minute, and no others."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in alerts]
    return {"expr": FIRING, "eval_time": f"{minute}m", "exp_samples": samples}


def unit_test(case):
    """Return the case in promtool's form."""
    series = HEALTHY | case.series
    return {
        "name": case.name,
        "interval": f"{INTERVAL_S}s",
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [
            firing((), FAULT_MINUTE - 1),
            firing(case.firing, FAULT_MINUTE + case.minutes),
        ],
    }


class TestRules:
    def test_all_rules_and_the_configuration_are_valid(self):
        """Prometheus accepts every rule file, and the configuration that names them."""
        promtool("check", "rules", *sorted((MONITORING / "rules").glob("*.yml")))
        promtool("check", "config", MONITORING / "prometheus.yml")

    def test_each_alert_fires_in_its_case_alone(self, tmp_path):
        """In each case exactly the alerts of its fault fire, and none before the fault begins."""
        files = [str(MONITORING / f"rules/{name}.yml") for name in ("recording", "alerts")]
        tests = {
            "rule_files": files,
            "evaluation_interval": f"{INTERVAL_S}s",
            "tests": [unit_test(case) for case in CASES],
        }
        path = tmp_path / "cases.yml"
        path.write_text(yaml.safe_dump(tests))
        promtool("test", "rules", path)

    def test_names_of_vllm_have_its_values_and_label(self, tmp_path):
        """The rules for readers of vLLM's metrics keep the values and add the label model_name."""
        target = 'job="j", instance="i"'
        series = {
            f'tandem_model_info{{{target}, name="tiny", revision="r"}}': 1,
            f"tandem_requests_waiting{{{target}}}": 7,
            f'tandem_time_to_first_token_seconds_bucket{{{target}, le="0.5"}}': 3,
            f'tandem_requests_total{{{target}, outcome="finished", reason="EOS"}}': 4,
            f'tandem_requests_total{{{target}, outcome="finished", reason="STOP_STRING"}}': 5,
        }
        labels = f'{{{target}, model_name="tiny", name="tiny"'
        expected = {
            f"vllm:num_requests_waiting{labels}}}": 7,
            f'vllm:time_to_first_token_seconds_bucket{labels}, le="0.5"}}': 3,
            f'vllm:request_success_total{labels}, finished_reason="stop"}}': 9,
        }
        test = {
            "input_series": [{"series": one, "values": str(n)} for one, n in series.items()],
            "promql_expr_test": [
                {
                    "expr": one.partition("{")[0],
                    "eval_time": "0s",
                    "exp_samples": [{"labels": one, "value": n}],
                }
                for one, n in expected.items()
            ],
        }
        path = tmp_path / "names.yml"
        files = [str(MONITORING / "rules/vllm_names.yml")]
        path.write_text(yaml.safe_dump({"rule_files": files, "tests": [test]}))
        promtool("test", "rules", path)

    def test_each_alert_has_a_case(self):
        """No alert is without a case in which it fires."""
        fired = {name for case in CASES for name in case.firing}
        assert {rule["alert"] for rule in rules("alerts")} == fired

    def test_series_of_a_case_are_known(self):
        """A case changes series of the healthy system, or adds ones with labels of their own."""
        known = {series.partition("{")[0] for series in HEALTHY} | {"tandem_refusals_total"}
        assert known >= {series.partition("{")[0] for case in CASES for series in case.series}


class TestRunbook:
    def test_alerts_and_sections_are_the_same(self):
        """Every alert has one section in the runbook, and every section an alert, in their order."""
        sections = re.findall(r"^### (\w+)$", (MONITORING / "runbook.md").read_text(), re.MULTILINE)
        assert [rule["alert"] for rule in rules("alerts")] == sections

    def test_sections_tell_meaning_look_and_action(self):
        """Every section says what the alert means, what to look at and what to do."""
        _, *sections = (MONITORING / "runbook.md").read_text().split("\n### ")
        lacking = [
            (section.partition("\n")[0], word)
            for section in sections
            for word in ("**Means**", "**Look at**", "**Do**")
            if section.count(word) != 1
        ]
        assert [] == lacking

    def test_alerts_link_to_their_sections(self):
        """Every alert has a severity, a summary, a description and the address of its section."""
        for rule in rules("alerts"):
            notes = rule["annotations"]
            assert rule["labels"]["severity"] in SEVERITIES
            assert notes["summary"]
            assert notes["description"]
            address = f"/deploy/monitoring/runbook.md#{rule['alert'].lower()}"
            assert notes["runbook_url"].endswith(address), rule["alert"]
