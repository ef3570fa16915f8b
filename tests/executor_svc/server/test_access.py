"""Access to an executor: certificates, the shared token, and what a stranger gets."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from executor_svc.server.server import ExecutorServer
from executor_svc.server.service import SERVICE_NAME
from tandem.error_codes import Unauthenticated
from tandem.errors import (
    ExecutorLoading,
    InvalidConfig,
    SessionHeld,
)
from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.network.link_token import LinkToken
from tandem.network.listen_address import (
    UNAUTHENTICATED,
    UNENCRYPTED,
    UNPROTECTED,
    ListenAddress,
)
from tandem.network.tls import ClientCredentials
from tandem.network.tls_files import ClientTls, ServerTls
from tests.certificates import Authority
from tests.executor_svc.server.harness import (
    DEADLINE_S,
    EXECUTE,
    StepClient,
    open_request,
    refusal,
)
from tests.ports import free_port

FRESH = [("grpc.use_local_subchannel_pool", 1)]
"""Options of a channel that shares no connection with another one."""


@pytest.fixture
def ca(tmp_path):
    """Return the CA that executor and scheduler trust."""
    return Authority(tmp_path)


@pytest.fixture
def token_file(tmp_path):
    """Return a file with one token."""
    path = tmp_path / "token"
    path.write_text(secrets.token_hex(32) + "\n")
    return path


class Bearer(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Interceptor that sends a token with every call."""

    def __init__(self, token):
        self._metadata = [("authorization", f"Bearer {token}")]

    def _send(self, continuation, details, request):
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_stream = _send


def with_token(token):
    """Return a function that opens a plain-text channel whose calls carry a token."""
    return lambda address: grpc.intercept_channel(
        grpc.insecure_channel(address, options=FRESH), Bearer(token)
    )


def over_tls(ca, pair=None):
    """Return a function that opens a channel to servers of a CA, showing a pair."""
    credentials = ClientCredentials(
        ClientTls(ca=ca.file, certificate=pair and pair.certificate, key=pair and pair.key)
    ).get()
    return lambda address: grpc.secure_channel(address, credentials, options=FRESH)


def plain(address):
    return grpc.insecure_channel(address, options=FRESH)


def calls_of(channel):
    """Return one call of each method of the step link, by name."""
    stub = ExecutorServiceStub(channel)
    execute = channel.stream_stream(EXECUTE)
    return {
        "Describe": lambda: stub.Describe(executor_pb2.DescribeRequest(), timeout=DEADLINE_S),
        "OpenSession": lambda: stub.OpenSession(open_request("stranger"), timeout=DEADLINE_S),
        "GetTokenizer": lambda: list(
            stub.GetTokenizer(executor_pb2.GetTokenizerRequest(), timeout=DEADLINE_S)
        ),
        "Profile": lambda: list(stub.Profile(executor_pb2.ProfileRequest(), timeout=DEADLINE_S)),
        "Execute": lambda: list(execute(iter([b""]), timeout=DEADLINE_S)),
    }


def take_over(running, connect):
    """Return a call that takes the session over, through a channel of its own."""

    def call():
        with connect(running.server.address) as channel:
            request = open_request("stranger", take_over=True, lease_ms=60_000)
            return ExecutorServiceStub(channel).OpenSession(request, timeout=DEADLINE_S)

    return call


def health_of(channel):
    request = health_pb2.HealthCheckRequest(service="")
    return health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S).status


@pytest.fixture
def serve():
    """Yield a function that starts a server without a model; all are stopped at the end."""
    servers = []

    def begin(listen="127.0.0.1:0", **options):
        servers.append(ExecutorServer(lambda _: None, lambda _: None, **options))
        servers[-1].listen(listen)
        return servers[-1].address

    yield begin
    for server in servers:
        server.stop()


class TestToken:
    @pytest.mark.parametrize(
        "connect",
        [plain, with_token("x" * 64), with_token("")],
        ids=["none", "wrong", "empty"],
    )
    def test_every_method_of_the_link_is_refused_without_the_token(
        self, serve, token_file, connect
    ):
        """Without the token each method of the step link ends UNAUTHENTICATED, typed; health is open."""
        with connect(serve(token=LinkToken(token_file))) as channel:
            for name, call in calls_of(channel).items():
                assert (name, Unauthenticated) == (name, type(refusal(call)))
            assert health_pb2.HealthCheckResponse.SERVING == health_of(channel)

    def test_the_token_is_enough(self, serve, token_file):
        """With the token a call is served: here, refused only because no model is loaded."""
        with with_token(token_file.read_text().strip())(
            serve(token=LinkToken(token_file))
        ) as channel:
            assert isinstance(refusal(calls_of(channel)["Describe"]), ExecutorLoading)

    def test_token_is_replaced_while_the_server_runs(self, serve, token_file):
        """All tokens of the file are accepted, as it stands at the call."""
        old, new = token_file.read_text().strip(), secrets.token_hex(32)
        address = serve(token=LinkToken(token_file))
        with with_token(old)(address) as before, with_token(new)(address) as after:
            assert isinstance(refusal(calls_of(after)["Describe"]), Unauthenticated)
            token_file.write_text(f"{new}\n{old}\n")
            for channel in (before, after):
                assert isinstance(refusal(calls_of(channel)["Describe"]), ExecutorLoading)
            token_file.write_text(f"{new}\n")
            assert isinstance(refusal(calls_of(before)["Describe"]), Unauthenticated)

    @pytest.mark.parametrize("text", ["", "short\n", "with spaces in it, long enough\n", "ä" * 20])
    def test_file_without_usable_token_is_refused(self, tmp_path, text):
        """A file that is missing, empty, or has a short or strange token is refused at the start."""
        path = tmp_path / "token"
        with pytest.raises(InvalidConfig, match="cannot read"):
            LinkToken(path)
        path.write_text(text)
        with pytest.raises(InvalidConfig, match=str(path)):
            LinkToken(path)

    @pytest.mark.parametrize(
        "stranger", [with_token("y" * 64), plain], ids=["wrong-token", "no-token"]
    )
    def test_stranger_cannot_take_the_session_over(self, start, token_file, stranger):
        """A take-over without the token is refused, and the holder's stream goes on."""
        running = start(
            "--link-token-file",
            str(token_file),
            connect=with_token(token_file.read_text().strip()),
        )
        client = StepClient(running, "owner")
        stream = client.attach()
        assert client.step(stream) is not None

        assert isinstance(refusal(take_over(running, stranger)), Unauthenticated)
        assert isinstance(refusal(lambda: running.open_session("other")), SessionHeld)
        assert client.step(stream) is not None


class TestTls:
    def test_certificate_of_the_client_ca_is_enough(self, serve, ca):
        """A scheduler with a certificate of the client CA is served over TLS."""
        pair = ca.issue("executor")
        tls = ServerTls(certificate=pair.certificate, key=pair.key, client_ca=ca.file)
        with over_tls(ca, ca.issue("scheduler"))(serve(tls=tls)) as channel:
            assert isinstance(refusal(calls_of(channel)["Describe"]), ExecutorLoading)

    @pytest.mark.parametrize(
        "stranger", ["plain text", "wrong CA", "no certificate", "foreign", "expired"]
    )
    def test_stranger_gets_no_connection(self, serve, ca, tmp_path, stranger):
        """Without TLS, the right CA or a valid certificate of the client CA calls end UNAVAILABLE."""
        pair, other = ca.issue("executor"), Authority(tmp_path, "other")
        tls = ServerTls(certificate=pair.certificate, key=pair.key, client_ca=ca.file)

        def unchecked(bad):
            credentials = grpc.ssl_channel_credentials(
                ca.file.read_bytes(), bad.key.read_bytes(), bad.certificate.read_bytes()
            )
            return lambda address: grpc.secure_channel(address, credentials, options=FRESH)

        connect = {
            "plain text": lambda: plain,
            "wrong CA": lambda: over_tls(other, ca.issue("scheduler")),
            "no certificate": lambda: over_tls(ca),
            "foreign": lambda: unchecked(other.issue("scheduler")),
            "expired": lambda: unchecked(ca.issue_expired("scheduler")),
        }[stranger]()
        with connect(serve(tls=tls)) as channel:
            for name, call in calls_of(channel).items():
                with pytest.raises(grpc.RpcError) as refused:
                    call()
                assert (name, grpc.StatusCode.UNAVAILABLE) == (name, refused.value.code())

    def test_unusable_files_end_the_start(self, ca, model_dir):
        """A server whose certificate has expired does not start."""
        pair = ca.issue_expired("executor")
        with pytest.raises(InvalidConfig, match="certificate has expired"):
            ExecutorServer(
                lambda _: None,
                lambda _: None,
                tls=ServerTls(certificate=pair.certificate, key=pair.key),
            )

    def test_steps_run_over_mutual_tls_with_a_token(self, start, ca, token_file):
        """Sessions, streams and steps work with client certificates and a token together."""
        pair, token = ca.issue("executor"), token_file.read_text().strip()
        open_tls = over_tls(ca, ca.issue("scheduler"))
        running = start(
            f"--tls-cert={pair.certificate}",
            f"--tls-key={pair.key}",
            f"--tls-client-ca={ca.file}",
            f"--link-token-file={token_file}",
            connect=lambda address: grpc.intercept_channel(open_tls(address), Bearer(token)),
        )
        client = StepClient(running)
        assert client.step(client.attach()) is not None

    def test_stranger_without_a_certificate_cannot_take_the_session_over(
        self, start, ca, token_file
    ):
        """With the token alone a take-over ends UNAVAILABLE, and the holder's stream goes on."""
        pair, token = ca.issue("executor"), Bearer(token_file.read_text().strip())
        mutual, alone = over_tls(ca, ca.issue("scheduler")), over_tls(ca)
        running = start(
            f"--tls-cert={pair.certificate}",
            f"--tls-key={pair.key}",
            f"--tls-client-ca={ca.file}",
            f"--link-token-file={token_file}",
            connect=lambda address: grpc.intercept_channel(mutual(address), token),
        )
        client = StepClient(running, "owner")
        stream = client.attach()
        assert client.step(stream) is not None

        with pytest.raises(grpc.RpcError) as refused:
            take_over(running, lambda address: grpc.intercept_channel(alone(address), token))()
        assert grpc.StatusCode.UNAVAILABLE == refused.value.code()
        assert isinstance(refusal(lambda: running.open_session("other")), SessionHeld)
        assert client.step(stream) is not None


class TestBeyondThisMachine:
    @pytest.fixture
    def tls(self, ca):
        """Return files to listen with over TLS, without client certificates."""
        pair = ca.issue("executor")
        return ServerTls(certificate=pair.certificate, key=pair.key)

    @pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
    @pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "tls"])
    def test_start_without_client_certificates_or_token_is_refused(
        self, serve, tls, address, is_encrypted
    ):
        """An executor that other machines can reach must know callers; TLS alone tells none."""
        with pytest.raises(InvalidConfig) as refused:
            serve(address, tls=tls if is_encrypted else None)
        assert "listen" == refused.value.field
        for part in (address, "link_token_file", "tls_client_ca", "insecure_link"):
            assert part in refused.value.message

    def test_client_certificates_or_a_token_are_enough(self, serve, tls, ca, token_file):
        """Either of both lets an executor listen where other machines reach it."""
        assert serve("0.0.0.0:0", token=LinkToken(token_file))
        assert serve("0.0.0.0:0", tls=replace(tls, client_ca=ca.file))

    def test_refused_executor_listens_nowhere(self, serve):
        """The port of a refused executor is free."""
        address = f"0.0.0.0:{free_port()}"
        with pytest.raises(InvalidConfig):
            serve(address)
        ListenAddress("listen", address).release()

    @pytest.mark.parametrize(
        ("options", "expected"),
        [((), 0o600), (("insecure_link",), 0o644), (("token",), 0o644)],
        ids=["nothing", "insecure", "token"],
    )
    def test_unix_socket_without_protection_is_of_this_user_alone(
        self, serve, token_file, options, expected
    ):
        """Other users can open a socket only where callers must prove who they are, or need not."""
        every = {"insecure_link": True, "token": LinkToken(token_file)}
        before = os.umask(0o133)
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "s")
                serve(f"unix:{path}", **{name: every[name] for name in options})
                assert expected == stat.S_IMODE(path.stat().st_mode)
                assert 0o133 == os.umask(0o133)
        finally:
            os.umask(before)

    @pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["start", "dry run"])
    def test_service_ends_in_one_line(self, model_dir, flags):
        """The service, and its dry run, end with exit code 2 before they load anything."""
        command = [sys.executable, "-m", "executor_svc", f"--model={model_dir}"]
        ended = subprocess.run(
            [*command, "--listen=0.0.0.0:0", *flags], capture_output=True, text=True, check=False
        )
        assert 2 == ended.returncode
        assert ended.stderr.startswith("INVALID_CONFIG: listen: other machines can reach 0.0.0.0:0")
        assert 1 == ended.stderr.count("\n")


class TestWarning:
    @pytest.mark.parametrize(
        ("protected_by", "why"),
        [
            (("insecure_link",), UNPROTECTED),
            (("token",), UNENCRYPTED),
            (("insecure_link", "tls"), UNAUTHENTICATED),
            (("tls", "token"), None),
        ],
        ids=["nothing", "token", "tls", "both"],
    )
    def test_address_that_others_reach_is_warned_of(self, serve, ca, token_file, protected_by, why):
        """An executor that other machines can reach says at its start what protection it lacks."""
        pair = ca.issue("executor")
        every = {
            "tls": ServerTls(certificate=pair.certificate, key=pair.key),
            "token": LinkToken(token_file),
            "insecure_link": True,
        }
        options = {name: every[name] for name in protected_by}
        with capture_logs() as logs:
            serve("0.0.0.0:0", **options)
            serve(**options)

        warnings = [line["message"] for line in logs if line["event"] == "listening_unprotected"]
        assert ([] if why is None else [why]) == warnings


def test_service_name_is_that_of_the_contract():
    """The service that the token guards is that of the contract."""
    assert EXECUTE.startswith(f"/{SERVICE_NAME}/")
