"""Requests of other tenants: what a credential can end and list of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from scheduler_svc.config.frontend_security import FrontendSecurity
from scheduler_svc.ipc.snapshot import (
    AbortResult,
    RequestList,
    decode_abort_argument,
    decode_list_argument,
    encode_json,
)
from tandem.admin.v1 import admin_service_pb2_grpc, requests_pb2
from tandem.errors import RequestNotFound, TandemError
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tandem.status import from_rpc_error
from tests.scheduler_svc.frontend.fake_core import Frontend, running_frontend, within
from tests.scheduler_svc.frontend.identity.credentials import (
    GATEWAY,
    OPERATOR,
    OTHER,
    USER,
    bearer,
    write_file,
)

SERVED = "OK"
LIVE = {("acme", "r-1")}
"""Requests that the core has, by tenant and id."""


def abort(argument: bytes) -> bytes | TandemError:
    """Answer as the core does: a request is found only under its tenant."""
    asked = decode_abort_argument(argument)
    if (asked.tenant, asked.request_id) not in LIVE:
        return RequestNotFound("no live request has this id")
    return encode_json(AbortResult())


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Frontend]:
    security = FrontendSecurity(tokens_file=str(write_file(tmp_path)))
    async with running_frontend(tmp_path, security=security) as frontend:
        frontend.core.answers["abort"] = abort
        yield frontend


async def outcome(call) -> str:
    try:
        await within(call)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return SERVED


class TestAbort:
    @pytest.mark.parametrize(
        ("token", "tenant", "expected"),
        [
            (USER, "", SERVED),
            (USER, "acme", SERVED),
            (USER, "globex", "PERMISSION_DENIED"),
            (OTHER, "", "REQUEST_NOT_FOUND"),
            (OTHER, "acme", "PERMISSION_DENIED"),
            (GATEWAY, "acme", SERVED),
            (GATEWAY, "", "REQUEST_NOT_FOUND"),
            (OPERATOR, "acme", "PERMISSION_DENIED"),
            (None, "acme", "UNAUTHENTICATED"),
        ],
    )
    async def test_request_is_ended_only_for_its_own_tenant(self, secured, token, tenant, expected):
        """
        A user ends requests of the own tenant, a gateway those of the tenant that it names; an id
        of another tenant is not found, as if there were none.
        """
        request = pb.AbortRequest(request_id="r-1", tenant=tenant)
        call = InferenceServiceStub(secured.channel).Abort(request, metadata=bearer(token))
        assert expected == await outcome(call)


class TestAdmin:
    @pytest.fixture
    async def stub(self, secured: Frontend):
        asked = []

        def listed(argument: bytes) -> bytes:
            asked.append(decode_list_argument(argument).tenant)
            return encode_json(RequestList(requests=(), total=0))

        secured.core.answers["requests"] = listed
        async with grpc.aio.insecure_channel(secured.servers.admin_address) as channel:
            found = admin_service_pb2_grpc.AdminServiceStub(channel)
            found.asked = asked
            yield found

    @pytest.mark.parametrize("token", [USER, OTHER, GATEWAY])
    async def test_users_list_and_end_nothing(self, stub, token):
        """
        Neither users nor gateways see or end requests on the admin port, their own among them.
        """
        metadata = bearer(token)
        calls = [
            stub.ListRequests(requests_pb2.ListRequestsRequest(), metadata=metadata),
            stub.ListRequests(requests_pb2.ListRequestsRequest(tenant="acme"), metadata=metadata),
            stub.GetRequestEvents(
                requests_pb2.GetRequestEventsRequest(request_id="r-1"), metadata=metadata
            ),
            stub.Abort(
                requests_pb2.AbortRequest(request_id="r-1", tenant="acme"), metadata=metadata
            ),
        ]
        assert ["PERMISSION_DENIED"] * 4 == [await outcome(call) for call in calls]
        assert [] == stub.asked

    async def test_operator_lists_and_ends_requests_of_any_tenant(self, stub):
        """
        The admin port has no tenant of its own: what an operator names is asked of the core.
        """
        metadata = bearer(OPERATOR)
        for fields in ({}, {"tenant": "acme"}, {"tenant": ""}):
            request = requests_pb2.ListRequestsRequest(**fields)
            assert SERVED == await outcome(stub.ListRequests(request, metadata=metadata))
        assert [None, "acme", ""] == stub.asked
        request = requests_pb2.AbortRequest(request_id="r-1", tenant="acme")
        assert SERVED == await outcome(stub.Abort(request, metadata=metadata))
