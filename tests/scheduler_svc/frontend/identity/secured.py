"""A frontend with certificates and credentials, and ways to call it rightly and wrongly."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from scheduler_svc.config.frontend_security import FrontendSecurity
from tests.certificates import Authority, Pair
from tests.scheduler_svc.frontend.fake_core import Frontend, model, running_frontend, serve
from tests.scheduler_svc.frontend.identity.credentials import write_file

CLIENT_NAME = "client.acme.example"
"""Name in the certificate of the user `user`."""


@dataclass(frozen=True, slots=True)
class Secured:
    """A frontend that asks for certificates and credentials on both ports."""

    frontend: Frontend
    servers_ca: Authority
    clients_ca: Authority

    def address(self, port: str) -> str:
        servers = self.frontend.servers
        return servers.address if port == "public" else servers.admin_address or ""

    def client(self, name: str = CLIENT_NAME) -> Pair:
        return self.clients_ca.issue(name, name)


def channel_credentials(ca: Authority, client: Pair | None = None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=ca.file.read_bytes(),
        private_key=None if client is None else client.key.read_bytes(),
        certificate_chain=None if client is None else client.certificate.read_bytes(),
    )


@asynccontextmanager
async def secured_frontend(
    folder: Path, model_dir: Path, *, asks_for_certificates: bool = True
) -> AsyncIterator[Secured]:
    servers_ca, clients_ca = Authority(folder, "servers-ca"), Authority(folder, "clients-ca")
    server = servers_ca.issue("server")
    paths = (server.certificate, server.key, clients_ca.file if asks_for_certificates else None)
    cert, key, client_ca = (None if path is None else str(path) for path in paths)
    security = FrontendSecurity(
        tls_cert=cert,
        tls_key=key,
        tls_client_ca=client_ca,
        admin_tls_cert=cert,
        admin_tls_key=key,
        admin_tls_client_ca=client_ca,
        tokens_file=str(write_file(folder)),
    )
    async with running_frontend(folder, security=security) as frontend:
        await serve(frontend, model(model_dir))
        yield Secured(frontend, servers_ca, clients_ca)
