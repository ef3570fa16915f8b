"""Autoscalers of deploy/kubernetes keep busy executors, own their number, and open one port alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import yaml

from scheduler_svc.frontend.operators.scaler import Trigger
from tandem.settings.options import table_of
from tests.deploy.kubernetes.manifests import ROOT, Document, render_combination
from tests.deploy.kubernetes.test_references import of_kind

SCHEDULER = {"app.kubernetes.io/name": "tandem-scheduler"}
METRICS_OF_KEDA = ["queued_requests", "live_requests"]
METRICS_OF_HPA = ["tandem_requests_waiting", "tandem_requests_running"]


def ingress_of_scheduler(documents: list[Document]) -> list[Document]:
    """Return the ingress rules of all policies that select the scheduler by its name."""
    return [
        rule
        for policy in of_kind(documents, "NetworkPolicy")
        if policy["spec"]["podSelector"]["matchLabels"] == SCHEDULER
        for rule in policy["spec"].get("ingress", ())
    ]


def is_closed(documents: list[Document]) -> bool:
    """Return whether the component network-policies is part of a rendering."""
    names = {one["metadata"]["name"] for one in of_kind(documents, "NetworkPolicy")}
    return "tandem-deny" in names


def triggers(documents: list[Document]) -> Iterator[dict[str, str]]:
    """Yield the metadata of each trigger of KEDA."""
    for scaled in of_kind(documents, "ScaledObject"):
        yield from (one["metadata"] for one in scaled["spec"]["triggers"])


class TestPorts:
    def test_closed_scheduler_is_open_to_named_callers_alone(self, renderings):
        """
        With network-policies every rule of the scheduler's ports names its callers: rules add up.
        """
        closed = {name: one for name, one in renderings.items() if is_closed(one)}
        assert any("admin" in str(ingress_of_scheduler(one)) for one in closed.values())
        assert [] == [
            f"{name}: {rule['ports']}"
            for name, documents in closed.items()
            for rule in ingress_of_scheduler(documents)
            if not rule.get("from")
        ]

    def test_other_ports_stay_open_where_policies_are_not_used(self, renderings):
        """
        With autoscaling-keda and open-ports all reach the ports of requests and metrics, and KEDA's
        namespace alone reaches the admin port.
        """
        rules = ingress_of_scheduler(renderings["cpu, autoscaling-keda"])
        opened = {port["port"] for rule in rules if "from" not in rule for port in rule["ports"]}
        assert {"grpc", "metrics"} == opened
        (admin,) = [rule for rule in rules if "from" in rule]
        assert [{"port": "admin"}] == admin["ports"]
        assert {"kubernetes.io/metadata.name": "keda"} == (
            admin["from"][0]["namespaceSelector"]["matchLabels"]
        )

    @pytest.mark.parametrize(
        ("chosen", "message"),
        [
            (("autoscaling-keda",), "no matches for Id NetworkPolicy.*tandem-scheduler"),
            (("open-ports", "network-policies"), "already registered id.*tandem-scheduler"),
        ],
        ids=["neither", "both"],
    )
    def test_combination_that_would_break_fails_to_render(self, renderings, chosen, message):
        """
        autoscaling-keda needs one of network-policies and open-ports, which exclude each other.
        """
        with pytest.raises(ValueError, match=message):
            render_combination("cpu", chosen)


class TestTargets:
    def test_autoscaler_owns_the_number_of_executors(self, renderings):
        """
        The target of an autoscaler has no number of replicas, which each `kubectl apply` would set.
        """
        scaled = [
            target["spec"].get("replicas")
            for documents in renderings.values()
            for one in documents
            if (reference := one.get("spec", {}).get("scaleTargetRef"))
            for target in of_kind(documents, reference["kind"])
            if target["metadata"]["name"] == reference["name"]
        ]
        assert scaled
        assert {None} == set(scaled)

    def test_busy_executors_are_kept_while_nothing_waits(self, renderings):
        """
        Each autoscaler counts requests that run, too, with a target below what an executor holds.
        """
        options = {option.name: option for option in table_of("executor").options}
        most = int(options["max_batch_size"].default)
        found = []
        for documents in renderings.values():
            assert "MAX_BATCH_SIZE" not in str(of_kind(documents, "ConfigMap"))
            if told := [Trigger.read(one, "") for one in triggers(documents)]:
                assert METRICS_OF_KEDA == [one.metric for one in told]
                found.append(told[1].target)
            for one in of_kind(documents, "HorizontalPodAutoscaler"):
                external = [metric["external"] for metric in one["spec"]["metrics"]]
                assert METRICS_OF_HPA == [metric["metric"]["name"] for metric in external]
                found.append(float(external[1]["target"]["averageValue"]))
        assert found
        assert [] == [target for target in found if target >= most]

    def test_each_trigger_knows_the_authority_where_there_is_tls(self, renderings):
        """
        With autoscaling-keda-tls every trigger names the TriggerAuthentication that is rendered.
        """
        documents = renderings["gpu, all of one cluster"]
        (authentication,) = of_kind(documents, "TriggerAuthentication")
        (scaled,) = of_kind(documents, "ScaledObject")
        assert [authentication["metadata"]["name"]] * len(METRICS_OF_KEDA) == [
            one["authenticationRef"]["name"] for one in scaled["spec"]["triggers"]
        ]


def test_page_shows_what_the_component_has(renderings):
    """
    The ScaledObject on the page of autoscaling has target, addresses and triggers of the component.
    """
    page = (ROOT / "deploy/autoscaling.md").read_text()
    shown = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    documents = renderings["cpu, autoscaling-keda"]
    (told,), (made,) = of_kind(shown, "ScaledObject"), of_kind(documents, "ScaledObject")
    assert made["spec"]["scaleTargetRef"].items() >= told["spec"]["scaleTargetRef"].items()
    assert list(triggers(documents)) == list(triggers(shown))
