"""Each name in deploy/kubernetes means something that is there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import yaml

from tests.deploy.kubernetes.manifests import (
    COMBINATIONS,
    KUBERNETES,
    ROOT,
    Document,
    components,
    pods,
)

README = KUBERNETES / "README.md"
OF_USERS = {"tandem-link", "tandem-tokens"}
"""Secrets that a user makes; README.md has the command."""
DNS = {(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")}
"""Ports of DNS, the second one that of OpenShift's pods."""


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [one for one in documents if one["kind"] == kind]


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def pod_selectors(node: object) -> Iterator[dict[str, str]]:
    """Yield the labels of each `podSelector` below a node that has some."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "podSelector" and "matchLabels" in value:
                yield value["matchLabels"]
            yield from pod_selectors(value)
    if isinstance(node, list):
        for one in node:
            yield from pod_selectors(one)


class TestCoverage:
    def test_every_component_is_rendered(self):
        """
        Each component is part of a combination that is rendered.
        """
        assert set(components()) == {name for _, chosen in COMBINATIONS.values() for name in chosen}

    def test_pages_name_every_overlay_and_component(self):
        """
        README.md tells about each overlay and component, and about nothing that is gone.
        """
        page = README.read_text()
        for folder in ("overlays", "components"):
            there = {path.name for path in (KUBERNETES / folder).iterdir()}
            told = set(re.findall(rf"\]\({folder}/([a-z-]+)\)", page))
            assert there == told


class TestSelectors:
    def test_service_finds_pods_that_have_its_ports(self, renderings):
        """
        Each Service selects pods of one workload, all of whose containers name its target ports.
        """
        offences = []
        for name, documents in renderings.items():
            for service in of_kind(documents, "Service"):
                spec = service["spec"]
                found = [p for p in pods(name, documents) if selects(spec["selector"], p.labels)]
                ports = {
                    port["name"]
                    for pod in found
                    for container in pod.containers
                    for port in container.get("ports", ())
                }
                wanted = {port["targetPort"] for port in spec["ports"]}
                if len(found) != 1 or not wanted <= ports:
                    offences.append(f"{name}: {service['metadata']['name']}")
        assert [] == offences

    def test_workload_selects_its_own_pods(self, renderings):
        """
        Deployments, StatefulSets and disruption budgets select labels that pods have.
        """
        offences = []
        for name, documents in renderings.items():
            labels = [pod.labels for pod in pods(name, documents)]
            for one in documents:
                if one["kind"] not in ("Deployment", "StatefulSet", "PodDisruptionBudget"):
                    continue
                selector = one["spec"]["selector"]["matchLabels"]
                own = (
                    [one["spec"]["template"]["metadata"]["labels"]]
                    if "template" in one["spec"]
                    else labels
                )
                if not any(selects(selector, each) for each in own):
                    offences.append(f"{name}: {one['kind']} {one['metadata']['name']}")
        assert [] == offences

    def test_budget_counts_every_pod_whose_end_stops_an_executor(self, renderings):
        """
        The budget of executors selects all their pods, each rank too, and lets one of them go.
        """
        uncounted, ranks = [], set()
        for name, documents in renderings.items():
            (budget,) = [
                one["spec"]
                for one in of_kind(documents, "PodDisruptionBudget")
                if one["metadata"]["name"] == "tandem-executor"
            ]
            assert 1 == budget["maxUnavailable"]
            for pod in pods(name, documents):
                if pod.labels["app.kubernetes.io/component"] == "executor":
                    ranks.add(pod.labels.get("leaderworkerset.sigs.k8s.io/worker-index"))
                    if not selects(budget["selector"]["matchLabels"], pod.labels):
                        uncounted.append(pod.where)
        assert {None, "0", "1"} == ranks
        assert [] == uncounted

    def test_no_service_tells_of_plain_text_where_there_is_tls(self, renderings):
        """
        Services and pools name HTTP/2 in plain text as their protocol only where no port has TLS.
        """
        plain = {name for name, one in renderings.items() if "kubernetes.io/h2c" in str(one)}
        encrypted = {name for name, one in renderings.items() if of_kind(one, "Certificate")}
        assert plain | encrypted == set(renderings)
        assert set() == plain & encrypted

    def test_monitors_and_pools_find_pods_or_services(self, renderings):
        """
        Selectors for Prometheus and for a Gateway find pods with a port of that name or number.
        """
        found = []
        for name, documents in renderings.items():
            for pool in of_kind(documents, "InferencePool"):
                numbers = {
                    port["containerPort"]
                    for pod in pods(name, documents)
                    if selects(pool["spec"]["selector"]["matchLabels"], pod.labels)
                    for port in pod.spec["containers"][0]["ports"]
                }
                assert {one["number"] for one in pool["spec"]["targetPorts"]} <= numbers
                found.append("InferencePool")
            for monitor in of_kind(documents, "PodMonitor"):
                names = {
                    port["name"]
                    for pod in pods(name, documents)
                    if selects(monitor["spec"]["selector"]["matchLabels"], pod.labels)
                    for port in pod.spec["containers"][0]["ports"]
                }
                assert {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]} <= names
                found.append("PodMonitor")
        assert {"InferencePool", "PodMonitor"} == set(found)


class TestNetworkPolicies:
    def test_link_is_open_to_schedulers_alone(self, renderings):
        """
        No policy opens the executor's port to pods but the scheduler's and, between ranks, its own.
        """
        callers = set()
        for documents in renderings.values():
            for policy in of_kind(documents, "NetworkPolicy"):
                spec = policy["spec"]
                if (
                    spec["podSelector"]["matchLabels"].get("app.kubernetes.io/name")
                    != "tandem-executor"
                ):
                    continue
                for rule in spec["ingress"]:
                    assert rule["from"]
                    callers |= {
                        peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
                        for peer in rule["from"]
                    }
        assert {"tandem-scheduler", "tandem-executor"} == callers

    def test_all_pods_are_closed_first(self, renderings):
        """
        The component network-policies selects every pod of Tandem with a policy that allows nothing.
        """
        (name,) = [one for one in renderings if one == "gpu, all of one cluster"]
        documents = renderings[name]
        (closed,) = [
            one
            for one in of_kind(documents, "NetworkPolicy")
            if not one["spec"].keys() & {"ingress", "egress"}
        ]
        assert ["Ingress", "Egress"] == closed["spec"]["policyTypes"]
        selector = closed["spec"]["podSelector"]["matchLabels"]
        assert [] == [
            pod.where for pod in pods(name, documents) if not selects(selector, pod.labels)
        ]

    def test_policies_name_labels_and_ports_that_exist(self, renderings):
        """
        Labels and named ports of policies are those of pods of this page, of clients or of readers
        of metrics.
        """
        known_names = {"tandem-scheduler", "tandem-executor", "tandem-gateway"}
        for documents in renderings.values():
            for policy in of_kind(documents, "NetworkPolicy"):
                for labels in pod_selectors(policy["spec"]):
                    if "app.kubernetes.io/name" in labels:
                        assert labels["app.kubernetes.io/name"] in known_names
                    else:
                        assert labels in (
                            {"tandem-client": "true"},
                            {"tandem-metrics": "true"},
                            {"app.kubernetes.io/part-of": "tandem"},
                        )
                ports = re.findall(r"'port': '([a-z]+)'", str(policy))
                assert set(ports) <= {"link", "grpc", "metrics", "admin", "http"}

    def test_calls_to_everywhere_are_for_names_alone(self, renderings):
        """
        A pod that may call addresses that no rule names may do so at the ports of DNS, all of them.
        """
        found = [
            {(port["port"], port["protocol"]) for port in rule["ports"]}
            for documents in renderings.values()
            for policy in of_kind(documents, "NetworkPolicy")
            for rule in policy["spec"].get("egress", ())
            if "to" not in rule
        ]
        assert found
        assert [] == [ports for ports in found if ports != DNS]


class TestNames:
    def test_secrets_and_config_maps_are_made_or_documented(self, renderings):
        """
        Each Secret that a pod or an issuer names is made by a Certificate or by a documented command,
        and each ConfigMap is rendered with it.
        """
        page = README.read_text()
        for secret in OF_USERS:
            assert f"create secret generic {secret} " in page
        missing = []
        for name, documents in renderings.items():
            made = {one["spec"]["secretName"] for one in of_kind(documents, "Certificate")}
            maps = {one["metadata"]["name"] for one in of_kind(documents, "ConfigMap")}
            text = str(documents)
            wanted = set(re.findall(r"'secretName': '([^']+)'", text))
            missing += [f"{name}: Secret {one}" for one in wanted - made - OF_USERS]
            named = set(re.findall(r"'configMapRef': \{'name': '([^']+)'", text))
            missing += [f"{name}: ConfigMap {one}" for one in named - maps]
        assert [] == missing

    def test_rules_reach_an_operator_as_they_are(self):
        """
        The documented command makes a PrometheusRule of each file of rules that it names.
        """
        (told,) = re.findall(r"```sh\n(for rules in .*?)```", README.read_text(), re.DOTALL)
        command = f"kubectl() {{ echo ---; cat; }}\n{told}"
        done = subprocess.run(
            ["bash", "-euc", command], cwd=ROOT, capture_output=True, text=True, check=True
        )
        made = [one for one in yaml.safe_load_all(done.stdout) if one]
        rules = ROOT / "deploy/monitoring/rules"
        assert {"PrometheusRule"} == {one["kind"] for one in made}
        assert {
            f"tandem-{name}": yaml.safe_load((rules / f"{name}.yml").read_text())
            for name in ("recording", "alerts")
        } == {one["metadata"]["name"]: one["spec"] for one in made}

    def test_volumes_priorities_and_targets_exist(self, renderings):
        """
        Volume claims, priority classes, and what autoscalers scale are rendered beside their users.
        """
        missing = []
        for name, documents in renderings.items():
            there = {(one["kind"], one["metadata"]["name"]) for one in documents}
            wanted = {
                ("PriorityClass", pod.spec["priorityClassName"]) for pod in pods(name, documents)
            }
            for pod in pods(name, documents):
                mounted = {m["name"] for c in pod.containers for m in c["volumeMounts"]}
                assert mounted == {volume["name"] for volume in pod.spec["volumes"]}
                for volume in pod.spec["volumes"]:
                    if claim := volume.get("persistentVolumeClaim"):
                        wanted.add(("PersistentVolumeClaim", claim["claimName"]))
            for one in documents:
                if target := one.get("spec", {}).get("scaleTargetRef"):
                    wanted.add((target["kind"], target["name"]))
                if issuer := one.get("spec", {}).get("issuerRef"):
                    wanted.add(("Issuer", issuer["name"]))
                if one["kind"] == "StatefulSet":
                    wanted.add(("Service", one["spec"]["serviceName"]))
            missing += [f"{name}: {kind} {one}" for kind, one in wanted - there]
        assert [] == missing

    def test_addresses_name_services_and_their_ports(self, renderings):
        """
        Each host that a flag or an autoscaler calls is a Service with that port.
        """
        missing = []
        for name, documents in renderings.items():
            places = {
                (service["metadata"]["name"], port["port"])
                for service in of_kind(documents, "Service")
                for port in service["spec"]["ports"]
            }
            called = re.findall(
                r"(?:dns:///|scheduler=|')(tandem-[a-z-]+)(?:\.tandem\.svc)?:(\d+)", str(documents)
            )
            missing += [f"{name}: {one}" for one in called if (one[0], int(one[1])) not in places]
            assert called
        assert [] == missing

    def test_executors_certificate_names_the_host_that_is_called(self, renderings):
        """
        The link's certificate holds the headless Service's name, and localhost for probes.
        """
        names = {
            tuple(one["spec"]["dnsNames"])
            for documents in renderings.values()
            for one in of_kind(documents, "Certificate")
            if one["metadata"]["name"] == "tandem-link-executor"
        }
        assert {("tandem-executor", "localhost")} == names
