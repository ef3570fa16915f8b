"""The page of metrics with TLS and a token, and the socket of the program that starts a service."""

from __future__ import annotations

import asyncio
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from scheduler_svc.config.frontend_security import FrontendSecurity
from scheduler_svc.ipc.snapshot import encode_json
from tandem.admin.v1 import admin_service_pb2
from tandem.admin.v1.admin_service_pb2_grpc import AdminServiceStub
from tandem.errors import InvalidConfig
from tandem.inference.v1 import model_pb2
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tandem.network.address import host_and_port
from tandem.network.tls_contexts import server_context
from tandem.network.tls_files import ServerTls
from tests.certificates import Authority, Pair
from tests.scheduler_svc.frontend.fake_core import Frontend, model, running_frontend, serve, within
from tests.scheduler_svc.frontend.identity.credentials import write_file
from tests.scheduler_svc.frontend.test_admin import metrics_snapshot

TOKEN, NEXT_TOKEN = "a-token-of-prometheus", "another-token-for-it"


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def metrics_port(tmp_path: Path, **files: object) -> AsyncIterator[Frontend]:
    """Run a frontend with these files of its port of /metrics."""
    security = FrontendSecurity(
        **{f"metrics_{name}": str(path) for name, path in files.items() if path is not None}
    )
    async with running_frontend(tmp_path, security=security) as frontend:
        frontend.core.answers["metrics"] = lambda _: encode_json(metrics_snapshot())
        yield frontend


def context(ca: Authority, client: Pair | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=ca.file)
    if client is not None:
        made.load_cert_chain(client.certificate, client.key)
    return made


async def scraped(frontend: Frontend, tls: ssl.SSLContext | None, *headers: str) -> str:
    """Return the first line of the answer to a scrape; the error's name if there is none."""
    head = "".join(f"{line}\r\n" for line in ("GET /metrics HTTP/1.1", *headers, ""))
    host, port = host_and_port(frontend.servers.metrics_address or "")
    try:
        reader, writer = await within(asyncio.open_connection(host, port, ssl=tls))
        writer.write(head.encode())
        answer = await within(reader.read())
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        return type(error).__name__
    return answer.decode().partition("\r\n")[0] or "closed"


OK, REFUSED = "HTTP/1.1 200 OK", "HTTP/1.1 401 Unauthorized"


class TestMetricsToken:
    @pytest.mark.parametrize(
        ("headers", "expected"),
        [
            ([f"Authorization: Bearer {TOKEN}"], OK),
            ([f"authorization:Bearer {NEXT_TOKEN}"], OK),
            ([], REFUSED),
            (["Authorization: Bearer wrong"], REFUSED),
            ([f"Authorization: {TOKEN}"], REFUSED),
            ([f"X-Authorization: Bearer {TOKEN}"], REFUSED),
            ([f"Authorization: Bearer {TOKEN}", "Authorization: Bearer b"], REFUSED),
            (["Authorization: Bearer \u00e9"], REFUSED),
        ],
    )
    async def test_only_one_of_the_tokens_is_served(self, tmp_path, headers, expected):
        """
        With a file of tokens a scrape needs one of them, in one header; else it is answered 401.
        """
        path = tmp_path / "metrics-tokens"
        path.write_text(f"{TOKEN}\n{NEXT_TOKEN}\n")
        async with metrics_port(tmp_path, token_file=path) as frontend:
            assert expected == await scraped(frontend, None, *headers)

    async def test_changed_file_counts_at_once(self, tmp_path):
        """
        A token that leaves the file is refused by the next scrape, and the new one is served.
        """
        path = tmp_path / "metrics-tokens"
        path.write_text(TOKEN)
        async with metrics_port(tmp_path, token_file=path) as frontend:
            path.write_text(NEXT_TOKEN)
            given = [f"Authorization: Bearer {one}" for one in (TOKEN, NEXT_TOKEN)]
            assert [REFUSED, OK] == [await scraped(frontend, None, one) for one in given]


class TestMetricsTls:
    async def test_page_is_served_through_tls_alone(self, tmp_path, ca):
        """
        With a certificate the page comes by HTTPS, to a reader that trusts its CA, and not by HTTP.
        """
        server = ca.issue("server")
        files = {"tls_cert": server.certificate, "tls_key": server.key}
        async with metrics_port(tmp_path, **files) as frontend:
            assert OK == await scraped(frontend, context(ca))
            wrong = context(Authority(tmp_path, "wrong-ca"))
            assert "SSLCertVerificationError" == await scraped(frontend, wrong)
            assert OK != await scraped(frontend, None)

    async def test_client_ca_asks_for_a_certificate(self, tmp_path, ca):
        """
        With a CA of readers, one without a valid certificate of it gets no page.
        """
        server, readers = ca.issue("server"), Authority(tmp_path, "readers-ca")
        files = {"tls_cert": server.certificate, "tls_key": server.key}
        async with metrics_port(tmp_path, **files, tls_client_ca=readers.file) as frontend:
            assert OK == await scraped(frontend, context(ca, readers.issue("prometheus")))
            for client in (None, ca.issue("other"), readers.issue_expired("expired")):
                assert OK != await scraped(frontend, context(ca, client))

    async def test_replaced_files_are_used_by_the_next_connection(self, tmp_path, ca):
        """
        The next scrape sees a replaced certificate; one that cannot be used changes nothing.
        """
        server = ca.issue("server")
        files = {"tls_cert": server.certificate, "tls_key": server.key}
        async with metrics_port(tmp_path, **files) as frontend:
            assert OK == await scraped(frontend, context(ca))
            next_ca = Authority(tmp_path, "next-ca")
            renewed = next_ca.issue("renewed")
            server.certificate.write_bytes(renewed.certificate.read_bytes())
            assert OK == await scraped(frontend, context(ca)), "certificate without its key"
            server.key.write_bytes(renewed.key.read_bytes())
            assert OK == await scraped(frontend, context(next_ca))

    def test_wrong_file_is_refused_at_the_start(self, tmp_path, ca):
        """
        A certificate that has expired, and a key of another one, are refused with their paths.
        """
        expired, server, other = ca.issue_expired("old"), ca.issue("server"), ca.issue("other")
        with pytest.raises(InvalidConfig, match=f"{expired.certificate} cannot be used"):
            server_context(ServerTls(certificate=expired.certificate, key=expired.key))
        with pytest.raises(InvalidConfig, match=f"{other.key} does not belong to"):
            server_context(ServerTls(certificate=server.certificate, key=other.key))


class TestLocalSocket:
    async def test_serves_both_services_to_its_user_without_credentials(
        self, tmp_path, model_dir, ca
    ):
        """
        Calls on the local socket need neither TLS nor a token, whatever the ports ask for; no other
        user can open it.
        """
        server = ca.issue("server")
        security = FrontendSecurity(
            tls_cert=str(server.certificate),
            tls_key=str(server.key),
            tls_client_ca=str(ca.file),
            tokens_file=str(write_file(tmp_path)),
        )
        path = tmp_path / "l.sock"
        async with running_frontend(
            tmp_path, security=security, local_listen=f"unix:{path}"
        ) as frontend:
            await serve(frontend, model(model_dir))
            assert 0o600 == stat.S_IMODE(path.stat().st_mode)
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                await within(InferenceServiceStub(channel).GetModel(model_pb2.GetModelRequest()))
                await within(
                    AdminServiceStub(channel).GetStats(admin_service_pb2.GetStatsRequest())
                )
