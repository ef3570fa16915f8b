"""AdminService about single executors, and their metrics, the core played by the test."""

from __future__ import annotations

import json

import grpc
import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from scheduler_svc.frontend.operators.metrics import SnapshotMetrics
from scheduler_svc.ipc.snapshot import (
    ExecutorDrainResult,
    ExecutorList,
    ExecutorRow,
    MetricsSnapshot,
    encode_json,
)
from tandem.admin.v1 import executors_pb2 as pb
from tandem.admin.v1.admin_service_pb2_grpc import AdminServiceStub
from tandem.admin.v1.stats_pb2 import GetStatsResponse
from tandem.errors import InvalidParameter
from tests.scheduler_svc.frontend.calls import error_of
from tests.scheduler_svc.frontend.fake_core import running_frontend, within

STATES = ("serving", "draining", "drained", "suspended", "silent", "connecting", "refused")


def row(**changes: object) -> ExecutorRow:
    values: dict[str, object] = {
        "address": "a:1",
        "reached_at": "b:1",
        "state": "serving",
        "why": "no",
        "boot_id": "boot",
        "model": "small",
        "device": "cpu",
        "dtype": "float32",
        "running_requests": 1,
        "max_requests": 2,
        "used_blocks": 3,
        "total_blocks": 4,
        "cached_blocks": 5,
        "steps": 6,
        "step_s": 0.5,
        "sessions": 8,
        "losses": 9,
        "device_memory_bytes": 10,
        "away_s": 0.0,
    }
    return ExecutorRow(**(values | changes))


@pytest.fixture
async def admin(frontend):
    async with grpc.aio.insecure_channel(frontend.servers.admin_address) as channel:
        yield AdminServiceStub(channel)


@pytest.fixture
def asked(frontend):
    """Let the core answer all that changes something; return what it was asked."""
    seen: list[tuple[str, dict[str, object]]] = []

    def answer(kind: str, result: msgspec.Struct):
        def note(argument: bytes) -> bytes:
            seen.append((kind, json.loads(argument)))
            return encode_json(result)

        return note

    for kind, result in (
        ("add_executor", ExecutorList(())),
        ("drain_executor", ExecutorDrainResult(moved_requests=3)),
        ("remove_executor", ExecutorList(())),
    ):
        frontend.core.answers[kind] = answer(kind, result)
    return seen


class TestList:
    async def test_every_field_of_the_core_is_passed_on(self, frontend, admin):
        """
        Each row becomes a summary with the same values, in the same order.
        """
        rows = (row(), row(address="c:1", away_s=2.5))
        frontend.core.answers["executors"] = lambda _: encode_json(ExecutorList(rows))
        found = (await within(admin.ListExecutors(pb.ListExecutorsRequest()))).executors

        names = [field.name for field in pb.ExecutorSummary.DESCRIPTOR.fields]
        told = [{name: getattr(one, name) for name in names} for one in found]
        for one, values in zip(told, map(msgspec.structs.asdict, rows), strict=True):
            assert values | {"state": 1} == one | {"step_s": one.pop("usual_step_s")}

    async def test_each_state_has_its_number(self, frontend, admin):
        """
        Every state of the core has a value of the contract; one of a newer core is unspecified.
        """
        rows = tuple(row(state=state) for state in (*STATES, "another"))
        frontend.core.answers["executors"] = lambda _: encode_json(ExecutorList(rows))
        found = (await within(admin.ListExecutors(pb.ListExecutorsRequest()))).executors

        assert [f"EXECUTOR_STATE_{state.upper()}" for state in (*STATES, "unspecified")] == [
            pb.ExecutorState.Name(one.state) for one in found
        ]
        assert len(STATES) + 1 == len(pb.ExecutorState.items())


class TestChanges:
    async def test_addresses_reach_the_core(self, admin, asked):
        """
        Adding and removing tell the core the address, and answer when it has obeyed.
        """
        await within(admin.AddExecutor(pb.AddExecutorRequest(address="c:1")))
        await within(admin.RemoveExecutor(pb.RemoveExecutorRequest(address="c:1")))
        assert [
            ("add_executor", {"address": "c:1", "grace_s": 0.0}),
            ("remove_executor", {"address": "c:1", "grace_s": 0.0}),
        ] == asked

    @pytest.mark.parametrize(
        ("sent", "grace_s"), [({}, 30.0), ({"grace_s": 0.0}, 0.0), ({"grace_s": 2.5}, 2.5)]
    )
    async def test_drain_has_the_grace_asked_for(self, admin, asked, sent, grace_s):
        """
        Draining passes its grace on, the scheduler's own if unset, and tells what moved.
        """
        answer = await within(admin.DrainExecutor(pb.DrainExecutorRequest(address="a:1", **sent)))
        assert 3 == answer.moved_requests
        assert [("drain_executor", {"address": "a:1", "grace_s": grace_s})] == asked

    @pytest.mark.parametrize("grace_s", [-1.0, float("nan"), float("inf")])
    async def test_senseless_grace_is_refused(self, admin, asked, grace_s):
        """
        A grace that is negative or not finite is refused without asking the core.
        """
        request = pb.DrainExecutorRequest(address="a:1", grace_s=grace_s)
        error = await error_of(admin.DrainExecutor(request))
        assert ("INVALID_PARAMETER", "grace_s", []) == (error.reason, error.field, asked)

    @pytest.mark.parametrize("address", ["", "box", "box:", "box:99999", "a:1,b:1"])
    async def test_text_that_is_no_address_is_refused(self, admin, asked, address):
        """
        Only an address can be added, and one at a time.
        """
        error = await error_of(admin.AddExecutor(pb.AddExecutorRequest(address=address)))
        assert ("INVALID_ARGUMENT", "INVALID_PARAMETER", "address", []) == (
            error.code,
            error.reason,
            error.field,
            asked,
        )

    @pytest.mark.parametrize("name", ["Add", "Drain", "Remove"])
    async def test_refusal_of_the_core_is_the_callers(self, frontend, admin, name):
        """
        An address that is not named, or is named already, is INVALID_ARGUMENT with the field.
        """
        refusal = InvalidParameter("no executor is named 'a:1'", field="address")
        frontend.core.answers[f"{name.lower()}_executor"] = lambda _: refusal
        request = getattr(pb, f"{name}ExecutorRequest")(address="a:1")
        error = await error_of(getattr(admin, f"{name}Executor")(request))
        assert ("INVALID_ARGUMENT", "address", "no executor is named 'a:1'") == (
            error.code,
            error.field,
            error.message,
        )

    async def test_drain_waits_for_its_grace_and_no_longer(self, tmp_path):
        """
        A core that does not answer within the grace and the time for any query is CORE_TIMEOUT.
        """
        async with running_frontend(tmp_path, query_timeout_s=0.05) as frontend:
            frontend.core.answers["drain_executor"] = lambda _: None
            async with grpc.aio.insecure_channel(frontend.servers.admin_address) as channel:
                request = pb.DrainExecutorRequest(address="a:1", grace_s=0.1)
                error = await error_of(AdminServiceStub(channel).DrainExecutor(request))
        assert ("UNAVAILABLE", "CORE_TIMEOUT") == (error.code, error.reason)
        assert "the scheduler core did not answer 'drain_executor' within 0.15 s" == error.message


def samples(*rows: ExecutorRow) -> dict[tuple[str, ...], float]:
    """Return the samples of a page that have the label of an executor, by name and labels."""
    snapshot = MetricsSnapshot(
        stats=GetStatsResponse(),
        ready=True,
        finished_by_reason={},
        failed_by_reason={},
        refused_by_reason={},
        histograms={},
        executors=rows,
    )
    page = generate_latest(SnapshotMetrics(snapshot)).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "executor" in sample.labels
    }


class TestMetrics:
    def test_each_executor_has_its_samples(self):
        """
        Each sample of an executor has its address as the label `executor`, and its state is one.
        """
        found = samples(row(), row(address="c:1", state="connecting", away_s=2.5, losses=7))
        assert {
            ("tandem_each_executor_attached", "a:1"): 1,
            ("tandem_each_executor_attached", "c:1"): 0,
            ("tandem_each_executor_requests_running", "a:1"): 1,
            ("tandem_each_executor_requests_running", "c:1"): 1,
            ("tandem_each_executor_kv_blocks_used", "a:1"): 3,
            ("tandem_each_executor_kv_blocks_used", "c:1"): 3,
            ("tandem_each_executor_kv_blocks", "a:1"): 4,
            ("tandem_each_executor_kv_blocks", "c:1"): 4,
            ("tandem_each_executor_steps_total", "a:1"): 6,
            ("tandem_each_executor_steps_total", "c:1"): 6,
            ("tandem_each_executor_session_losses_total", "a:1"): 9,
            ("tandem_each_executor_session_losses_total", "c:1"): 7,
            ("tandem_each_executor_state", "a:1", "serving"): 1,
            ("tandem_each_executor_state", "c:1", "connecting"): 1,
        } == found

    @pytest.mark.parametrize("state", STATES)
    def test_attached_is_one_with_a_session(self, state):
        """
        An executor is attached in the states that have a session, unless its stream is broken.
        """
        has_session = state not in {"drained", "connecting", "refused"}
        name = ("tandem_each_executor_attached", "a:1")
        assert has_session == samples(row(state=state))[name]
        assert 0 == samples(row(state=state, away_s=0.5))[name]
