"""Bodies of requests: their sizes, the time they may take, and keys that are checked before them."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from tandem.errors import ERROR_BY_REASON, QueueFull
from tandem_openai_gateway.answering import requests_of
from tandem_openai_gateway.api.body import IN_THREAD_BYTES, Bodies
from tandem_openai_gateway.api.chat import MAX_MESSAGES, MAX_TOOLS
from tandem_openai_gateway.api.common import MAX_PROMPTS
from tandem_openai_gateway.api.completion import read_completion
from tandem_openai_gateway.api.held_bytes import HeldBytes
from tandem_openai_gateway.api.tokens import read_detokenize, read_tokenize
from tandem_openai_gateway.errors import ApiError
from tandem_openai_gateway.served_model import KEY_KNOWN_S, MAX_KEYS, KnownKeys, ServedModel
from tests.clients.openai_gateway.intake.sent import Sent, decoded, refusal
from tests.clients.openai_gateway.serving import gateway
from tests.clients.python.fake_server import PATIENCE_S, Act

BODY = {"model": "fake", "prompt": "hi"}
UNAUTHENTICATED = ERROR_BY_REASON["UNAUTHENTICATED"]
HI = [{"role": "user", "content": "hi"}]


async def answered_half_way(url: str, headers: str, part: bytes = b"") -> bytes:
    """Send the head of a request and a part of its body; return the head of the answer."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: a\r\n{headers}\r\n".encode() + part)
    try:
        return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    finally:
        writer.close()


class TestKeysBeforeBodies:
    def test_wrong_key_is_refused_before_the_body_arrives(self, url, server):
        """
        A request whose key is wrong is 401 while its body has not arrived.
        """
        server.seen.model_error = UNAUTHENTICATED("x")
        head = asyncio.run(answered_half_way(url, "content-length: 100\r\n"))
        assert head.startswith(b"HTTP/1.1 401 ")

    @pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
    def test_questions_about_tokens_ask_for_a_key_first(self, http, server, path):
        """
        A wrong key is refused before a body that is no JSON.
        """
        server.seen.model_error = UNAUTHENTICATED("x")
        assert 401 == http.post(path, content=b"{").status_code

    def test_key_that_was_let_in_is_known(self, http, server):
        """
        A key that a scheduler let in is not asked about with each request; another one is.
        """
        key, other = ({"authorization": f"Bearer {name}"} for name in ("key", "other"))
        assert 200 == http.post("/v1/completions", json=BODY, headers=key).status_code
        server.seen.model_error = UNAUTHENTICATED("x")
        assert 200 == http.post("/v1/completions", json=BODY, headers=key).status_code
        assert 401 == http.post("/v1/completions", json=BODY, headers=other).status_code
        assert 401 == http.post("/v1/completions", json=BODY).status_code

    @pytest.mark.parametrize(
        ("path", "body"),
        [("/v1/completions", BODY), ("/v1/completions", BODY | {"stream": True})],
    )
    def test_key_that_a_scheduler_refuses_is_forgotten_at_once(self, http, server, path, body):
        """
        After a scheduler has refused a request for its key, which was known, the next one is
        refused before its body is read; another key stays known.
        """
        key, other = ({"authorization": f"Bearer {name}"} for name in ("key", "other"))
        for one in (key, other):
            assert 200 == http.post(path, json=body, headers=one).status_code
        server.play(Act(accept=False, error=UNAUTHENTICATED("revoked")))
        assert 401 == http.post(path, json=body, headers=key).status_code
        server.seen.model_error = UNAUTHENTICATED("revoked")
        assert 401 == http.post(path, content=b"{", headers=key).status_code
        assert 400 == http.post(path, content=b"{", headers=other).status_code

    @pytest.mark.parametrize("is_streamed", [True, False])
    def test_key_that_is_refused_in_the_middle_is_forgotten(self, http, server, is_streamed):
        """
        A stream that ends since its key was revoked has the key forgotten, too.
        """
        key = {"authorization": "Bearer key"}
        server.play(Act(error=UNAUTHENTICATED("revoked")))
        body = BODY | {"stream": is_streamed}
        status = http.post("/v1/completions", json=body, headers=key).status_code
        assert (200 if is_streamed else 401) == status
        server.seen.model_error = UNAUTHENTICATED("revoked")
        assert 401 == http.post("/v1/completions", content=b"{", headers=key).status_code

    def test_known_keys_end(self):
        """
        A key is asked about again after a while, and the oldest gives way to more than are kept.
        """
        now_s = 0.0
        keys = KnownKeys(lambda: now_s)
        names = [(("authorization", f"Bearer {at}"),) for at in range(MAX_KEYS + 1)]
        for name in names[:-1]:
            keys.note(name)
        assert keys.knows(names[0])
        keys.note(names[-1])
        assert (False, True, True) == tuple(keys.knows(names[at]) for at in (0, 1, -1))
        now_s = KEY_KNOWN_S
        assert not keys.knows(names[-1])


class TestServedModel:
    def test_largest_message_is_asked_for_again_after_a_change_of_the_model(self):
        """
        A key that is known does not hide that the limit of the new model is not.
        """
        limits = iter([100, 200])

        class Schedulers:
            async def get_model(self, _metadata):
                return SimpleNamespace(revision="a", max_request_bytes=next(limits))

        async def largest() -> list[int | None]:
            served = ServedModel(Schedulers())
            await served.admit(())
            first = served.max_request_bytes
            served.note(SimpleNamespace(model_revision="b"))
            await served.admit(())
            return [first, served.max_request_bytes]

        assert [100, 200] == asyncio.run(largest())


class TestSizes:
    def test_length_over_the_limit_is_refused_at_once(self, server):
        """
        A body whose length is over the limit is 413 while none of it has arrived.
        """
        with gateway(server.address, max_body_bytes=64) as url:
            head = asyncio.run(answered_half_way(url, "content-length: 65\r\n"))
        assert head.startswith(b"HTTP/1.1 413 ")

    def test_body_without_a_length_is_bounded(self, server):
        """
        A body in chunks is 413 once more than the limit of it has arrived, whatever is to come.
        """
        chunk = b"41\r\n" + b" " * 65 + b"\r\n"
        with gateway(server.address, max_body_bytes=64) as url:
            head = asyncio.run(answered_half_way(url, "transfer-encoding: chunked\r\n", chunk))
        assert head.startswith(b"HTTP/1.1 413 ")

    def test_message_that_no_scheduler_takes_is_413(self):
        """
        Ids that are a short body and a message over the schedulers' limit are refused here.
        """
        asked = read_completion(b'{"prompt": [1, 2, 3]}')
        (request,) = requests_of(asked, "id", None)
        assert [request] == requests_of(asked, "id", request.ByteSize())
        with pytest.raises(ApiError) as refused:
            requests_of(asked, "id", request.ByteSize() - 1)
        assert (413, "request_too_large") == (refused.value.status, refused.value.body.error.code)

    @pytest.mark.parametrize(
        ("read", "body"),
        [
            (read_tokenize, b'{"prompt": "' + b"a" * 200 + b'"}'),
            (read_tokenize, b'{"messages": [{"role": "user", "content": "' + b"a" * 200 + b'"}]}'),
            (read_detokenize, b'{"tokens": [' + b"1," * 50 + b"1]}"),
        ],
        ids=["text", "conversation", "ids"],
    )
    def test_question_that_no_scheduler_takes_is_413(self, read, body):
        """
        A question about tokens is built where its body is decoded, unless its message is over the
        schedulers' limit.
        """
        size = read(body, None).request.ByteSize()
        assert size == read(body, size).request.ByteSize()
        with pytest.raises(ApiError) as refused:
            read(body, size - 1)
        assert (413, "request_too_large") == (refused.value.status, refused.value.body.error.code)

    @pytest.mark.parametrize("body", [b'{"prompt": "' + b"a" * 200 + b'"}'])
    def test_prompt_over_the_limit_is_refused_before_its_message_is_built(self, body, monkeypatch):
        """
        Where the prompt alone is over the limit no message is made of it.
        """
        monkeypatch.setattr("tandem_openai_gateway.api.tokens.tokenize_request", None)
        with pytest.raises(ApiError) as refused:
            read_tokenize(body, 100)
        assert 413 == refused.value.status

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/tokenize", {"prompt": "a" * 100_000}),
            ("/detokenize", {"tokens": [1] * 30_000}),
            ("/v1/completions", {"prompt": "a" * 100_000}),
        ],
    )
    def test_large_message_is_413_on_every_path(self, http, server, path, body):
        """
        A body that is allowed, whose message is not, is 413 and reaches no scheduler.
        """
        server.seen.max_request_bytes = 90_000
        answer = http.post(path, json=body)
        assert (413, "request_too_large") == (answer.status_code, answer.json()["error"]["code"])
        assert not server.seen.generate + server.seen.tokenized

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/v1/chat/completions", {"messages": HI * (MAX_MESSAGES + 1)}, "messages"),
            ("/tokenize", {"messages": HI * (MAX_MESSAGES + 1)}, "messages"),
            ("/v1/responses", {"input": HI * (MAX_MESSAGES + 1)}, "input"),
            ("/v1/chat/completions", {"messages": HI, "tools": [{}] * (MAX_TOOLS + 1)}, "tools"),
            ("/v1/completions", {"prompt": [[1]] * (MAX_PROMPTS + 1)}, "prompt"),
        ],
    )
    def test_long_list_is_refused_before_it_is_built(self, http, server, path, body, param):
        """
        A list beyond the scheduler's limits is 400 with its name, and no scheduler sees it.
        """
        answer = http.post(path, json=body)
        assert (400, param) == (answer.status_code, answer.json()["error"]["param"])
        assert not server.seen.generate + server.seen.tokenized

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
            ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
            ({"tools": [{}, None]}, "tools[1]"),
            ({"tools": ["a"]}, "tools[0]"),
        ],
    )
    def test_what_goes_on_as_json_is_an_object(self, http, body, param):
        """
        Tools and arguments of the template that are no objects are refused with their path.
        """
        answer = http.post("/v1/chat/completions", json={"messages": HI, **body})
        assert (400, param) == (answer.status_code, answer.json()["error"]["param"])

    def test_null_and_none_of_them_is_nothing(self, http, server):
        """
        Tools and arguments of the template that are null are as if left out.
        """
        body = {"messages": HI, "tools": None, "chat_template_kwargs": None}
        assert 200 == http.post("/v1/chat/completions", json=body).status_code
        (request,) = server.seen.generate
        assert not request.chat.tools
        assert not request.chat.HasField("template_args_json")

    @pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
    def test_text_has_no_tools(self, http, name):
        """
        Fields that only conversations have are refused beside a text, as they would be left out.
        """
        value = [{}] if name == "tools" else {"a": 1}
        answer = http.post("/tokenize", json={"prompt": "a", name: value})
        assert (400, name) == (answer.status_code, answer.json()["error"]["param"])


class TestTime:
    async def test_body_that_does_not_end_is_408(self):
        """
        A body that has not arrived in time is refused, its connection is to end, and its bytes are
        no longer counted.
        """
        bodies, sent = Bodies(100, held=HeldBytes(120), limit_s=0.01), Sent()
        sent.send(b" " * 50)
        error = await refusal(decoded(bodies, sent))
        assert (408, "close") == (error.status, error.headers["Connection"])
        sent.send(b" " * 60, more=False)
        assert b" " * 60 == await decoded(bodies, sent)


class TestThread:
    async def test_large_body_leaves_the_event_loop_free(self):
        """
        The event loop goes on while a large body is decoded, and the next one waits its turn.
        """
        bodies, goes_on, began = Bodies(1 << 20), threading.Event(), []
        loop, has_begun = asyncio.get_running_loop(), asyncio.Event()

        def decode(body: bytes) -> int:
            began.append(body[:1])
            loop.call_soon_threadsafe(has_begun.set)
            assert goes_on.wait(PATIENCE_S)
            return len(body)

        readings = []
        for letter in (b"a", b"b"):
            sent = Sent()
            sent.send(letter * IN_THREAD_BYTES, more=False)
            readings.append(asyncio.create_task(decoded(bodies, sent, decode)))
        await has_begun.wait()
        assert [b"a"] == began
        goes_on.set()
        assert [IN_THREAD_BYTES] * 2 == await asyncio.gather(*readings)
        bodies.close()


class TestHeaders:
    @pytest.mark.parametrize(("name", "size"), [("authorization", 20_000), ("tracestate", 8_192)])
    def test_large_header_is_431(self, http, server, name, size):
        """
        A key or a trace that no metadata can carry is refused with its name, not as overload.
        """
        answer = http.post("/v1/completions", json=BODY, headers={name: "a" * size})
        assert (431, name) == (answer.status_code, answer.json()["error"]["param"])
        assert "retry-after" not in answer.headers
        assert not server.seen.generate

    def test_large_key_that_fits_is_passed_on(self, http, server):
        """
        A long key that a scheduler takes arrives there whole.
        """
        headers = {"authorization": "a" * 7_000}
        assert 200 == http.post("/v1/completions", json=BODY, headers=headers).status_code
        assert headers["authorization"] == server.seen.metadata[0]["authorization"]


class TestListsOfPrompts:
    @pytest.mark.parametrize(("num_prompts", "status"), [(3, 400), (2, 429)])
    def test_list_over_a_limit_of_requests_never_fits(self, http, server, num_prompts, status):
        """
        More prompts than may be in the system at once are 400, as they never fit; fewer that find
        it full are 429.
        """
        full = QueueFull("full", metadata={"limit": "max_tenant_requests", "value": "2"})
        server.play(Act(accept=False, error=full))
        answer = http.post("/v1/completions", json=BODY | {"prompt": ["a"] * num_prompts})
        code = {400: "never_fits", 429: "rate_limit_exceeded"}[status]
        assert (status, code) == (answer.status_code, answer.json()["error"]["code"])
