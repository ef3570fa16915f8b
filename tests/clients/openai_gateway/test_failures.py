"""Failures as OpenAI's client sees them; streams that break; clients that leave."""

from __future__ import annotations

import httpx
import openai
import pytest

from tandem.errors import (
    ERROR_BY_REASON,
    ChatTemplateError,
    Draining,
    DuplicateRequestId,
    InternalError,
    InvalidParameter,
    ModelChanged,
    NoExecutor,
    QueueFull,
    TotalTooLong,
)
from tests.clients.openai_gateway.serving import gateway
from tests.clients.python.fake_server import ANSWER, PATIENCE_S, Act, fake_server
from tests.ports import free_port
from tests.waiting import wait_until

BODY = {"model": "fake", "prompt": "hi"}


def _wait_ready(url, addresses):
    def ready():
        states = httpx.get(f"{url}/health", trust_env=False).json()["schedulers"]
        return addresses == [address for address, is_ready in states.items() if is_ready]

    wait_until(ready, "the schedulers' health")


def refusal(error):
    return Act(accept=False, error=error)


class TestRefusals:
    @pytest.mark.parametrize(
        ("error", "status", "body"),
        [
            (InvalidParameter("x", field="sampling.top_p"), 400, ("invalid_request_error", "invalid_parameter", "top_p")),
            (TotalTooLong("x", field="stopping.max_tokens"), 400, ("invalid_request_error", "context_length_exceeded", "max_tokens")),
            (ChatTemplateError("x", field="chat.messages[0].role"), 400, ("invalid_request_error", "chat_template", "messages[0].role")),
            (DuplicateRequestId("x"), 409, ("invalid_request_error", "duplicate_request_id", None)),
            (ERROR_BY_REASON["UNAUTHENTICATED"]("x"), 401, ("authentication_error", "invalid_api_key", None)),
            (ERROR_BY_REASON["PERMISSION_DENIED"]("x"), 403, ("permission_error", "permission_denied", None)),
            (QueueFull("x"), 429, ("rate_limit_error", "rate_limit_exceeded", None)),
            (NoExecutor("x"), 503, ("service_unavailable_error", "no_executor", None)),
            (ModelChanged("x"), 500, ("server_error", "model_changed", None)),
            (InternalError("x"), 500, ("server_error", "internal", None)),
        ],
        ids=lambda one: getattr(one, "reason", None),
    )  # fmt: skip
    def test_error_has_openais_form(self, http, server, error, status, body):
        """
        Each error of the scheduler becomes a status and a body with message, type, param and code.
        """
        server.play(refusal(error))
        answer = http.post("/v1/completions", json=BODY)
        found = answer.json()["error"]
        assert status == answer.status_code
        assert ("x", *body) == tuple(found[name] for name in ("message", "type", "code", "param"))

    @pytest.mark.parametrize(
        ("error", "seconds", "milliseconds"),
        [(QueueFull("x", retry_after_s=2.5), "3", "2500"), (Draining("x"), "1", "1000")],
    )
    def test_busy_scheduler_says_when_to_come_again(
        self, http, server, error, seconds, milliseconds
    ):
        """
        429 and 503 have Retry-After in whole seconds, rounded up, and the exact time beside it.
        """
        server.play(refusal(error))
        answer = http.post("/v1/completions", json=BODY)
        assert (seconds, milliseconds) == (
            answer.headers["retry-after"],
            answer.headers["retry-after-ms"],
        )

    def test_openais_client_comes_again_by_itself(self, url, server):
        """
        A client that retries is served once there is room.
        """
        full = refusal(QueueFull("full", retry_after_s=0.001))
        server.play(full, full, Act())
        with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=2) as client:
            assert ANSWER == client.completions.create(**BODY).choices[0].text
        assert 3 == len(server.seen.generate)

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
    def test_refusal_of_a_stream_is_a_status(self, http, server, stream):
        """
        A request that is refused has its status also if it wants a stream: none has begun yet.
        """
        server.play(refusal(QueueFull("full")))
        assert 429 == http.post("/v1/completions", json=BODY | {"stream": stream}).status_code

    def test_nothing_listens(self):
        """
        Without a scheduler a request is 503, and so is the health.
        """
        with gateway(f"127.0.0.1:{free_port()}") as url:
            answer = httpx.post(f"{url}/v1/completions", json=BODY, trust_env=False)
            assert (503, "peer_unavailable") == (answer.status_code, answer.json()["error"]["code"])
            assert 503 == httpx.get(f"{url}/health", trust_env=False).status_code

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            (b"{", None),
            (b"[]", None),
            (b"\xff", None),
            (b"{}", "prompt"),
            (b'{"prompt": "a", "n": "two"}', "n"),
            (b'{"prompt": "a", "stream_options": {"include_usage": 3}}', "stream_options.include_usage"),
            (b'{"prompt": "a", "n": -1}', "n"),
            (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
        ],
    )  # fmt: skip
    def test_malformed_body_is_400(self, http, body, param):
        """
        A body that is no request is refused with the path of what is wrong.
        """
        answer = http.post("/v1/completions", content=body)
        assert (400, param) == (answer.status_code, answer.json()["error"]["param"])

    def test_deep_nesting_is_400(self, http):
        """
        A body that is nested beyond reason does no harm.
        """
        body = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        assert 400 == http.post("/v1/completions", content=body).status_code

    def test_unknown_model_is_404(self, client):
        """
        A request that names another model is refused, with the name of the one that is served.
        """
        with pytest.raises(openai.NotFoundError, match="'fake'") as refused:
            client.completions.create(model="other", prompt="hi")
        assert ("model", "model_not_found") == (refused.value.param, refused.value.code)

    @pytest.mark.slow
    def test_client_that_waits_no_longer_gives_up(self, url, server):
        """
        A client's time-out ends its request at the scheduler.
        """
        server.play(Act(num_tokens=2, hang=True))
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=0.5) as client,
            pytest.raises(openai.APITimeoutError),
        ):
            client.completions.create(**BODY)
        assert server.seen.cancelled.wait(PATIENCE_S)


class TestBrokenStreams:
    @pytest.mark.slow
    def test_goes_on_after_what_was_delivered(self, client, server):
        """
        A stream that the scheduler breaks off goes on without a lost or repeated character.
        """
        server.play(Act(num_tokens=7, error=Draining("bye")), Act(piece_lens=(5, 2)))
        chunks = client.completions.create(**BODY, stream=True)
        assert ANSWER == "".join(one.choices[0].text for one in chunks)
        assert 2 == len(server.seen.generate)

    @pytest.mark.slow
    def test_goes_on_at_another_scheduler(self):
        """
        A stream whose scheduler breaks off is resumed by the other one, with its seed and ids.
        """
        with (
            fake_server() as one,
            fake_server() as other,
            gateway(one.address, other.address) as url,
        ):
            for server in (one, other):
                server.play(Act(num_tokens=7, error=Draining("bye")), Act())
            with openai.OpenAI(base_url=f"{url}/v1", api_key="key") as client:
                chunks = client.completions.create(**BODY, stream=True)
                assert ANSWER == "".join(chunk.choices[0].text for chunk in chunks)
            # Each breaks off once: the one that has the second call has the first call's ids.
            sent = [*one.seen.generate, *other.seen.generate]
            assert {1, 2} == {len(one.seen.generate), len(other.seen.generate)}
            assert [0, 1, 1] == sorted(len(request.resume.choices) for request in sent)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["tandem.ready", "tandem.progress"])
    def test_leaves_a_scheduler_that_stands_still(self, name):
        """
        A stream goes on elsewhere when its scheduler says that it serves no requests, or that they
        make no progress, and sends nothing, though the connection stays.
        """
        with (
            fake_server() as one,
            fake_server() as other,
            gateway(one.address, other.address) as url,
        ):
            other.set_health("tandem.ready", False)
            _wait_ready(url, [one.address])
            one.play(Act(num_tokens=7, hang=True))
            with openai.OpenAI(base_url=f"{url}/v1", api_key="key") as client:
                chunks = client.completions.create(**BODY, stream=True)
                assert one.seen.hanging.wait(PATIENCE_S)
                other.set_health("tandem.ready", True)
                one.set_health(name, False)
                assert ANSWER == "".join(chunk.choices[0].text for chunk in chunks)
            assert 1 == len(one.seen.generate) == len(other.seen.generate)

    def test_unavailable_scheduler_is_passed_over(self):
        """
        A request that finds one scheduler full of trouble is answered by the other, at once.
        """
        with fake_server() as one, gateway(f"127.0.0.1:{free_port()}", one.address) as url:
            for _ in range(6):
                answer = httpx.post(f"{url}/v1/completions", json=BODY, trust_env=False)
                assert ANSWER == answer.json()["choices"][0]["text"]

    def test_schedulers_take_turns(self):
        """
        Requests are spread over all schedulers.
        """
        with (
            fake_server() as one,
            fake_server() as other,
            gateway(one.address, other.address) as url,
        ):
            wait_until(
                lambda: all(
                    httpx.get(f"{url}/health", trust_env=False).json()["schedulers"].values()
                ),
                "both to be ready",
            )
            for _ in range(6):
                httpx.post(f"{url}/v1/completions", json=BODY, trust_env=False)
            assert 3 == len(one.seen.generate) == len(other.seen.generate)

    def test_failure_after_the_start_is_the_last_event(self, client, server):
        """
        A stream that fails for good ends with the error, which OpenAI's client raises.
        """
        server.play(Act(num_tokens=4, error=InternalError("broken")))
        chunks = client.completions.create(**BODY, stream=True)
        text = []
        with pytest.raises(openai.APIError, match="broken"):
            text += [one.choices[0].text for one in chunks]
        assert not text or ANSWER.startswith("".join(text))


class TestClientsThatLeave:
    def test_request_ends_at_the_scheduler(self, url, server):
        """
        A client that closes its connection in the middle of a stream cancels the request.
        """
        server.play(Act(num_tokens=3, hang=True))
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=BODY | {"stream": True}, trust_env=False
        ) as answer:
            lines = answer.iter_lines()  # dropping it would close the connection
            next(lines)
            assert server.seen.hanging.wait(PATIENCE_S)
            assert not server.seen.cancelled.is_set()
        assert server.seen.cancelled.wait(PATIENCE_S)
