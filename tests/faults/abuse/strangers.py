"""Strangers: what they learn and end by names that they guess, and calls without a token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tandem.common.v1.finish_reason_pb2 import FINISH_REASON_MAX_TOKENS
from tandem.executor.v1 import session_pb2
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tandem.link import PROTOCOL_VERSION
from tests.e2e.cluster import Cluster
from tests.faults.abuse.services import GET_MODEL, Figures, end_of, services, temporary_folder
from tests.scheduler_svc.frontend.identity.credentials import OTHER, USER, bearer, write_file

GET_STATS = "/tandem.admin.v1.AdminService/GetStats"
TENANT = "acme"
"""Tenant of `USER`."""
KEY = "a-guessable-key"
NUM_TOKENS = 400
CALL_S = 60.0


def foreign_names() -> Figures:
    """
    Repeat another tenant's attempt key with another prompt, in that tenant's name and in the own
    one, and abort what the refusal names, or the id that is guessed.
    """
    with temporary_folder() as folder, services([f"--tokens-file={write_file(folder)}"]) as cluster:
        return _foreign_names(cluster)


def _foreign_names(cluster: Cluster) -> Figures:
    with grpc.insecure_channel(cluster.address) as channel:
        public = InferenceServiceStub(channel)
        with cluster.held():
            stream = public.Generate(_long("def f("), metadata=bearer(USER), timeout=CALL_S)
            request_id = next(stream).started.request_id
            repeated, told_id = _refused(
                lambda: next(
                    public.Generate(_long("import os"), metadata=bearer(OTHER), timeout=CALL_S)
                )
            )
            aborted, _ = _refused(
                lambda: public.Abort(
                    pb.AbortRequest(request_id=told_id or request_id),
                    metadata=bearer(OTHER),
                    timeout=CALL_S,
                )
            )
        ends = [one.finished.reason for one in stream if one.HasField("finished")]
    return {
        "repeating another's key in its name": repeated,
        "the other's request id is told": "yes" if told_id == request_id else "no",
        "aborting the other's request by its id": aborted,
        "the other's stream": "completes" if ends == [FINISH_REASON_MAX_TOKENS] else "is ended",
    }


def _long(text: str) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text=text, tenant=TENANT, attempt_key=KEY)
    request.sampling.seed = 1
    request.stopping.max_tokens = NUM_TOKENS
    request.stopping.ignore_eos = True
    return request


def without_credential() -> Figures:
    """Call each port without a credential, where the services are told to ask for one."""
    with temporary_folder() as folder:
        link_token = folder / "link-token"
        link_token.write_text("a-token-of-the-link")
        link = f"--link-token-file={link_token}"
        with services([f"--tokens-file={write_file(folder)}", link], [link]) as cluster:
            return _without_credential(cluster)


def _without_credential(cluster: Cluster) -> Figures:
    calls: dict[str, tuple[str, Callable[[grpc.Channel], Any]]] = {
        "public port": (
            cluster.address,
            lambda channel: channel.unary_unary(GET_MODEL)(b"", timeout=CALL_S),
        ),
        "admin port": (
            cluster.admin_address,
            lambda channel: channel.unary_unary(GET_STATS)(b"", timeout=CALL_S),
        ),
        "executor's port, session taken over": (
            cluster.executor_address,
            lambda channel: ExecutorServiceStub(channel).OpenSession(
                session_pb2.OpenSessionRequest(
                    protocol_version=PROTOCOL_VERSION,
                    scheduler_name="stranger",
                    scheduler_incarnation="1",
                    take_over=True,
                    lease_ms=1000,
                ),
                timeout=CALL_S,
            ),
        ),
    }
    found: Figures = {}
    for port, (address, call) in calls.items():
        with grpc.insecure_channel(address) as channel:
            end, _ = _refused(lambda: call(channel))  # noqa: B023  # called at once
            found[port] = "served" if end == "OK" else end
    return found


def _refused(call: Callable[[], Any]) -> tuple[str, str]:
    """Return how a call ends, and the id of a live request that its refusal names, or ""."""
    try:
        call()
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an error of a call is one
        info = error_details_pb2.ErrorInfo()
        for detail in status.details if status is not None else ():
            if detail.Is(info.DESCRIPTOR):
                detail.Unpack(info)
        return end_of(error), info.metadata.get("live_request_id", "")
    return "OK", ""
