"""Questions that run no request: models, tokens, and requests to end; for threads and asyncio."""

from __future__ import annotations

import pytest

from tandem.errors import ModelNotFound, RequestNotFound
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import model_pb2, tokens_pb2
from tandem_client import NO_RETRY, AsyncClient, Client, ModelCapabilities, PromptTokens


@pytest.fixture
def client(server):
    with Client(server.address, retry=NO_RETRY) as connected:
        yield connected


class TestModels:
    def test_all_pages_are_listed(self, client):
        """
        `models` returns the models of every page, in order.
        """
        assert ["fake", "fake-adapter"] == [model.name for model in client.models()]

    def test_model_has_limits_capabilities_and_defaults(self, client):
        """
        A model tells what can be asked for, its sizes, and the parameters of a bare request.
        """
        (model, _) = client.models()

        assert ModelCapabilities(text=True, chat=True, logprobs=True) == model.capabilities
        assert (1 << 24, 1 << 21) == (model.max_request_bytes, model.max_complete_bytes)
        params = model.default_params
        assert (1.0, pytest.approx(0.9), 100, 1, None) == (
            params.temperature,
            params.top_p,
            params.max_tokens,
            params.n,
            params.logprobs,
        )

    def test_capabilities_are_the_contracts(self):
        """
        Each capability of the contract is known here by its name.
        """
        names = model_pb2.ModelCapabilities.DESCRIPTOR.fields_by_name
        assert set(names) == set(ModelCapabilities.__slots__)

    def test_name_that_is_not_served_is_not_found(self, client):
        """
        `get_model` asks for a model by name; another one raises ModelNotFound.
        """
        assert client.get_model() == client.get_model("fake")
        with pytest.raises(ModelNotFound):
            client.get_model("other")


class TestTokens:
    def test_tokens_of_a_text_and_of_a_conversation(self, client, server):
        """
        `tokenize` returns ids, their texts if asked for, and the length of the context.
        """
        messages = [{"role": "user", "content": "yo"}]
        plain = PromptTokens(token_ids=(104, 105), texts=(), max_model_len=512)
        assert plain == client.tokenize("hi")
        told = client.tokenize(messages=messages, with_texts=True, add_generation_prompt=False)
        assert ((121, 111), ("y", "o")) == (told.token_ids, told.texts)
        assert server.seen.tokenized[1].chat.HasField("add_generation_prompt")

    def test_text_of_ids(self, client, server):
        """
        `detokenize` returns the text, and asks for special tokens only when it is told to.
        """
        assert "hi" == client.detokenize([104, 105])
        client.detokenize((104,), keep_special_tokens=True, model="fake")
        bare, full = server.seen.detokenized
        assert tokens_pb2.DetokenizeRequest(token_ids=[104, 105]) == bare
        assert (True, "fake") == (full.keep_special_tokens, full.model)


class TestAbort:
    def test_tenant_is_sent_if_it_is_given(self, client, server):
        """
        A tenant reaches the server, the empty one too; without one the credential's counts.
        """
        for tenant in (None, "", "alice"):
            client.abort("live", tenant=tenant)
        wanted = [
            inference.AbortRequest(request_id="live", tenant=tenant)
            for tenant in (None, "", "alice")
        ]
        assert wanted == server.seen.aborted


class TestAsyncio:
    async def test_questions_have_the_same_answers(self, server, client):
        """
        `AsyncClient` asks the same and returns the same values.
        """
        async with AsyncClient(server.address, retry=NO_RETRY) as in_loop:
            assert client.models() == await in_loop.models()
            assert client.get_model("fake") == await in_loop.get_model("fake")
            assert client.tokenize("hi", with_texts=True) == await in_loop.tokenize(
                "hi", with_texts=True
            )
            assert client.detokenize([104]) == await in_loop.detokenize([104])
            await in_loop.abort("live", tenant="alice")
            with pytest.raises(RequestNotFound):
                await in_loop.abort("gone")
            with pytest.raises(ModelNotFound):
                await in_loop.get_model("other")
        first, second = server.seen.tokenized
        assert first == second
        assert ["alice", ""] == [one.tenant for one in server.seen.aborted]
