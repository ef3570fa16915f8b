"""Each pod of deploy/kubernetes is as strict, bounded and patient as it has to be."""

from __future__ import annotations

import re

from deploy.images.health import options
from scheduler_svc.config.settings import load_settings as load_scheduler
from tandem.settings.options import table_of
from tandem_openai_gateway.settings import read_settings as load_gateway
from tests.deploy.kubernetes.manifests import KUBERNETES, Pod, pods

MAX_LINES = 160
LEFT_FOR_EXIT_S = 5
"""Least seconds that a process has after its drain, until the kubelet kills it."""
DEFAULT_DEADLINE_S = 600
"""Seconds in which a Deployment has to make progress unless it says otherwise."""
DRAINS = {
    "scheduler": ("--drain-grace-s=", 30.0),
    "gateway": ("--drain-grace-s=", 30.0),
    "executor": ("--stop-grace-s=", 20.0),
}
"""Flag of each container's time to drain, and its default in seconds."""
WRITTEN = {
    "scheduler": {"/tmp"},
    "gateway": {"/tmp"},
    "executor": {"/tmp", "/var/cache/tandem"},
    "verify-model": {"/tmp", "/var/cache/tandem"},
}
"""Folders that a container writes to, as the images say."""


def value_of(container, flag: str) -> str | None:
    found = [arg.removeprefix(flag) for arg in container.get("args", ()) if arg.startswith(flag)]
    return found[0] if found else None


def main_container(pod: Pod):
    (container,) = pod.spec["containers"]
    return container


class TestStrictness:
    def test_pods_are_those_that_a_restricted_namespace_admits(self, all_pods):
        """
        A pod runs as an ordinary user under the runtime's seccomp profile, and each container keeps
        no capability, cannot gain any, and cannot write to its root.
        """
        offences = []
        for pod in all_pods:
            own = pod.spec["securityContext"]
            if not (own["runAsNonRoot"] and own["runAsUser"] and own["fsGroup"]):
                offences.append(f"{pod.where}: user")
            if own["seccompProfile"] != {"type": "RuntimeDefault"}:
                offences.append(f"{pod.where}: seccomp")
            for container in pod.containers:
                wanted = {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                if container["securityContext"] != wanted:
                    offences.append(f"{pod.where}: {container['name']}")
        assert [] == offences

    def test_pods_hold_no_token_of_the_cluster(self, all_pods):
        """
        No pod gets a service account's token, or variables of the namespace's Services.
        """
        assert [] == [
            pod.where
            for pod in all_pods
            if pod.spec.get("automountServiceAccountToken") is not False
            or pod.spec.get("enableServiceLinks") is not False
        ]

    def test_containers_write_to_volumes_of_the_pod_alone(self, all_pods):
        """
        A container writes to emptyDirs with a limit, and all else is mounted read-only.
        """
        offences = []
        for pod in all_pods:
            volumes = {one["name"]: one for one in pod.spec["volumes"]}
            for container in pod.containers:
                written = set()
                for mount in container["volumeMounts"]:
                    scratch = volumes[mount["name"]].get("emptyDir")
                    if scratch is None and not mount.get("readOnly"):
                        offences.append(f"{pod.where}: {mount['name']} can be written to")
                    if scratch is not None:
                        written.add(mount["mountPath"])
                        assert "sizeLimit" in scratch
                if missing := WRITTEN[container["name"]] - written:
                    offences.append(f"{pod.where}: {container['name']} cannot write to {missing}")
        assert [] == offences

    def test_containers_have_requests_and_a_memory_limit(self, all_pods):
        """
        Each container asks for CPU and memory and is ended, alone, when it takes more memory.
        """
        assert [] == [
            f"{pod.where}: {container['name']}"
            for pod in all_pods
            for container in pod.containers
            if not {"cpu", "memory"} <= container["resources"]["requests"].keys()
            or "memory" not in container["resources"]["limits"]
        ]


class TestTimes:
    def test_grace_time_covers_preparation_and_drain(self, all_pods):
        """
        The kubelet waits for preStop, the service's own time to drain, and some seconds more.
        """
        short = []
        for pod in all_pods:
            container = main_container(pod)
            flag, default = DRAINS[container["name"]]
            drain_s = float(value_of(container, flag) or default)
            stop = container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
            needed_s = stop["sleep"]["seconds"] + drain_s + LEFT_FOR_EXIT_S
            if pod.spec["terminationGracePeriodSeconds"] < needed_s:
                short.append(f"{pod.where}: {needed_s} s")
        assert [] == short

    def test_rollout_waits_for_the_start_of_an_executor(self, renderings):
        """
        The scheduler is ready once an executor is: its rollout does not fail before that has started.
        """
        short = []
        for name, documents in renderings.items():
            (rollout,) = [
                one["spec"].get("progressDeadlineSeconds", DEFAULT_DEADLINE_S)
                for one in documents
                if (one["kind"], one["metadata"]["name"]) == ("Deployment", "tandem-scheduler")
            ]
            starts = [
                probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
                for pod in pods(name, documents)
                if main_container(pod)["name"] == "executor"
                if (probe := main_container(pod).get("startupProbe"))
            ]
            if rollout < max(starts, default=0):
                short.append(f"{name}: {rollout} s for {starts}")
        assert [] == short

    def test_scheduler_is_replaced_after_it_has_gone(self, renderings):
        """
        One scheduler at a time holds the executors: its Deployment recreates its only replica.
        """
        assert {(1, "Recreate")} == {
            (one["spec"]["replicas"], one["spec"]["strategy"]["type"])
            for documents in renderings.values()
            for one in documents
            if one["kind"] == "Deployment" and one["metadata"]["name"] == "tandem-scheduler"
        }


class TestProbes:
    def test_each_probe_asks_for_a_health_name_that_exists(self, all_pods):
        """
        Probes ask for liveness, tandem.ready or tandem.progress, at a port of the container.
        """
        asked = set()
        for pod in all_pods:
            container = main_container(pod)
            ports = {one["containerPort"] for one in container.get("ports", ())}
            for which in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container.get(which, {})
                if "grpc" in probe:
                    assert probe["grpc"]["port"] in ports
                    asked.add((container["name"], which, probe["grpc"].get("service", "")))
                if "exec" in probe:
                    _, _, module, address, service, *_ = probe["exec"]["command"]
                    assert module == "tandem_health"
                    assert int(address.rpartition(":")[2]) in ports
                    asked.add((container["name"], which, service))
        assert {
            ("executor", "livenessProbe", "tandem.progress"),
            ("executor", "livenessProbe", "tandem.ready"),  # podman has but one
            ("executor", "readinessProbe", "tandem.ready"),
            ("executor", "startupProbe", "tandem.ready"),
            ("scheduler", "livenessProbe", ""),
            ("scheduler", "livenessProbe", "tandem.ready"),
            ("scheduler", "readinessProbe", "tandem.ready"),
            ("scheduler", "startupProbe", ""),
        } == asked

    def test_each_probe_in_a_container_has_arguments_that_its_program_takes(self, all_pods):
        """
        The health check of the images takes the command line of each exec probe as it stands.
        """
        commands = {
            tuple(probe["exec"]["command"])
            for pod in all_pods
            for container in pod.containers
            for key, probe in container.items()
            if key.endswith("Probe") and "exec" in probe
        }
        assert any("--cert=" in str(command) for command in commands)
        for python, flag, module, *arguments in commands:
            assert ("python", "-m", "tandem_health") == (python, flag, module)
            chosen = options(arguments)
            assert (chosen.address, chosen.service) == tuple(arguments[:2])
            files = {"ca": chosen.ca, "cert": chosen.cert, "key": chosen.key}
            given = {f"--{name}={path}" for name, path in files.items() if path is not None}
            assert given == set(arguments[2:])

    def test_port_with_tls_is_not_asked_by_the_kubelet(self, all_pods):
        """
        The kubelet's gRPC probes know no TLS: a container that listens with it has exec probes.
        """
        with_tls = [
            main_container(pod)
            for pod in all_pods
            if re.search(r"TLS_CERT|--tls-cert", str(main_container(pod)))
        ]
        assert with_tls
        assert [] == [one["name"] for one in with_tls if "'grpc': {" in str(one)]


class TestOptions:
    def test_every_variable_is_an_option_of_its_service(self, renderings, all_pods):
        """
        Each variable of a ConfigMap or a container is an option of the service that reads it.
        """
        variables = {
            (one["metadata"]["name"].rpartition("-")[0], key)
            for documents in renderings.values()
            for one in documents
            if one["kind"] == "ConfigMap"
            for key in one["data"]
        }
        known = {
            f"tandem-{name}": {
                f"{table.env_prefix}{option.name.upper()}" for option in table.options
            }
            for name, table in ((name, table_of(name)) for name in ("scheduler", "executor"))
        }
        inline = {
            (f"tandem-{container['name']}", one["name"])
            for pod in all_pods
            for container in pod.containers
            for one in container.get("env", ())
        }
        assert [] == [
            (name, key) for name, key in sorted(variables | inline) if key not in known[name]
        ]

    def test_every_flag_is_an_option_of_its_service(self, all_pods):
        """
        Each flag of a container is an option of its service.
        """
        unknown = []
        for pod in all_pods:
            for container in pod.containers:
                if container["name"] == "gateway":
                    continue
                service = "scheduler" if container["name"] == "scheduler" else "executor"
                known = {option.name for option in table_of(service).options}
                for arg in container["args"]:
                    name = arg.partition("=")[0].removeprefix("--").replace("-", "_")
                    if name not in known:
                        unknown.append(f"{pod.where}: {arg}")
        assert [] == unknown

    def test_scheduler_reads_what_its_pod_gives_it(self, all_pods, renderings):
        """
        The scheduler accepts flags and variables of each of its pods, and has a name of its own.
        """
        names = set()
        for pod in all_pods:
            container = main_container(pod)
            if container["name"] != "scheduler":
                continue
            environ = {one["name"]: one["value"] for one in container.get("env", ())}
            for source in container["envFrom"]:
                environ |= config_map(renderings, pod.where, source["configMapRef"]["name"])
            settings = load_scheduler(container["args"], environ).settings
            assert settings.executor_names == ("dns:///tandem-executor:50061",)
            names.add(settings.scheduler_name)
        assert {"tandem-scheduler"} == names

    def test_gateway_reads_what_its_pod_gives_it(self, all_pods, monkeypatch):
        """
        The gateway's command line knows every flag of its pods.
        """
        monkeypatch.setattr("tandem_openai_gateway.settings.check_files", lambda *_: None)
        read = [
            load_gateway(main_container(pod)["args"]).schedulers
            for pod in all_pods
            if main_container(pod)["name"] == "gateway"
        ]
        assert {("tandem-scheduler:50051",)} == set(read)


class TestSizes:
    def test_manifest_is_within_its_limit(self):
        """
        A manifest has at most 160 lines.
        """
        assert [] == [
            path.name
            for path in sorted(KUBERNETES.rglob("*.yaml"))
            if len(path.read_text().splitlines()) > MAX_LINES
        ]


def config_map(renderings, where: str, name: str) -> dict[str, str]:
    rendering = where.partition(": ")[0]
    (found,) = [
        one
        for one in renderings[rendering]
        if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name
    ]
    data: dict[str, str] = found["data"]
    return data
