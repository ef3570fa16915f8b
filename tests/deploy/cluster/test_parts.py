"""The parts of a cluster's run that need no cluster."""

from __future__ import annotations

import io
import json
import tarfile

from cryptography import x509
from cryptography.x509.oid import NameOID

from tests.deploy.cluster.admission import pod_of, privileged, with_unknown_field
from tests.deploy.cluster.node.build import COREDNS, KUBERNETES, module_file
from tests.deploy.cluster.node.certificates import Authority
from tests.deploy.cluster.node.images import archive
from tests.deploy.cluster.walkthrough import commands
from tests.deploy.kubernetes.manifests import KUBERNETES as MANIFESTS
from tests.deploy.kubernetes.manifests import Pod

GO_MOD = """\
module k8s.io/kubernetes
replace (
\tk8s.io/api => ./staging/src/k8s.io/api
\tk8s.io/kubelet => ./staging/src/k8s.io/kubelet
\texample.org/other => ./elsewhere
)
"""


class TestModuleFile:
    def test_staging_modules_are_replaced_by_those_that_are_published(self):
        """
        Version 1.34.2 of Kubernetes has its staging modules at version 0.34.2.
        """
        text = module_file(KUBERNETES, GO_MOD)
        replaced = [line for line in text.splitlines() if line.startswith("replace")]
        assert [
            "replace k8s.io/api => k8s.io/api v0.34.2",
            "replace k8s.io/kubelet => k8s.io/kubelet v0.34.2",
        ] == replaced
        assert "require k8s.io/kubernetes v1.34.2" in text

    def test_other_programs_replace_nothing(self):
        """
        A module that does not need Kubernetes names its own requirements alone.
        """
        text = module_file(COREDNS, GO_MOD)
        assert "replace" not in text
        assert "require github.com/coredns/coredns" in text


class TestAuthority:
    def test_client_has_user_and_group_and_a_key_of_its_own(self, tmp_path):
        """
        A kubeconfig names a certificate that the authority signed, with user and group as its subject.
        """
        authority = Authority(tmp_path)
        path = authority.kubeconfig("kubelet", "system:node:one", "system:nodes")
        assert "kubelet.crt" in path.read_text()
        issued = x509.load_pem_x509_certificate((tmp_path / "kubelet.crt").read_bytes())
        issued.verify_directly_issued_by(authority.certificate)
        named = {part.oid: part.value for part in issued.subject}
        assert "system:node:one" == named[NameOID.COMMON_NAME]
        assert "system:nodes" == named[NameOID.ORGANIZATION_NAME]

    def test_server_is_valid_for_its_names_and_addresses(self, tmp_path):
        """
        A server's certificate has all hosts and addresses that clients call.
        """
        Authority(tmp_path).issue("api", "api", hosts=("kubernetes",), addresses=("10.96.0.1",))
        issued = x509.load_pem_x509_certificate((tmp_path / "api.crt").read_bytes())
        found = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert ["kubernetes"] == found.get_values_for_type(x509.DNSName)
        assert ["10.96.0.1"] == [str(one) for one in found.get_values_for_type(x509.IPAddress)]


class TestArchive:
    def test_image_holds_its_program_and_starts_it(self, tmp_path):
        """
        The archive's only layer has the program, which may be executed and is the entrypoint.
        """
        program = tmp_path / "pause"
        program.write_bytes(b"program")
        with tarfile.open(fileobj=io.BytesIO(archive("localhost/pause:1", program))) as whole:
            [manifest] = json.load(whole.extractfile("manifest.json"))
            config = json.load(whole.extractfile(manifest["Config"]))
            with tarfile.open(fileobj=whole.extractfile(manifest["Layers"][0])) as layer:
                [entry] = layer.getmembers()
                content = layer.extractfile(entry).read()
        assert ["localhost/pause:1"] == manifest["RepoTags"]
        assert ["/pause"] == config["config"]["Entrypoint"]
        assert ("pause", 0o755, b"program") == (entry.name, entry.mode, content)


class TestWalkthrough:
    def test_commands_of_the_page_reach_from_the_namespace_to_a_stream(self):
        """
        The page has one block that creates the namespace first, and streams, and comments are left out.
        """
        found = commands((MANIFESTS / "README.md").read_text())
        assert found[0].startswith("kubectl apply -f deploy/kubernetes/base/namespace.yaml")
        assert any(command.startswith("tandem generate") for command in found)
        assert "tandem top --once" in found
        assert not any(command.startswith("#") for command in found)


class TestDocuments:
    def test_refused_document_has_a_field_more_and_the_right_one_stays(self):
        """
        The refused document is a copy.
        """
        right = {"kind": "Deployment", "spec": {"replicas": 1}}
        assert {"replicas", "noSuchField"} == with_unknown_field(right)["spec"].keys()
        assert {"replicas"} == right["spec"].keys()

    def test_pod_of_a_template_has_its_labels_and_may_be_made_privileged(self):
        """
        A template becomes a pod of the namespace; its privileged copy differs in containers alone.
        """
        pod = pod_of(Pod(where="x", labels={"a": "b"}, spec={"containers": [{"name": "one"}]}))
        assert {"a": "b"} == pod["metadata"]["labels"]
        [container] = privileged(pod)["spec"]["containers"]
        assert {"privileged": True} == container["securityContext"]
        assert [{"name": "one"}] == pod["spec"]["containers"]
