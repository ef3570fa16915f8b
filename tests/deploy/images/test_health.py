"""`deploy/images/health.py`, the health check inside the images."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from deploy.images.health import READY, main
from tests.certificates import Authority

Status = health_pb2.HealthCheckResponse


@dataclass
class Server:
    """A gRPC server with a health service."""

    address: str
    states: health.HealthServicer


@contextmanager
def serving(credentials: grpc.ServerCredentials | None = None) -> Iterator[Server]:
    """Serve on a free port, over TLS if there are credentials."""
    states = health.HealthServicer()
    served = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(states, served)
    place = "127.0.0.1:0"
    port = (
        served.add_secure_port(place, credentials)
        if credentials
        else served.add_insecure_port(place)
    )
    served.start()
    yield Server(f"127.0.0.1:{port}", states)
    served.stop(None).wait()


@pytest.fixture
def server() -> Iterator[Server]:
    """Return a server on a free port."""
    with serving() as served:
        yield served


class TestHealth:
    def test_service_that_serves_is_healthy(self, server: Server, capsys):
        """
        The exit code is 0 for a service that is ready, without a word.
        """
        server.states.set(READY, Status.SERVING)
        assert 0 == main([server.address])
        assert ("", "") == capsys.readouterr()

    def test_service_that_is_not_ready_is_told(self, server: Server, capsys):
        """
        The exit code is 1 for a service that is not ready, though its process lives.
        """
        server.states.set(READY, Status.NOT_SERVING)
        server.states.set("", Status.SERVING)
        assert 1 == main([server.address])
        assert f"{server.address} 'tandem.ready': NOT_SERVING" in capsys.readouterr().err
        assert 0 == main([server.address, ""])

    def test_unknown_name_is_told(self, server: Server, capsys):
        """
        A name that the service does not know is unhealthy.
        """
        assert 1 == main([server.address, "tandem.raedy"])
        assert "NOT_FOUND" in capsys.readouterr().err

    def test_address_where_no_server_listens_is_told(self, capsys):
        """
        A server that is not there is unhealthy, with the address in the line.
        """
        assert 1 == main(["127.0.0.1:1", "--timeout-s=1"])
        assert "127.0.0.1:1 'tandem.ready': UNAVAILABLE" in capsys.readouterr().err

    def test_port_with_tls_is_asked_with_a_certificate(self, tmp_path: Path, capsys):
        """
        A server that asks for client certificates is healthy for a check that shows one, and for
        none that shows nothing or does not know the server's authority.
        """
        authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
        pair = authority.issue("probe")
        credentials = grpc.ssl_server_credentials(
            [(pair.key.read_bytes(), pair.certificate.read_bytes())],
            authority.file.read_bytes(),
            require_client_auth=True,
        )
        shown = [f"--cert={pair.certificate}", f"--key={pair.key}"]
        with serving(credentials) as server:
            server.states.set(READY, Status.SERVING)
            assert 0 == main([server.address, READY, f"--ca={authority.file}", *shown])
            assert ("", "") == capsys.readouterr()
            assert 1 == main([server.address, READY, f"--ca={authority.file}"])
            assert 1 == main([server.address, READY, f"--ca={stranger.file}", *shown])
        assert 2 == capsys.readouterr().err.count("'tandem.ready': UNAVAILABLE")

    def test_certificate_that_is_not_there_is_told(self, tmp_path: Path, capsys):
        """
        A file of certificates that is not there is named.
        """
        assert 1 == main(["127.0.0.1:1", f"--ca={tmp_path / 'none.pem'}"])
        assert "none.pem: No such file" in capsys.readouterr().err
