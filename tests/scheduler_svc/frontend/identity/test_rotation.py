"""Certificates and credentials that are replaced while streams are open."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.frontend.identity.credential_store import LOOK_INTERVAL_S
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import model_pb2
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.certificates import first_certificate, shown_certificate
from tests.scheduler_svc.frontend.calls import error_of, kinds, rest_of
from tests.scheduler_svc.frontend.fake_core import ended, within
from tests.scheduler_svc.frontend.identity.credentials import (
    OTHER,
    USER,
    bearer,
    credentials,
    write_file,
)
from tests.scheduler_svc.frontend.identity.secured import (
    Secured,
    channel_credentials,
    secured_frontend,
)

PAST = "2020-01-02T03:04:05Z"
NUM_STREAMS = 64
NUM_ROTATIONS = 3


@pytest.fixture
async def secured(tmp_path: Path, model_dir: Path) -> AsyncIterator[Secured]:
    async with secured_frontend(tmp_path, model_dir) as running:
        yield running


def shown(secured: Secured, port: str = "public") -> bytes:
    """Return the certificate, in DER, that a port shows to a new connection."""
    client = secured.client()
    context = ssl.create_default_context(cafile=secured.servers_ca.file)
    context.load_cert_chain(client.certificate, client.key)
    context.set_alpn_protocols(["h2"])
    return shown_certificate(secured.address(port), context)


async def opened(secured: Secured, stub: InferenceServiceStub, token: str):
    """Return a stream that has begun, and its number in the core."""
    call = stub.Generate(pb.GenerateRequest(text="hello"), metadata=bearer(token))
    stream_id = await secured.frontend.core.accept()
    assert ["started"] == kinds([await within(call.read())])
    return call, stream_id


class TestCertificates:
    async def test_streams_go_on_and_new_connections_see_the_new_one(self, secured):
        """
        Of 64 streams none fails while the server's certificate is replaced three times, and each
        new connection sees the one that was newest when it began, on the admin port too.
        """
        core = secured.frontend.core
        credentials = channel_credentials(secured.servers_ca, secured.client())
        async with grpc.aio.secure_channel(secured.address("public"), credentials) as channel:
            stub = InferenceServiceStub(channel)
            streams = [await opened(secured, stub, USER) for _ in range(NUM_STREAMS)]
            seen = []
            for at in range(NUM_ROTATIONS):
                pair = secured.servers_ca.issue("server")
                seen.append(await asyncio.to_thread(shown, secured))
                assert first_certificate(pair.certificate) == seen[-1]
                assert seen[-1] == await asyncio.to_thread(shown, secured, "admin")
                for _, stream_id in streams:
                    await core.tokens(stream_id, at, [40 + at])
            for _, stream_id in streams:
                end = ended(stream_id, FinishReason.MAX_TOKENS, NUM_ROTATIONS)
                await core.tokens(stream_id, NUM_ROTATIONS, [], end=end)
            for call, _ in streams:
                messages = await rest_of(call)
                ids = [id_ for one in messages for id_ in one.delta.token_ids]
                assert [40, 41, 42] == ids
                assert ["finished", "done"] == kinds(messages)[-2:]
            assert NUM_ROTATIONS == len(set(seen))

    async def test_broken_pair_leaves_the_one_before(self, secured):
        """
        A key that does not belong to the certificate changes nothing for new connections.
        """
        before = await asyncio.to_thread(shown, secured)
        other = secured.servers_ca.issue("another")
        (other.key.parent / "server-key.pem").write_bytes(other.key.read_bytes())
        assert before == await asyncio.to_thread(shown, secured)


class TestCredentials:
    @pytest.mark.slow
    async def test_withdrawn_token_ends_its_streams_and_begins_none(self, secured, tmp_path):
        """
        A token that leaves the file is UNAUTHENTICATED from the next look on, its open stream ends
        so without another call, in the core too, and other tokens and their streams stay valid.
        """
        tls = channel_credentials(secured.servers_ca, secured.client("x.example"))
        async with grpc.aio.secure_channel(secured.address("public"), tls) as channel:
            stub = InferenceServiceStub(channel)
            call, stream_id = await opened(secured, stub, OTHER)
            kept, kept_id = await opened(secured, stub, USER)
            write_file(tmp_path, [one for one in credentials() if one["name"] != "other"])
            secured.frontend.clock.lead_s += LOOK_INTERVAL_S
            error = await error_of(call)
            assert "UNAUTHENTICATED" == error.reason
            assert "withdrawn" in error.message
            end = await within(secured.frontend.core.ends.get())
            assert (stream_id, FinishReason.CANCELLED) == (end.stream_id, end.reason)
            error = await error_of(
                stub.GetModel(model_pb2.GetModelRequest(), metadata=bearer(OTHER))
            )
            assert "UNAUTHENTICATED" == error.reason
            await within(stub.GetModel(model_pb2.GetModelRequest(), metadata=bearer(USER)))
            await secured.frontend.core.tokens(
                kept_id, 0, [40], end=ended(kept_id, FinishReason.MAX_TOKENS, 1)
            )
            assert "done" == kinds(await rest_of(kept))[-1]

    @pytest.mark.slow
    async def test_stream_ends_when_its_token_expires(self, secured, tmp_path):
        """
        The stream of a token that has expired ends UNAUTHENTICATED, and its next call is refused.
        """
        tls = channel_credentials(secured.servers_ca, secured.client("x.example"))
        async with grpc.aio.secure_channel(secured.address("public"), tls) as channel:
            stub = InferenceServiceStub(channel)
            call, _ = await opened(secured, stub, OTHER)
            write_file(tmp_path, [one | {"expires": PAST} for one in credentials()])
            secured.frontend.clock.lead_s += LOOK_INTERVAL_S
            for ending in (call, stub.GetModel(model_pb2.GetModelRequest(), metadata=bearer(USER))):
                error = await error_of(ending)
                assert "UNAUTHENTICATED" == error.reason
                assert "2020-01-02T03:04:05+00:00" == error.metadata["expired"]
