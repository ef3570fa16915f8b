"""Tenants of real services with a tokens file: ids, ends and lists of requests stay apart."""

from __future__ import annotations

import contextlib

import grpc
import pytest

from tandem.admin.v1 import admin_service_pb2_grpc, requests_pb2
from tandem.common.v1.finish_reason_pb2 import FINISH_REASON_CANCELLED
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import inference_service_pb2_grpc
from tandem.status import from_rpc_error
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import running
from tests.scheduler_svc.frontend.identity.credentials import (
    OPERATOR,
    OTHER,
    USER,
    bearer,
    write_file,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tiny_model, tmp_path_factory):
    """Yield the tiny model behind a scheduler that asks for credentials."""
    folder = tmp_path_factory.mktemp("tenants")
    tokens = write_file(folder, tenants={"globex": {"max_requests": 1}})
    limits = ["--max-num-blocks=256", "--max-model-len=512", "--max-batch-size=4"]
    yield from running(Cluster(tiny_model, folder, limits, [f"--tokens-file={tokens}"]))


@pytest.fixture
def public(cluster):
    with grpc.insecure_channel(cluster.address) as channel:
        yield inference_service_pb2_grpc.InferenceServiceStub(channel)


@pytest.fixture
def listed(cluster):
    """Yield a function that lists requests as an operator sees them: tenants and ids."""
    with grpc.insecure_channel(cluster.admin_address) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)

        def ask(**fields: str) -> set[tuple[str, str]]:
            answer = stub.ListRequests(
                requests_pb2.ListRequestsRequest(**fields), metadata=bearer(OPERATOR)
            )
            return {(one.tenant, one.request_id) for one in answer.requests}

        yield ask


def endless(public, token: str, request_id: str):
    """Return a stream that has been accepted and does not end by itself."""
    request = pb.GenerateRequest(
        request_id=request_id,
        token_ids={"ids": [5, 6, 7]},
        stopping={"max_tokens": 400, "ignore_eos": True},
    )
    stream = public.Generate(request, metadata=bearer(token))
    assert next(stream).HasField("started")
    return stream


def reason_of(call) -> str:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return from_rpc_error(refused.value).reason


def test_tenants_have_ids_and_ends_of_their_own(cluster, public, listed):
    """
    Two tenants have a request of the same id. Each ends only its own, the id of another tenant is
    not found, and an operator lists all.
    """
    with cluster.held():
        ours, second = endless(public, USER, "same"), endless(public, USER, "second")
        theirs = endless(public, OTHER, "same")
        assert {("acme", "same"), ("acme", "second"), ("globex", "same")} == listed()
        assert {("globex", "same")} == listed(tenant="globex")

        foreign = pb.AbortRequest(request_id="second")
        not_found = reason_of(lambda: public.Abort(foreign, metadata=bearer(OTHER)))
        assert "REQUEST_NOT_FOUND" == not_found
        named = pb.AbortRequest(request_id="second", tenant="acme")
        denied = reason_of(lambda: public.Abort(named, metadata=bearer(OTHER)))
        assert "PERMISSION_DENIED" == denied

        public.Abort(pb.AbortRequest(request_id="same"), metadata=bearer(OTHER))
        assert {("acme", "same"), ("acme", "second")} == listed()
        end(ours, second)
    reasons = [one.finished.reason for one in theirs if one.HasField("finished")]
    assert [FINISH_REASON_CANCELLED] == reasons


def test_limit_of_a_tenant_holds_for_it_alone(cluster, public):
    """
    The number of requests in the tokens file holds for its tenant, and for no other.
    """
    with cluster.held():
        streams = [endless(public, USER, "1"), endless(public, USER, "2")]
        streams.append(endless(public, OTHER, "1"))
        assert "QUEUE_FULL" == reason_of(lambda: endless(public, OTHER, "2"))
        end(*streams)


def end(*streams) -> None:
    for stream in streams:
        stream.cancel()
    for stream in streams:
        with contextlib.suppress(grpc.RpcError):
            list(stream)
