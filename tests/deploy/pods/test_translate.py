"""Rendered manifests become pods that podman can play."""

from __future__ import annotations

import copy

import pytest

from tests.deploy.kubernetes.manifests import KUBERNETES, KubectlMissing, render, render_combination
from tests.deploy.pods.translate import TranslationError, translate
from tests.programs import is_missing

SECRETS = {
    "tandem-link": {"token": b"a token of the link"},
    "tandem-link-executor": {"ca.crt": b"ca", "tls.crt": b"certificate", "tls.key": b"key"},
    "tandem-link-scheduler": {"ca.crt": b"ca", "tls.crt": b"certificate", "tls.key": b"key"},
    "tandem-scheduler-tls": {"ca.crt": b"ca", "tls.crt": b"certificate", "tls.key": b"key"},
}
CLAIMS = {"tandem-models": "/srv/models"}


def translated(documents, *, secrets=SECRETS, claims=CLAIMS):
    return translate(documents, secrets=secrets, claims=claims, folder="/run/secrets")


@pytest.fixture(scope="module")
def documents():
    try:
        return render(KUBERNETES / "overlays/local-podman")
    except KubectlMissing as error:
        is_missing(str(error))


@pytest.fixture(scope="module")
def pods(documents):
    return {pod.name: pod for pod in translated(documents).pods}


def container_of(pod):
    (container,) = pod.document["spec"]["containers"]
    return container


class TestPods:
    def test_replicas_become_pods_by_name(self, pods):
        """
        Each replica is a pod, and executors come first.
        """
        assert ["tandem-executor-0", "tandem-executor-1", "tandem-scheduler-0"] == list(pods)

    def test_services_become_names_in_the_network(self, pods):
        """
        Pods that a Service selects have its name, so that a headless one means all of them.
        """
        assert {
            "tandem-executor-0": ("tandem-executor",),
            "tandem-executor-1": ("tandem-executor",),
            "tandem-scheduler-0": ("tandem-scheduler",),
        } == {name: pod.aliases for name, pod in pods.items()}

    def test_options_become_variables(self, pods):
        """
        A ConfigMap's options are variables of the container.
        """
        env = {one["name"]: one["value"] for one in container_of(pods["tandem-executor-0"])["env"]}
        assert "/models/tandem-py" == env["TANDEM_EXECUTOR_MODEL"]
        assert "cpu" == env["TANDEM_EXECUTOR_DEVICE"]

    def test_flags_and_strictness_are_kept(self, pods, documents):
        """
        Flags, user, capabilities, memory limit and the read-only root are those of the manifest.
        """
        (deployment,) = [one for one in documents if one["kind"] == "Deployment"]
        spec = deployment["spec"]["template"]["spec"]
        pod = pods["tandem-scheduler-0"].document["spec"]
        assert spec["securityContext"] == pod["securityContext"]
        (theirs,), (ours,) = spec["containers"], pod["containers"]
        assert theirs["args"] == ours["args"]
        assert theirs["securityContext"] == ours["securityContext"]
        assert {"limits": {"memory": "1Gi"}} == ours["resources"]

    def test_keys_that_podman_refuses_are_gone(self, pods):
        """
        Ports, gRPC probes, lifecycle hooks and hints for a scheduler of nodes are left out.
        """
        for pod in pods.values():
            text = str(pod.document)
            for key in ("containerPort", "grpc'", "lifecycle", "priorityClassName", "envFrom"):
                assert key not in text

    def test_stop_times_are_handed_to_the_harness(self, pods):
        """
        A grace time and preStop mean nothing to podman: both are told beside the pod.
        """
        scheduler, executor = pods["tandem-scheduler-0"], pods["tandem-executor-0"]
        assert (50, 5) == (scheduler.grace_s, scheduler.pre_stop_s)
        assert (35, 0) == (executor.grace_s, executor.pre_stop_s)


class TestVolumes:
    def test_secrets_become_folders_of_files(self, documents, pods):
        """
        A Secret's keys are files in a folder that is mounted where the Secret was.
        """
        assert {"tandem-link/token": b"a token of the link"} == translated(documents).files
        volumes = {
            one["name"]: one for one in pods["tandem-executor-0"].document["spec"]["volumes"]
        }
        link, models = volumes["tandem-executor-0-link"], volumes["tandem-executor-0-models"]
        assert "/run/secrets/tandem-link" == link["hostPath"]["path"]
        assert "/srv/models" == models["hostPath"]["path"]

    def test_each_pod_has_scratch_space_of_its_own(self, pods):
        """
        Volumes have names that no two pods share, since podman would share their content too, and
        every mount names a volume of its pod.
        """
        names = []
        for pod in pods.values():
            volumes = [one["name"] for one in pod.document["spec"]["volumes"]]
            assert {one["name"] for one in container_of(pod)["volumeMounts"]} == set(volumes)
            names += volumes
        assert len(set(names)) == len(names)

    def test_chosen_keys_of_a_secret_leave_the_others_out(self, documents):
        """
        A pod that mounts one key of a Secret does not get the others.
        """
        files = translated(render_combination("local-podman", ("gateway", "tls"))).files
        chosen = {path for path in files if path.startswith("tandem-scheduler-tls-")}
        assert {"tandem-scheduler-tls-ca.crt/ca.crt"} == chosen


class TestRefusals:
    @pytest.mark.parametrize(
        ("secrets", "claims", "message"),
        [
            ({}, CLAIMS, "no content was given for the Secret tandem-link"),
            (SECRETS, {}, "no folder stands for the claim tandem-models"),
        ],
        ids=["secret", "claim"],
    )
    def test_what_is_not_given_is_named(self, documents, secrets, claims, message):
        """
        A Secret or a claim that the caller does not give is an error that names it.
        """
        with pytest.raises(TranslationError, match=message):
            translated(documents, secrets=secrets, claims=claims)

    def test_config_map_that_is_not_rendered_is_named(self, documents):
        """
        A ConfigMap that a pod names and that is not there is an error that names it.
        """
        without = [one for one in copy.deepcopy(documents) if one["kind"] != "ConfigMap"]
        with pytest.raises(TranslationError, match=r"ConfigMap tandem-.* is named"):
            translated(without)

    def test_group_of_ranks_is_refused(self, documents):
        """
        A LeaderWorkerSet is refused, since no controller sets its pods' variables.
        """
        with pytest.raises(TranslationError, match="LeaderWorkerSet has no translation"):
            translated(render_combination("gpu", ("tensor-parallel",)))
