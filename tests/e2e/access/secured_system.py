"""Real services of which every port asks for all that it can ask for."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

import grpc

from tandem.admin.v1.admin_service_pb2_grpc import AdminServiceStub
from tandem.bearer_token import token_hash
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tandem.network.address import host_and_port
from tandem.status import from_rpc_error
from tandem_client import NO_RETRY, AdminClient, ChannelOptions, is_serving
from tests.certificates import Authority, Pair
from tests.e2e.cluster import Cluster, Process
from tests.scheduler_svc.frontend.identity.credentials import (
    OPERATOR,
    bearer,
    credentials,
    write_file,
)
from tests.waiting import wait_until

LINK_TOKEN, METRICS_TOKEN = "a-token-of-the-link", "a-token-of-prometheus"
EXPIRED = "a-token-that-has-expired"
OK, NO_CONNECTION = "OK", "no connection"
DEADLINE_S = 60.0


def expired_credential() -> dict[str, object]:
    """Return an entry of the tokens file that allowed calls of both services until it expired."""
    return {
        "name": "expired",
        "token_sha256": token_hash(EXPIRED),
        "tenant": "acme",
        "roles": ["generate", "operate"],
        "expires": "2020-01-02T03:04:05Z",
    }


@dataclass(frozen=True, slots=True)
class Connection:
    """
    A caller's end of TLS.

    Attributes:
        ca: CA of servers that it trusts; None = it speaks plain text.
        pair: The certificate that it shows; None = none.
    """

    ca: Authority | None
    pair: Pair | None = None

    def channel(self, address: str) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.ca is None:
            return grpc.insecure_channel(address, options=options)
        pair = self.pair
        credentials = grpc.ssl_channel_credentials(
            root_certificates=self.ca.file.read_bytes(),
            private_key=None if pair is None else pair.key.read_bytes(),
            certificate_chain=None if pair is None else pair.certificate.read_bytes(),
        )
        return grpc.secure_channel(address, credentials, options=options)

    def http(self, address: str) -> HTTPConnection:
        host, port = host_and_port(address)
        if self.ca is None:
            return HTTPConnection(host, port, timeout=DEADLINE_S)
        context = ssl.create_default_context(cafile=self.ca.file)
        if self.pair is not None:
            context.load_cert_chain(self.pair.certificate, self.pair.key)
        return HTTPSConnection(host, port, timeout=DEADLINE_S, context=context)


class SecuredSystem(Cluster):
    """
    Executor, scheduler and gateway. The certificate of `right` proves no identity: it connects.

    Attributes:
        right: A connection that every port takes.
        servers_ca: CA of all ports.
        clients_ca: CA of all callers.
        folder: Folder of all files.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self.servers_ca = Authority(folder, "servers-ca")
        self.clients_ca = Authority(folder, "clients-ca")
        server = self.servers_ca.issue("server")
        self._mine = self.clients_ca.issue("caller", "caller.example")
        self.right = Connection(self.servers_ca, self._mine)
        for name, token in (("link-token", LINK_TOKEN), ("metrics-token", METRICS_TOKEN)):
            (folder / name).write_text(token)
        files = {
            "tls-cert": server.certificate,
            "tls-key": server.key,
            "tls-client-ca": self.clients_ca.file,
        }
        own = [f"--{name}={path}" for name, path in files.items()]
        others = [f"--{port}-{flag[2:]}" for port in ("admin", "metrics") for flag in own]
        link_token = f"--link-token-file={folder / 'link-token'}"
        self._calling = {"ca": self.servers_ca.file} | {
            "cert": self._mine.certificate,
            "key": self._mine.key,
        }
        super().__init__(
            model,
            folder,
            ["--max-num-blocks=64", *own, link_token],
            [
                *own,
                *others,
                link_token,
                *(f"--executor-{name}={path}" for name, path in self._calling.items()),
                f"--metrics-token-file={folder / 'metrics-token'}",
                f"--tokens-file={write_file(folder, [*credentials(), expired_credential()])}",
            ],
        )
        self.start_executor()
        self._gateway = Process(
            "tandem_openai_gateway",
            [
                "--listen=127.0.0.1:0",
                f"--scheduler={self.address}",
                f"--tls-cert={server.certificate}",
                f"--tls-key={server.key}",
                *(f"--scheduler-{name}={path}" for name, path in self._calling.items()),
            ],
            folder,
            "gateway",
        )
        self.ports = {
            "public": self.address,
            "admin": self.admin_address,
            "executor": self.executor_address,
            "metrics": self.scheduler.addresses()["metrics_address"],
            "gateway": self._gateway.addresses()["address"],
        }
        wait_until(lambda: "200" == self.get("gateway", "/health", None), "the gateway")

    def is_ready(self) -> bool:
        """Return if the public port says that requests are served."""
        options = ChannelOptions(**self._calling)
        with contextlib.suppress(Exception):  # it does not listen yet
            return is_serving(self.address, "tandem.ready", timeout_s=10, options=options)
        return False

    def admin(self) -> AdminClient:
        """Return a client of the operators' port."""
        return AdminClient(self.admin_address, retry=NO_RETRY, api_key=OPERATOR, **self._calling)

    @contextlib.contextmanager
    def stubs(self) -> Iterator[tuple[InferenceServiceStub, AdminServiceStub]]:
        """Yield the methods of the public port and of the admin port."""
        with (
            self.right.channel(self.address) as public,
            self.right.channel(self.admin_address) as admin,
        ):
            yield InferenceServiceStub(public), AdminServiceStub(admin)

    def call(
        self,
        port: str,
        method: str,
        token: str | None,
        request: bytes = b"",
        *,
        connection: Connection | None = None,
    ) -> str:
        """
        Return the status of a call: OK once it has an answer, else the code, and the reason if that
        says more. A method that streams is ended after its first message.
        """
        with (connection or self.right).channel(self.ports[port]) as channel:
            call = channel.unary_stream(method)(request, metadata=bearer(token), timeout=DEADLINE_S)
            try:
                next(call)
            except grpc.RpcError as failure:
                error = from_rpc_error(failure)
                code = failure.code().name
                is_told = error.reason in (code, "") or "grpc_code" in error.metadata
                return code if is_told else f"{code} ({error.reason})"
            finally:
                call.cancel()
            return OK

    def get(
        self, port: str, path: str, token: str | None, *, connection: Connection | None = None
    ) -> str:
        """Return the HTTP status of a path, or that there is no connection."""
        http = (connection or self.right).http(self.ports[port])
        try:
            http.request("GET", path, headers=dict(bearer(token)))
            return str(http.getresponse().status)
        except (OSError, HTTPException):
            return NO_CONNECTION
        finally:
            http.close()

    def close(self) -> None:
        """Kill all services."""
        super().close()
        self._gateway.end()
