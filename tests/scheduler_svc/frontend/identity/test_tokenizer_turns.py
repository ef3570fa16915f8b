"""Tenants' turns on the threads for text: conversations, and questions about tokens."""

from __future__ import annotations

import threading

import pytest

from scheduler_svc.frontend.request.chat import read_chat
from scheduler_svc.frontend.text.tokenizer_threads import TokenizerThreads
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import tokens_pb2
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.scheduler_svc.frontend.fake_core import (
    within,
)
from tests.scheduler_svc.frontend.identity.credentials import (
    GATEWAY,
    OTHER,
    USER,
    bearer,
)

CHAT = {"messages": [{"role": "user", "content": "x"}], "template_args_json": "{}"}


@pytest.fixture
def turns(monkeypatch) -> list[str]:
    """Return the list that gets the tenant of each work that is handed to the threads."""
    tenants: list[str] = []
    run = TokenizerThreads.run

    async def noted(threads, work, *, tenant=""):
        tenants.append(tenant)
        return await run(threads, work, tenant=tenant)

    monkeypatch.setattr(TokenizerThreads, "run", noted)
    return tenants


async def test_questions_about_tokens_take_the_turns_of_their_tenants(secured, turns, monkeypatch):
    """
    Tokenize and Detokenize wait among the work of their callers' tenants, a gateway's for its own.
    """
    monkeypatch.setattr("scheduler_svc.frontend.request.tokens.INLINE_TOKENS", 0)
    monkeypatch.setattr("scheduler_svc.frontend.request.tokens.INLINE_TEXTS", 0)
    stub = InferenceServiceStub(secured.channel)
    question = tokens_pb2.TokenizeRequest(chat=CHAT, with_texts=True)
    ids = tokens_pb2.DetokenizeRequest(token_ids=[5, 6])
    for token in (USER, OTHER, GATEWAY):
        await within(stub.Tokenize(question, metadata=bearer(token)))
        await within(stub.Detokenize(ids, metadata=bearer(token)))
    assert ["acme"] * 3 + ["globex"] * 3 + [""] * 3 == turns


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_conversation_is_read_on_a_thread(secured, turns, monkeypatch, method):
    """
    The event loop parses no JSON: a conversation is read where it is rendered, in the turn of the
    caller's tenant.
    """
    readers: list[str] = []

    def noted(chat):
        readers.append(threading.current_thread().name)
        return read_chat(chat)

    monkeypatch.setattr("scheduler_svc.frontend.request.prompt.read_chat", noted)
    stub = InferenceServiceStub(secured.channel)
    if method == "Tokenize":
        question = tokens_pb2.TokenizeRequest(chat=CHAT)
        await within(stub.Tokenize(question, metadata=bearer(USER)))
    else:
        call = stub.Generate(pb.GenerateRequest(chat=CHAT), metadata=bearer(USER))
        await secured.core.accept()
        call.cancel()
    assert ["tokenizer"] == [name.partition("_")[0] for name in readers]
    assert ["acme"] == turns


async def test_questions_about_tokens_count_while_they_are_answered(secured, monkeypatch):
    """
    A Tokenize is one of its tenant's calls until it ends, and takes no place in the core.
    """
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        "scheduler_svc.frontend.identity.call_shares.CallShares.begin",
        lambda _shares, tenant, _weight, *, takes_place: seen.append((tenant, takes_place)),
    )
    monkeypatch.setattr(
        "scheduler_svc.frontend.identity.call_shares.CallShares.end", lambda *_, **__: None
    )
    stub = InferenceServiceStub(secured.channel)
    await within(stub.Tokenize(tokens_pb2.TokenizeRequest(text="a"), metadata=bearer(USER)))
    await within(stub.Detokenize(tokens_pb2.DetokenizeRequest(), metadata=bearer(OTHER)))
    assert [("acme", False), ("globex", False)] == seen
