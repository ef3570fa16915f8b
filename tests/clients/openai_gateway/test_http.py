"""Parts around generation: models, health, metrics, ids, keys, cross-origin calls, limits."""

from __future__ import annotations

import httpx
import pytest

from tests.clients.openai_gateway.serving import gateway
from tests.clients.python.fake_server import Act
from tests.waiting import wait_until

BODY = {"model": "fake", "prompt": "hi"}


class TestTokens:
    def test_ids_of_a_prompt_are_told(self, http, server):
        """
        /tokenize has the ids of a text, their number and the context, and their texts on demand.
        """
        found = http.post("/tokenize", json={"model": "fake", "prompt": "hi"}).json()
        assert {"count": 2, "max_model_len": 512, "tokens": [104, 105], "token_strs": None} == found
        asked = {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True}
        assert ["a"] == http.post("/tokenize", json=asked).json()["token_strs"]
        assert server.seen.tokenized[1].HasField("chat")

    def test_text_of_ids_is_told(self, http):
        """
        /detokenize has the text of ids.
        """
        answer = http.post("/detokenize", json={"model": "fake", "tokens": [104, 105]})
        assert {"prompt": "hi"} == answer.json()

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
            ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
            ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
            ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
            ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ],
    )
    def test_bad_question_is_refused(self, http, path, body, param):
        """
        A question that cannot be answered is an error in OpenAI's form with the field's name.
        """
        answer = http.post(path, json=body)
        assert (True, param) == (400 <= answer.status_code < 500, answer.json()["error"]["param"])


class TestPages:
    def test_models_lists_the_served_one(self, client):
        """
        /v1/models has one entry, with its name and limits.
        """
        (model,) = client.models.list().data
        assert ("fake", "model", 512) == (model.id, model.object, model.max_model_len)
        assert model == client.models.retrieve("fake")

    def test_unknown_model_has_no_page(self, http):
        """
        The page of a model that is not served is 404.
        """
        assert 404 == http.get("/v1/models/org/other").status_code

    def test_health_follows_the_scheduler(self, http, server):
        """
        /health is 200 while a scheduler serves requests, and 503 while none does.
        """
        for ready, status in ((True, 200), (False, 503), (True, 200)):
            server.set_health("tandem.ready", ready)
            wait_until(lambda status=status: status == http.get("/health").status_code, f"{status}")

    def test_metrics_count_requests_and_tokens(self, http):
        """
        /metrics counts requests by path and status, tokens, and schedulers that are ready.
        """
        http.post("/v1/completions", json=BODY)
        http.get("/made/up")
        counted = {
            'tandem_gateway_requests_total{path="/v1/completions",status="200"} 1.0',
            'tandem_gateway_requests_total{path="other",status="404"} 1.0',
            "tandem_gateway_output_tokens_total 32.0",
            "tandem_gateway_running_requests 1.0",
        }
        # A request is counted once its answer has been sent, so its client may be here before.
        wait_until(lambda: counted <= set(http.get("/metrics").text.splitlines()), "all counted")

    def test_openapi_describes_the_endpoints(self, http):
        """
        /openapi.json names the paths and the fields of their requests.
        """
        page = http.get("/openapi.json").json()
        assert "top_k" in page["components"]["schemas"]["ChatFields"]["properties"]
        assert {"/v1/completions", "/v1/chat/completions", "/v1/models"} <= page["paths"].keys()

    @pytest.mark.parametrize(("path", "status"), [("/none", 404), ("/v1/completions", 405)])
    def test_other_paths_have_openais_errors(self, http, path, status):
        """
        A path or method that is not served has an error of the same form as all others.
        """
        answer = http.get(path)
        assert status == answer.status_code
        assert "invalid_request_error" == answer.json()["error"]["type"]


class TestIdsAndKeys:
    def test_each_answer_names_the_request(self, http, server):
        """
        The header x-request-id is the id under which the scheduler knows the request.
        """
        answer = http.post("/v1/completions", json=BODY)
        assert server.seen.generate[0].request_id == answer.headers["x-request-id"]
        assert f"cmpl-{answer.headers['x-request-id']}" == answer.json()["id"]

    def test_clients_id_is_kept_as_a_beginning(self, http):
        """
        An id that the client or a proxy sent is the beginning of ours, which stays unique.
        """
        ids = {
            http.post("/v1/completions", json=BODY, headers={"x-request-id": "trace-7"}).headers[
                "x-request-id"
            ]
            for _ in range(2)
        }
        assert 2 == len(ids)
        assert all(one.startswith("trace-7-") for one in ids)

    @pytest.mark.parametrize("path", ["/v1/completions", "/none"])
    def test_failures_have_an_id_too(self, http, path):
        """
        Every failure can be named to those that read logs.
        """
        assert 32 == len(http.post(path, content=b"{").headers["x-request-id"])

    def test_key_and_trace_go_on_to_the_scheduler(self, http, server):
        """
        The headers Authorization and traceparent arrive as metadata of the call, others do not.
        """
        headers = {"authorization": "Bearer secret", "traceparent": "00-1-2-01", "cookie": "c"}
        http.post("/v1/completions", json=BODY, headers=headers)
        seen = server.seen.metadata[0]
        assert ("Bearer secret", "00-1-2-01") == (seen["authorization"], seen["traceparent"])
        assert "cookie" not in seen

    def test_header_that_is_no_text_is_refused(self, http):
        """
        A key that no metadata can carry is the request's fault.
        """
        headers = {"authorization": b"Bearer \xfc"}
        assert 400 == http.post("/v1/completions", json=BODY, headers=headers).status_code


class TestLimits:
    def test_large_body_is_413(self, server):
        """
        A body over the limit is refused.
        """
        with gateway(server.address, max_body_bytes=64) as url:
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 64}, trust_env=False)
        assert (413, "request_too_large") == (answer.status_code, answer.json()["error"]["code"])

    def test_progress_keeps_the_connection_alive(self, http, server):
        """
        Signs of life of a waiting request are comments, which clients of events skip.
        """
        server.play(Act(blocked_by="no executor"))
        text = http.post("/v1/completions", json=BODY | {"stream": True}).text
        assert ": queued position=0 blocked_by=no executor\n\n" in text
        assert text.endswith("data: [DONE]\n\n")


class TestCrossOrigin:
    def preflight(self, url):
        headers = {
            "Origin": "https://page.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        return httpx.options(f"{url}/v1/completions", headers=headers, trust_env=False)

    def test_pages_of_named_origins_may_call(self, server):
        """
        With the option a browser's question before the call is answered with yes.
        """
        with gateway(server.address, cors_origins=("https://page.example",)) as url:
            answer = self.preflight(url)
        assert 200 == answer.status_code
        assert "https://page.example" == answer.headers["access-control-allow-origin"]

    def test_no_page_may_call_by_default(self, url):
        """
        Without the option no origin is allowed.
        """
        assert "access-control-allow-origin" not in self.preflight(url).headers
