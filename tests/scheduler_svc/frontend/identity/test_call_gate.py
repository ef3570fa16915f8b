"""Calls that begin, and calls that wait, while tenants with many and tenants with few are served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.config.frontend_security import FrontendSecurity
from scheduler_svc.frontend.identity.call_gate import OpenGate, call_gate
from scheduler_svc.frontend.identity.call_shares import CallShares
from scheduler_svc.frontend.identity.credential_store import CredentialStore
from tandem.inference.v1 import inference_service_pb2 as pb
from tests.scheduler_svc.frontend.fake_core import (
    Clock,
    Frontend,
    model,
    running_frontend,
    serve,
    until,
)
from tests.scheduler_svc.frontend.identity.credentials import (
    GATEWAY,
    OTHER,
    USER,
    bearer,
    credentials,
    write_file,
)

PLACES = 16
"""max_num_seqs; a quarter of it is the window's first size."""
GENERATE = "/tandem.inference.v1.InferenceService/Generate"
TOKENIZE = "/tandem.inference.v1.InferenceService/Tokenize"
QUIET_S = 1000.0
"""Time without a tenant with few; longer than any test takes."""


class Call:
    """A call that has not begun, as far as a gate may read it."""

    def __init__(self, metadata: Any, peer: str = "ipv4:127.0.0.1:1", name: bytes = b"") -> None:
        self._metadata = metadata
        self._peer = peer
        self._name = name

    def invocation_metadata(self) -> Any:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_common_name": [self._name]} if self._name else {}


class TestCallers:
    @pytest.fixture
    def gate(self, tmp_path):
        named = {"name": "named", "certificate": "c.example", "tenant": "certified"}
        again = credentials()[0] | {"name": "again", "token_sha256": "0" * 64}
        del again["certificate"]
        clock = Clock()
        store = CredentialStore(write_file(tmp_path, [*credentials(), named, again]), clock)
        return call_gate(store, CallShares(PLACES, clock), PLACES, clock)

    def test_tenants_are_told_apart(self, gate):
        """
        Calls with one tenant's credentials are one caller's, whatever their connection.
        """
        user, other = (Call(bearer(token)) for token in (USER, OTHER))
        elsewhere = Call(bearer(USER), peer="ipv4:127.0.0.1:2")
        assert gate.caller_of(user) == gate.caller_of(elsewhere)
        assert gate.caller_of(user) != gate.caller_of(other)

    def test_certificate_names_a_tenant_as_a_token_does(self, gate):
        """
        A call without a token is its certificate's tenant's.
        """
        by_name, by_token = Call((), name=b"client.acme.example"), Call(bearer(USER))
        assert gate.caller_of(by_token) == gate.caller_of(by_name)
        assert gate.caller_of(by_token) != gate.caller_of(Call((), name=b"c.example"))

    def test_strangers_are_one_caller(self, gate):
        """
        Tokens that a stranger makes up, a header of another scheme, an unknown certificate and no
        credential at all get one turn between them.
        """
        strangers = [
            Call(bearer("made up")),
            Call(bearer("another")),
            Call((("authorization", "Basic x"),)),
            Call((), name=b"stranger.example"),
            Call(None),
        ]
        assert {None} == {gate.caller_of(stranger) for stranger in strangers}
        assert gate.may_begin(None, GENERATE)

    def test_connections_take_turns_where_no_credentials_are_asked_for(self):
        """
        At an open port a connection is a caller, and none is held back.
        """
        shares = CallShares(PLACES, Clock())
        gate = call_gate(None, shares, PLACES, Clock())
        assert isinstance(gate, OpenGate)
        first, second = (gate.caller_of(Call((), peer=f"ipv4:127.0.0.1:{n}")) for n in (1, 2))
        assert first != second
        assert gate.may_begin(first, GENERATE)


class TestQuestionsAboutTokens:
    @pytest.fixture
    def shares(self):
        """Yield the calls of a greedy tenant with long outputs on half of all places."""
        shares = CallShares(PLACES, Clock())
        for _ in range(PLACES // 2):
            shares.begin("acme", 1.0)
        return shares

    @pytest.fixture
    def gate(self, tmp_path, shares):
        """Yield a gate that has just let a tenant with few begin a call."""
        store = CredentialStore(write_file(tmp_path), Clock())
        gate = call_gate(store, shares, PLACES, Clock())
        assert gate.may_begin(gate.caller_of(Call(bearer(OTHER))), TOKENIZE)
        shares.begin("globex", 1.0, takes_place=False)
        return gate

    def test_they_do_not_wait_for_long_outputs(self, gate):
        """
        A tenant whose outputs take the whole window has its prompts tokenized, though it may not
        begin another output.
        """
        user = gate.caller_of(Call(bearer(USER)))
        assert (True, False) == (gate.may_begin(user, TOKENIZE), gate.may_begin(user, GENERATE))

    def test_flood_of_them_is_held_back(self, gate, shares):
        """
        A tenant with as many of them as the window has waits beside one with few.
        """
        for _ in range(PLACES // 4):
            shares.begin("acme", 1.0, takes_place=False)
        user, other = (gate.caller_of(Call(bearer(token))) for token in (USER, OTHER))
        assert (False, True) == (gate.may_begin(user, TOKENIZE), gate.may_begin(other, TOKENIZE))


class TestHoldingBack:
    @pytest.fixture
    async def frontend(
        self, tmp_path: Path, model_dir: Path, monkeypatch
    ) -> AsyncIterator[Frontend]:
        """Yield a frontend where one tenant has more calls than the window's first size."""
        monkeypatch.setattr("scheduler_svc.frontend.identity.call_window.GUARD_S", QUIET_S)
        security = FrontendSecurity(tokens_file=str(write_file(tmp_path)))
        async with running_frontend(tmp_path, security=security, max_num_seqs=PLACES) as frontend:
            await serve(frontend, model(model_dir))
            frontend.calls = []
            for _ in range(PLACES // 2):
                await self.begin(frontend, USER)
            yield frontend
            for call in frontend.calls:
                call.cancel()

    async def begin(self, frontend: Frontend, token: str) -> None:
        """Call, and return once the core has the request."""
        self.call(frontend, token)
        await frontend.core.accept()

    def call(self, frontend: Frontend, token: str) -> None:
        call = frontend.channel.unary_stream(GENERATE)
        request = pb.GenerateRequest(text="ab").SerializeToString()
        frontend.calls.append(call(request, metadata=bearer(token)))

    async def test_tenant_with_many_waits_while_one_with_few_calls(self, frontend):
        """
        Once a tenant with few has called, the next call of the one with many waits, without a
        refusal, while further ones of the first, and of a gateway, pass; it is served after a while
        without such calls.
        """
        await self.begin(frontend, OTHER)
        self.call(frontend, USER)
        waiting = frontend.calls[-1]
        await self.begin(frontend, OTHER)
        await self.begin(frontend, GATEWAY)
        assert frontend.core.submits.empty()
        assert not waiting.done()
        frontend.clock.lead_s += QUIET_S
        await frontend.core.accept()

    async def test_end_of_calls_lets_the_next_begin(self, frontend):
        """
        A call that waits is served as soon as fewer are than the window has.
        """
        await self.begin(frontend, OTHER)
        self.call(frontend, USER)
        for call in frontend.calls[: PLACES // 2]:
            call.cancel()
        await frontend.core.accept()

    async def test_tenants_with_many_do_not_wait_for_each_other(self, frontend):
        """
        Without a tenant with few, all places are used.
        """
        for _ in range(PLACES // 2):
            await self.begin(frontend, USER)
        await until(frontend.core.submits.empty)
