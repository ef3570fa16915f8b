"""Answer of each port to each kind of caller: those that it should serve, and all others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import structlog
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from scheduler_svc.config.frontend_security import FrontendSecurity
from scheduler_svc.core.request.tenant import TenantLimits
from scheduler_svc.frontend.server import ADMIN, INFERENCE, SCALER
from tandem.admin.v1 import admin_service_pb2
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tandem.keda.v1 import external_scaler_service_pb2
from tandem.status import from_rpc_error
from tests.certificates import Authority
from tests.scheduler_svc.frontend.fake_core import (
    NEVER_S,
    model,
    running_frontend,
    serve,
    within,
)
from tests.scheduler_svc.frontend.identity.credentials import (
    GATEWAY,
    OPERATOR,
    OTHER,
    USER,
    bearer,
    write_file,
)
from tests.scheduler_svc.frontend.identity.secured import (
    Secured,
    channel_credentials,
    secured_frontend,
)

PORTS = ("public", "admin")
METHODS = {
    "public": [
        (f"/{INFERENCE}/{method.name}", method.server_streaming)
        for method in pb.DESCRIPTOR.services_by_name["InferenceService"].methods
    ],
    "admin": [
        (f"/{ADMIN}/{method.name}", method.server_streaming)
        for method in admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].methods
    ]
    + [
        (f"/{SCALER}/{method.name}", method.server_streaming)
        for method in external_scaler_service_pb2.DESCRIPTOR.services_by_name[
            "ExternalScaler"
        ].methods
    ],
}
ONE_METHOD = {"public": f"/{INFERENCE}/GetModel", "admin": f"/{ADMIN}/GetStats"}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
NOT_A_MESSAGE = b"\x0a\x02\xff\xfe"
SERVED = "OK"
LIMITS = TenantLimits(max_requests=3, weight=2.0)


@pytest.fixture
async def secured(tmp_path: Path, model_dir: Path) -> AsyncIterator[Secured]:
    async with secured_frontend(tmp_path, model_dir) as running:
        yield running


async def outcome(
    channel: grpc.aio.Channel,
    method: str,
    token: str | None = None,
    request: bytes = b"",
    *,
    streams: bool = False,
) -> str:
    """Return the reason that a call ends with, or its status where it has none; OK if served."""
    open_call = channel.unary_stream(method) if streams else channel.unary_unary(method)
    call = open_call(request, metadata=bearer(token))
    try:
        await within(call.read() if streams else call)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).code
    finally:
        call.cancel()
    return SERVED


def wrong_connection(secured: Secured, case: str) -> grpc.ChannelCredentials | None:
    """Return what a client connects with; None for plain text."""
    folder = secured.clients_ca.file.parent
    client = secured.client()
    if case == "no TLS":
        return None
    if case == "wrong CA":
        return channel_credentials(Authority(folder, "wrong-ca"), client)
    if case == "no client certificate":
        return channel_credentials(secured.servers_ca)
    if case == "expired client certificate":
        expired = secured.clients_ca.issue_expired("expired")
        return channel_credentials(secured.servers_ca, expired)
    assert "client certificate of another CA" == case
    return channel_credentials(secured.servers_ca, Authority(folder, "other-ca").issue("x"))


class TestConnections:
    @pytest.mark.parametrize("port", PORTS)
    @pytest.mark.parametrize(
        "case",
        [
            "no TLS",
            "wrong CA",
            "no client certificate",
            "expired client certificate",
            "client certificate of another CA",
        ],
    )
    async def test_wrong_end_of_tls_is_unavailable(self, secured, port, case):
        """
        A client that cannot finish the handshake is UNAVAILABLE, even with a valid token.
        """
        credentials = wrong_connection(secured, case)
        address, token = secured.address(port), USER if port == "public" else OPERATOR
        async with (
            grpc.aio.insecure_channel(address)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials)
        ) as channel:
            assert "UNAVAILABLE" == await outcome(channel, ONE_METHOD[port], token)


class TestCallers:
    @pytest.fixture
    async def channels(self, secured: Secured) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
        """Channels to both ports with a certificate whose name the service does not know."""
        credentials = channel_credentials(secured.servers_ca, secured.client("nobody.example"))
        opened = {
            port: grpc.aio.secure_channel(secured.address(port), credentials) for port in PORTS
        }
        yield opened
        for channel in opened.values():
            await channel.close()

    @pytest.mark.parametrize(
        ("port", "token", "expected"),
        [
            ("public", None, "UNAUTHENTICATED"),
            ("public", "wrong-token", "UNAUTHENTICATED"),
            ("public", OPERATOR, "PERMISSION_DENIED"),
            ("public", USER, SERVED),
            ("public", OTHER, SERVED),
            ("public", GATEWAY, SERVED),
            ("admin", None, "UNAUTHENTICATED"),
            ("admin", "wrong-token", "UNAUTHENTICATED"),
            ("admin", USER, "PERMISSION_DENIED"),
            ("admin", GATEWAY, "PERMISSION_DENIED"),
            ("admin", OPERATOR, SERVED),
        ],
    )
    async def test_each_token_is_served_where_it_has_the_role(
        self, channels, port, token, expected
    ):
        """
        No token and a wrong one are UNAUTHENTICATED; a known one without the port's role is
        PERMISSION_DENIED.
        """
        assert expected == await outcome(channels[port], ONE_METHOD[port], token)

    @pytest.mark.parametrize("port", PORTS)
    async def test_every_rpc_asks_for_a_credential(self, channels, port):
        """
        No rpc of any service, reflection among them, is served without a credential; health is.
        """
        asked = [*METHODS[port], (REFLECTION, True)]
        found = {method: await outcome(channels[port], method, streams=s) for method, s in asked}
        assert dict.fromkeys(found, "UNAUTHENTICATED") == found
        assert len(found) == len(asked)
        health = HealthStub(channels[port])
        assert 1 == (await within(health.Check(HealthCheckRequest()))).status

    async def test_reflection_is_served_to_users(self, channels):
        """
        Reflection needs the role of its port, and answers then.
        """
        call = channels["public"].stream_stream(REFLECTION)(iter([b":\x00"]), metadata=bearer(USER))
        assert b"InferenceService" in await within(call.read())
        assert "PERMISSION_DENIED" == await outcome(
            channels["admin"], REFLECTION, USER, streams=True
        )

    @pytest.mark.parametrize("rpc", ["Generate", "Complete"])
    @pytest.mark.parametrize(
        ("token", "tenant", "expected"),
        [
            (USER, "globex", "PERMISSION_DENIED"),
            (OTHER, "acme", "PERMISSION_DENIED"),
            (USER, "acme", "INVALID_ARGUMENT"),
            (GATEWAY, "globex", "INVALID_ARGUMENT"),
        ],
    )
    async def test_another_tenants_name_is_denied(self, channels, rpc, token, tenant, expected):
        """
        A request in another tenant's name is PERMISSION_DENIED; in the own, or by a gateway, it is
        read on, and here refused for its empty prompt.
        """
        request = pb.GenerateRequest(tenant=tenant).SerializeToString()
        if rpc == "Complete":
            request = pb.CompleteRequest(request={"tenant": tenant}).SerializeToString()
        found = await outcome(
            channels["public"], f"/{INFERENCE}/{rpc}", token, request, streams=rpc == "Generate"
        )
        assert expected == found

    async def test_resume_of_another_tenants_stream_is_a_request_of_the_own(
        self, secured, channels
    ):
        """
        Output of another tenant's stream is resumed neither in its name, which is denied, nor as
        its stream: in the own name it is a request of the caller's tenant, with its attempt key.
        """
        request = pb.GenerateRequest(
            text="hello",
            sampling={"seed": 7},
            attempt_key="key-of-acme",
            resume={"choices": [{"token_ids": [40]}]},
        )
        in_its_name = pb.GenerateRequest(tenant="acme")
        in_its_name.MergeFrom(request)
        denied = await outcome(
            channels["public"],
            f"/{INFERENCE}/Generate",
            OTHER,
            in_its_name.SerializeToString(),
            streams=True,
        )
        assert "PERMISSION_DENIED" == denied
        stub = InferenceServiceStub(channels["public"])
        call = stub.Generate(request, metadata=bearer(OTHER))
        submit = await within(secured.frontend.core.submits.get())
        assert ("globex", "key-of-acme") == (submit.tenant, submit.attempt_key)
        call.cancel()

    @pytest.mark.parametrize("request_bytes", [NOT_A_MESSAGE, bytes(10_000_000)], ids=len)
    async def test_request_without_a_token_is_refused_unread(self, channels, request_bytes):
        """
        A call without a credential is refused by its metadata before its message is decoded.
        """
        method = f"/{INFERENCE}/Complete"
        found = await outcome(channels["public"], method, request=request_bytes)
        assert "UNAUTHENTICATED" == found
        assert "INVALID_ARGUMENT" == await outcome(
            channels["public"], method, USER, request=NOT_A_MESSAGE
        )


class TestCertificates:
    async def test_known_name_is_an_identity(self, secured):
        """
        A certificate whose name the file has proves an identity without a token, with its roles.
        """
        credentials = channel_credentials(secured.servers_ca, secured.client())
        for port, expected in (("public", SERVED), ("admin", "PERMISSION_DENIED")):
            async with grpc.aio.secure_channel(secured.address(port), credentials) as channel:
                assert expected == await outcome(channel, ONE_METHOD[port])

    async def test_token_counts_more_than_the_certificate(self, secured):
        """
        A caller with both is that of the token; a wrong token is not made good by a certificate.
        """
        credentials = channel_credentials(secured.servers_ca, secured.client())
        async with grpc.aio.secure_channel(secured.address("admin"), credentials) as channel:
            assert SERVED == await outcome(channel, ONE_METHOD["admin"], OPERATOR)
            assert "UNAUTHENTICATED" == await outcome(channel, ONE_METHOD["admin"], "wrong-token")

    async def test_request_of_a_known_certificate_is_claimed(self, secured):
        """
        A request of Generate or Complete is read, decoded and claimed as one with a token is.
        """
        credentials = channel_credentials(secured.servers_ca, secured.client())
        own, another = pb.GenerateRequest(), pb.GenerateRequest(tenant="globex")
        method = f"/{INFERENCE}/Generate"
        async with grpc.aio.secure_channel(secured.address("public"), credentials) as channel:
            for request, expected in (
                (own.SerializeToString(), "INVALID_ARGUMENT"),
                (another.SerializeToString(), "PERMISSION_DENIED"),
                (NOT_A_MESSAGE, "INVALID_ARGUMENT"),
            ):
                assert expected == await outcome(channel, method, request=request, streams=True)
            stub = InferenceServiceStub(channel)
            call = stub.Generate(pb.GenerateRequest(text="hello"))
            submit = await within(secured.frontend.core.submits.get())
            assert "acme" == submit.tenant
            call.cancel()


class TestLog:
    async def test_refusal_names_the_credential(self, tmp_path):
        """
        The log says which credential was refused, and never the token.
        """
        security = FrontendSecurity(tokens_file=str(write_file(tmp_path)))
        structlog.reset_defaults()
        async with running_frontend(tmp_path, security=security) as frontend:
            with capture_logs(processors=[merge_contextvars]) as logged:
                for token in (OPERATOR, "wrong-token"):
                    await outcome(frontend.channel, ONE_METHOD["public"], token)
        failed = [line for line in logged if line["event"] == "call_failed"]
        assert [("operator", "PERMISSION_DENIED"), (None, "UNAUTHENTICATED")] == [
            (line.get("credential"), line["reason"]) for line in failed
        ]
        assert "token" not in str(failed)

    @pytest.mark.slow
    async def test_strangers_do_not_fill_the_log(self, tmp_path, monkeypatch):
        """
        Of many calls without a token, one has a line of its own in a second; so have calls of a
        credential without the role.
        """
        monkeypatch.setattr("scheduler_svc.frontend.calls.refusal_lines.INTERVAL_S", NEVER_S)
        security = FrontendSecurity(tokens_file=str(write_file(tmp_path)))
        structlog.reset_defaults()
        async with running_frontend(tmp_path, security=security) as frontend:
            with capture_logs(processors=[merge_contextvars]) as logged:
                for token in [None] * 20 + [OPERATOR] * 20:
                    await outcome(frontend.channel, ONE_METHOD["public"], token)
        assert [(None, "UNAUTHENTICATED"), ("operator", "PERMISSION_DENIED")] == [
            (line.get("credential"), line["reason"]) for line in logged
        ]


class TestLimits:
    @pytest.mark.parametrize(
        ("token", "tenant", "expected"),
        [(USER, "", LIMITS), (OTHER, "", None), (GATEWAY, "acme", LIMITS), (GATEWAY, "", None)],
    )
    async def test_request_carries_the_limits_of_its_tenant(
        self, tmp_path, model_dir, token, tenant, expected
    ):
        """
        The core gets a tenant's limits with each of its requests, whichever credential sent it.
        """
        path = write_file(tmp_path, tenants={"acme": {"max_requests": 3, "weight": 2.0}})
        security = FrontendSecurity(tokens_file=str(path))
        async with running_frontend(tmp_path, security=security) as frontend:
            await serve(frontend, model(model_dir))
            stub = InferenceServiceStub(frontend.channel)
            request = pb.GenerateRequest(text="hello", tenant=tenant)
            call = stub.Generate(request, metadata=bearer(token))
            submit = await within(frontend.core.submits.get())
            assert expected == submit.tenant_limits
            call.cancel()


class TestWithoutCertificates:
    async def test_tls_alone_encrypts_and_tokens_tell_who_calls(self, tmp_path, model_dir):
        """
        Where clients need no certificate, one that trusts the server's CA is served by its token.
        """
        async with secured_frontend(tmp_path, model_dir, asks_for_certificates=False) as secured:
            credentials = channel_credentials(secured.servers_ca)
            async with grpc.aio.secure_channel(secured.address("public"), credentials) as channel:
                assert SERVED == await outcome(channel, ONE_METHOD["public"], USER)
                assert "UNAUTHENTICATED" == await outcome(channel, ONE_METHOD["public"])

    async def test_tokens_work_in_plain_text(self, tmp_path):
        """
        Behind a proxy that ends TLS, tokens are checked on connections in plain text.
        """
        security = FrontendSecurity(tokens_file=str(write_file(tmp_path)))
        async with running_frontend(tmp_path, security=security) as frontend:
            channel = frontend.channel
            assert "UNAUTHENTICATED" == await outcome(channel, ONE_METHOD["public"])
            assert "UNAVAILABLE" == await outcome(channel, ONE_METHOD["public"], USER)

    async def test_without_a_tokens_file_all_is_open(self, tmp_path):
        """
        A service without credentials reads none: a token that is sent is ignored.
        """
        async with running_frontend(tmp_path) as frontend:
            address = frontend.servers.admin_address
            async with grpc.aio.insecure_channel(address) as channel:
                assert SERVED == await outcome(channel, ONE_METHOD["admin"])
                assert SERVED == await outcome(channel, ONE_METHOD["admin"], "any")
