"""The authority of a cluster, its certificates, and the files with which components call its API server."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = dt.timedelta(days=1)
SERVER = "https://127.0.0.1:6443"


def key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key in PEM, unencrypted."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,  # as ServiceAccount tokens need it
        serialization.NoEncryption(),
    )


def subject(name: str, group: str | None) -> x509.Name:
    """Return the subject that Kubernetes reads as a user's name and group."""
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if group is not None:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    return x509.Name(parts)


class Authority:
    """A certificate authority that lives as long as a cluster, in a folder."""

    def __init__(self, folder: Path) -> None:
        """
        Make the authority's key and certificate, and the keys of ServiceAccount tokens.

        Args:
            folder: Folder for all files; it exists.
        """
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = subject("cluster", None)
        now = dt.datetime.now(tz=dt.UTC)
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=1))
            .not_valid_after(now + LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        pem = self.certificate.public_bytes(serialization.Encoding.PEM)
        (folder / "ca.crt").write_bytes(pem)
        tokens = ec.generate_private_key(ec.SECP256R1())
        (folder / "tokens.key").write_bytes(key_bytes(tokens))

    def issue(
        self,
        file: str,
        name: str,
        group: str | None = None,
        *,
        hosts: tuple[str, ...] = (),
        addresses: tuple[str, ...] = (),
    ) -> None:
        """
        Write `file`.crt and `file`.key: a certificate for a client, and for a server with such hosts.

        Args:
            file: Name of the files, without suffix.
            name: Name of the user, or of the server.
            group: Group of the user.
            hosts: Names of the server.
            addresses: Addresses of the server.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(tz=dt.UTC)
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject(name, group))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=1))
            .not_valid_after(now + LIFETIME)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        )
        alternatives: list[x509.GeneralName] = [x509.DNSName(host) for host in hosts]
        alternatives += [x509.IPAddress(ipaddress.ip_address(one)) for one in addresses]
        if alternatives:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(alternatives), critical=False
            )
        pem = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        (self.folder / f"{file}.crt").write_bytes(pem)
        (self.folder / f"{file}.key").write_bytes(key_bytes(key))

    def kubeconfig(self, file: str, name: str, group: str | None = None) -> Path:
        """Issue a certificate to a user, and return a file with which it calls the API server."""
        self.issue(file, name, group)
        named = {"name": "cluster"}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "cluster",
            "clusters": [
                named
                | {
                    "cluster": {
                        "server": SERVER,
                        "certificate-authority": str(self.folder / "ca.crt"),
                    }
                }
            ],
            "users": [
                named
                | {
                    "user": {
                        "client-certificate": str(self.folder / f"{file}.crt"),
                        "client-key": str(self.folder / f"{file}.key"),
                    }
                }
            ],
            "contexts": [named | {"context": {"cluster": "cluster", "user": "cluster"}}],
        }
        path = self.folder / f"{file}.kubeconfig"
        path.write_text(yaml.safe_dump(content))
        return path
