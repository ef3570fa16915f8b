"""Manifests that a run plays, with the content of their Secrets and what clients need to call them."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.events.event import NUM_EXECUTORS
from tests.deploy.kubernetes.manifests import ROOT, Document, render_combination
from tests.deploy.pods.certificates.cert_manager import CertManager
from tests.deploy.pods.certificates.secret_folders import write_secrets
from tests.deploy.pods.translate import Translation, translate

CLIENT = "tandem-load"
"""Name of the clients' Secret, credential and tenant."""
PUBLIC_ISSUER = "tandem-public"


@dataclass(slots=True)
class Setting:
    """
    Manifests and Secrets of one cluster.

    Attributes:
        name: Overlay that is played.
        documents: All documents of the rendering.
        certificates: Certificates of services and clients; None = plain text.
        token: Bearer token of clients; None = no token is asked for.
    """

    name: str
    documents: list[Document]
    certificates: CertManager | None
    token: str | None
    _link_token: bytes
    _num_client_folders: int = 0

    def translate(self, folder: Path) -> Translation:
        """Translate into pods, whose Secrets lie in a folder."""
        content = {"tandem-link": {"token": self._link_token}}
        if self.certificates:
            content |= self.certificates.secrets
        if self.token:
            content["tandem-tokens"] = {"tokens.toml": _tokens_file(self.token).encode()}
        return translate(
            self.documents,
            secrets=content,
            claims={"tandem-models": str(ROOT / "deploy/models")},
            folder=str(folder),
        )

    def write_client(self, folder: Path) -> Path | None:
        """
        Write the clients' certificate into a folder of its own, which never changes, so that a
        client reads files that belong together. Return that folder; None without certificates.
        """
        if self.certificates is None:
            return None
        self._num_client_folders += 1
        name = f"{CLIENT}-{self._num_client_folders}"
        content = self.certificates.secrets[CLIENT]
        write_secrets({f"{name}/{key}": text for key, text in content.items()}, folder)
        return folder / name


def plain() -> Setting:
    """Return local-podman with a gateway, in plain text."""
    documents = _with_one_more(render_combination("local-podman", ("gateway", "monitoring")))
    return Setting("local-podman", documents, None, None, _token())


def encrypted() -> Setting:
    """Return local-podman-tls: certificates and tokens everywhere."""
    documents = _with_one_more(render_combination("local-podman-tls", ("monitoring",)))
    certificates = CertManager(documents, clients={CLIENT: PUBLIC_ISSUER})
    return Setting("local-podman-tls", documents, certificates, secrets.token_urlsafe(32), _token())


def _with_one_more(documents: list[Document]) -> list[Document]:
    for document in documents:
        if document["kind"] == "StatefulSet":
            document["spec"]["replicas"] = NUM_EXECUTORS + 1  # one joins and leaves
    return documents


def _token() -> bytes:
    return secrets.token_hex(32).encode()


def _tokens_file(token: str) -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[credentials]]\nname = "{CLIENT}"\ntenant = "{CLIENT}"\ntoken_sha256 = "{digest}"\n'
