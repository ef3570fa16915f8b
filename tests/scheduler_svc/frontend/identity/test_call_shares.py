"""Shares of tenants in the calls of a frontend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from scheduler_svc.config.frontend_security import FrontendSecurity
from scheduler_svc.frontend.identity.call_shares import CallShares
from scheduler_svc.frontend.identity.call_window import GUARD_S
from tandem.errors import QueueFull
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.status import from_rpc_error
from tests.scheduler_svc.frontend.fake_core import (
    Frontend,
    model,
    running_frontend,
    serve,
    until,
    within,
)
from tests.scheduler_svc.frontend.identity.credentials import (
    GATEWAY,
    OTHER,
    USER,
    bearer,
    write_file,
)

SERVICE = "/tandem.inference.v1.InferenceService"
NO_MESSAGE = b"\xff"


def is_refused(shares: CallShares, tenant: str, weight: float = 1.0) -> bool:
    try:
        shares.check(tenant, weight)
    except QueueFull:
        return True
    return False


async def test_tenant_alone_has_all_places(shares_of_four):
    """
    One tenant fills all places and no more; another one is let in beside it, and has room up to
    its half while the first has more than its own.
    """
    for _ in range(4):
        shares_of_four.begin("greedy", 1.0)
    assert is_refused(shares_of_four, "greedy")
    shares_of_four.begin("polite", 1.0)
    shares_of_four.begin("polite", 1.0)
    assert is_refused(shares_of_four, "polite")
    assert is_refused(shares_of_four, "greedy")
    assert not is_refused(shares_of_four, "third")


async def test_free_places_are_for_all(shares_of_four):
    """
    While a place is free, a tenant may have more than its share.
    """
    shares_of_four.begin("polite", 1.0)
    for _ in range(3):
        shares_of_four.begin("greedy", 1.0)
    assert is_refused(shares_of_four, "greedy")


async def test_last_places_are_left_to_a_tenant_with_few():
    """
    For a second after a call of a tenant with few, others that have their share leave an eighth of
    the places to it, also once the call has ended; it has them at once. A tenant alone has all.
    """
    now_s = 100.0
    shares = CallShares(16, lambda: now_s)
    for _ in range(14):
        shares.begin("greedy", 1.0)
    assert not is_refused(shares, "greedy")
    shares.begin("polite", 1.0)
    shares.end("polite")
    assert is_refused(shares, "greedy")
    for _ in range(2):
        shares.begin("polite", 1.0)
    for _ in range(2):
        shares.end("polite")
    now_s += GUARD_S
    for _ in range(2):
        shares.begin("greedy", 1.0)
    assert is_refused(shares, "greedy")


@pytest.mark.parametrize("num_places", [2, 4, 8, 15])
async def test_one_of_few_places_is_left_to_a_tenant_with_few(num_places):
    """
    Of fewer than sixteen places one is left, and a refusal says so; while all tenants have their
    share none is, and a refusal does not speak of it.
    """
    shares = CallShares(num_places, lambda: 100.0)
    for _ in range(num_places - 1):
        shares.begin("greedy", 1.0)
    assert not is_refused(shares, "greedy")
    shares.begin("greedy", 1.0)
    with pytest.raises(QueueFull, match=f"max_num_seqs is {num_places};"):
        shares.check("greedy", 1.0)
    shares.end("greedy")
    shares.begin("polite", 1.0)
    shares.end("polite")
    with pytest.raises(QueueFull, match="of which 1 are left to tenants with few"):
        shares.check("greedy", 1.0)


async def test_share_follows_the_weight(shares_of_four):
    """
    A tenant of three times the weight has three places of four.
    """
    for _ in range(4):
        shares_of_four.begin("light", 1.0)
    for _ in range(3):
        shares_of_four.begin("heavy", 3.0)
    assert is_refused(shares_of_four, "heavy", 3.0)


async def test_places_of_ended_calls_are_free(shares_of_four):
    """
    Calls that ended take no place, and their tenant no share.
    """
    for _ in range(2):
        for _ in range(4):
            shares_of_four.begin("greedy", 1.0)
        assert is_refused(shares_of_four, "greedy")
        for _ in range(4):
            shares_of_four.end("greedy")
    assert not is_refused(shares_of_four, "greedy")


def few(shares: CallShares, *tenants: str, weight: float = 1.0) -> list[bool]:
    return [shares.has_few(tenant, weight) for tenant in tenants]


async def test_tenant_has_few_below_half_of_its_share(shares_of_four):
    """
    Beside three calls of another tenant, one has few with none, and not with one; the other has
    not. One without calls has few where there are none at all.
    """
    assert [True] == few(shares_of_four, "polite")
    for _ in range(3):
        shares_of_four.begin("greedy", 1.0)
    assert 3 == shares_of_four.num_alike(takes_place=True)
    assert [True, False] == few(shares_of_four, "polite", "greedy")
    shares_of_four.begin("polite", 1.0)
    assert [False, False] == few(shares_of_four, "polite", "greedy")
    assert [True] == few(shares_of_four, "polite", weight=4.0)
    shares_of_four.end("polite")
    assert [True] == few(shares_of_four, "polite")


async def test_calls_without_a_place_count_among_themselves(shares_of_four):
    """
    Calls that take no place are never refused and refuse none. A tenant with many of them has not
    few of these, and yet few of the others; one with many of the others has few of these.
    """
    for _ in range(9):
        shares_of_four.begin("asking", 1.0, takes_place=False)
    shares_of_four.begin("polite", 1.0, takes_place=False)
    for _ in range(4):
        assert not is_refused(shares_of_four, "greedy")
        shares_of_four.begin("greedy", 1.0)
    assert is_refused(shares_of_four, "greedy")
    assert not is_refused(shares_of_four, "asking")
    assert (4, 10) == tuple(shares_of_four.num_alike(takes_place=takes) for takes in (True, False))
    has_few = shares_of_four.has_few
    assert (True, False) == tuple(has_few(one, 1.0) for one in ("asking", "greedy"))
    questions = [has_few(one, 1.0, takes_place=False) for one in ("asking", "greedy", "polite")]
    assert [False, True, True] == questions
    for _ in range(9):
        shares_of_four.end("asking", takes_place=False)
    assert has_few("asking", 1.0, takes_place=False)


async def test_many_refusals_take_one_line_of_the_log(shares_of_four, monkeypatch):
    """
    Refusals are counted, and logged together.
    """
    monkeypatch.setattr("scheduler_svc.frontend.identity.call_shares.LOG_INTERVAL_S", 0.0)
    for _ in range(4):
        shares_of_four.begin("greedy", 1.0)
    with capture_logs() as lines:
        assert [True] * 9 == [is_refused(shares_of_four, "greedy") for _ in range(9)]
        await until(lambda: lines)
    assert [9] == [line["num_calls"] for line in lines if line["event"] == "calls_refused"]


@pytest.fixture
def shares_of_four() -> CallShares:
    return CallShares(4, lambda: 0.0)


@pytest.fixture
async def crowded(tmp_path: Path, model_dir: Path) -> AsyncIterator[Frontend]:
    """Yield a frontend with two places, both taken by calls of one tenant."""
    security = FrontendSecurity(tokens_file=str(write_file(tmp_path)))
    async with running_frontend(tmp_path, security=security, max_num_seqs=2) as frontend:
        await serve(frontend, model(model_dir))
        calls = [generate(frontend, USER) for _ in range(2)]
        for _ in calls:
            await frontend.core.accept()
        frontend.calls = calls
        yield frontend
        for call in calls:
            call.cancel()


def request_bytes() -> bytes:
    return pb.GenerateRequest(text="ab").SerializeToString()


def generate(frontend: Frontend, token: str, raw: bytes | None = None):
    call = frontend.channel.unary_stream(f"{SERVICE}/Generate")
    return call(request_bytes() if raw is None else raw, metadata=bearer(token))


class TestCrowdedFrontend:
    @pytest.mark.parametrize("method", ["Generate", "Complete"])
    async def test_tenant_over_its_share_is_refused_unread(self, crowded, method):
        """
        A further call ends with a reason and a time to try again, though its bytes are no message:
        they are not decoded. The core hears nothing of it.
        """
        kind = "unary_stream" if method == "Generate" else "unary_unary"
        call = getattr(crowded.channel, kind)(f"{SERVICE}/{method}")(
            NO_MESSAGE, metadata=bearer(USER)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await within(call.read() if method == "Generate" else call)
        error = from_rpc_error(caught.value)
        assert isinstance(error, QueueFull)
        assert {"limit": "max_num_seqs", "value": "2"}.items() <= error.metadata.items()
        assert error.retry_after_s is not None
        assert error.retry_after_s > 0
        assert crowded.core.submits.empty()

    @pytest.mark.slow
    @pytest.mark.parametrize("token", [OTHER, GATEWAY])
    async def test_others_reach_the_core(self, crowded, token):
        """
        A tenant with less than its share is not refused, nor a gateway, whose tenants are known
        only from its requests.
        """
        call = generate(crowded, token)
        await crowded.core.accept()
        call.cancel()

    async def test_ended_call_makes_room(self, crowded):
        """
        The tenant gets a place back when one of its calls ends.
        """
        crowded.calls[0].cancel()
        await within(crowded.core.ends.get())
        call = generate(crowded, USER)
        await crowded.core.accept()
        call.cancel()
