"""Certificates that manifests ask for, and folders of Secrets that change as a kubelet's do."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from tests.deploy.kubernetes.manifests import KUBERNETES, KubectlMissing, render
from tests.deploy.pods.certificates.cert_manager import CertManager
from tests.deploy.pods.certificates.secret_folders import write_secrets
from tests.programs import is_missing

CLIENT = "client"


@pytest.fixture(scope="module")
def documents():
    try:
        return render(KUBERNETES / "overlays/local-podman-tls")
    except KubectlMissing as error:
        is_missing(str(error))


@pytest.fixture
def manager(documents):
    return CertManager(documents, clients={CLIENT: "tandem-public"})


def leaf(content):
    return x509.load_pem_x509_certificate(content["tls.crt"])


def is_trusted(content, by):
    """Return whether an authority of `by` has issued the certificate of a Secret."""
    for authority in x509.load_pem_x509_certificates(by["ca.crt"]):
        try:
            leaf(content).verify_directly_issued_by(authority)
        except (ValueError, InvalidSignature):
            continue
        return True
    return False


class TestCertificates:
    def test_secrets_are_those_of_the_manifests_and_of_clients(self, manager):
        """
        Each Certificate that is no authority's has a Secret with its names, and so has each client.
        """
        assert {
            *("tandem-link-executor", "tandem-link-scheduler", "tandem-scheduler-tls"),
            *("tandem-gateway-client", CLIENT),
        } == manager.secrets.keys()
        certificate = leaf(manager.secrets["tandem-link-executor"])
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        assert ["tandem-executor", "localhost"] == names.value.get_values_for_type(x509.DNSName)

    def test_link_trusts_no_certificate_of_clients(self, manager):
        """
        Certificates of one issuer are trusted by its own Secrets, and not by those of the other.
        """
        secrets = manager.secrets
        assert is_trusted(secrets[CLIENT], by=secrets["tandem-scheduler-tls"])
        assert not is_trusted(secrets[CLIENT], by=secrets["tandem-link-executor"])

    def test_renewed_certificate_is_another_one_of_the_same_authority(self, manager):
        """
        A renewal changes certificate and key, and leaves ca.crt as it is.
        """
        before = dict(manager.secrets[CLIENT])
        manager.renew()
        after = manager.secrets[CLIENT]
        assert before["ca.crt"] == after["ca.crt"]
        assert leaf(before).serial_number != leaf(after).serial_number
        assert before["tls.key"] != after["tls.key"]
        assert is_trusted(after, by=before)

    def test_both_authorities_are_trusted_until_the_old_one_is_forgotten(self, manager):
        """
        Old certificates are trusted beside new ones first, and no longer in the end.
        """
        before = dict(manager.secrets[CLIENT])
        manager.replace_authorities()
        assert before["tls.crt"] == manager.secrets[CLIENT]["tls.crt"]
        manager.renew()
        between = dict(manager.secrets[CLIENT])
        assert is_trusted(before, by=between)
        assert is_trusted(between, by=between)
        assert not is_trusted(between, by=before)
        manager.forget_old_authorities()
        assert not is_trusted(before, by=manager.secrets[CLIENT])
        assert is_trusted(between, by=manager.secrets[CLIENT])

    def test_strangers_have_one_fault_each(self, manager):
        """
        An expired certificate is of the true authority, and a foreign one of none that is trusted;
        both strangers trust the server.
        """
        present = manager.secrets[CLIENT]
        expired, foreign = manager.expired(CLIENT), manager.foreign(CLIENT)
        assert present["ca.crt"] == expired["ca.crt"] == foreign["ca.crt"]
        assert is_trusted(expired, by=present)
        assert not is_trusted(foreign, by=present)
        assert leaf(expired).not_valid_after_utc < leaf(present).not_valid_before_utc.now(
            tz=leaf(present).not_valid_before_utc.tzinfo
        )


class TestFolders:
    def test_files_change_with_one_link(self, tmp_path):
        """
        A key is a link through ..data, which alone changes: its target is replaced as a whole.
        """
        write_secrets({"pair/tls.crt": b"old", "pair/tls.key": b"old"}, tmp_path)
        link, before = tmp_path / "pair/tls.crt", (tmp_path / "pair/..data").readlink()
        assert "..data/tls.crt" == str(link.readlink())
        write_secrets({"pair/tls.crt": b"new", "pair/tls.key": b"new"}, tmp_path)
        assert b"new" == link.read_bytes()
        assert before != (tmp_path / "pair/..data").readlink()
        assert not (tmp_path / "pair" / before).exists()

    def test_reader_that_has_the_folder_open_keeps_the_old_file(self, tmp_path):
        """
        A file that is open while the Secret changes is read to its old end.
        """
        write_secrets({"link/token": b"old token"}, tmp_path)
        with (tmp_path / "link/token").open("rb") as file:
            write_secrets({"link/token": b"new token"}, tmp_path)
            assert b"old token" == file.read()

    def test_key_that_is_gone_has_no_file(self, tmp_path):
        """
        A key that the Secret no longer has leaves no link behind.
        """
        write_secrets({"pair/tls.crt": b"one", "pair/ca.crt": b"one"}, tmp_path)
        write_secrets({"pair/tls.crt": b"two"}, tmp_path)
        names = {path.name for path in (tmp_path / "pair").iterdir() if path.name[0] != "."}
        assert {"tls.crt"} == names
