"""Logs of real services at their most talkative, after requests that end in every way."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from tandem.errors import ChatTemplateError, TandemError
from tandem_client import Delta, Done, Started
from tests.e2e.cluster import Cluster, Process
from tests.waiting import wait_until

MARKER = "Quetzalcoatlus northropi 7731"
"""Text that stands in each request, and nowhere else."""

TEMPLATE = (
    "{% if messages[0].role == 'refused' %}"
    "{{ raise_exception('cannot say ' + messages[0].content) }}{% endif %}"
    "{{ messages[0].content }}"
)
"""Chat template whose error quotes the conversation."""

GENERATE = "/tandem.inference.v1.InferenceService/Generate"
AS_TEXT, UNKNOWN_FIELD = b"\x1a", b"\xf2\x3f"
"""Tags of GenerateRequest.text and of a field 1022, which no version has; a length follows."""

LONG = {"max_tokens": 200, "ignore_eos": True, "seed": 1}
NUM_STEPS = 10
EVENTS = {
    "scheduler": (
        *("request_accepted", "request_ended_by_frontend", "call_failed", "INVALID_PARAMETER"),
        *("CHAT_TEMPLATE", "PROMPT_TOO_LONG", "FEATURE_UNSUPPORTED", "executor_stream_broken"),
    ),
    "gateway": ("client_left", "/v1/chat/completions", "stream_broke"),
    "executor": ("session_opened", "stream_attached"),
}
"""Events and reasons that each log must show, so that its silence means something."""


class Talkative(Cluster):
    """A cluster and a gateway that log all that they can."""

    def __init__(self, model: Path, folder: Path) -> None:
        debug = ["--log-level=debug"]
        super().__init__(model, folder, ["--max-num-blocks=64", *debug], debug)
        self.start_executor()
        listen = ["--listen=127.0.0.1:0", f"--scheduler={self.address}"]
        self.gateway = Process("tandem_openai_gateway", [*listen, *debug], folder, "gateway")
        self.url = f"http://{self.gateway.addresses()['address']}"
        wait_until(self.gateway_is_ready, "the gateway")

    def gateway_is_ready(self) -> bool:
        with httpx.Client(base_url=self.url, trust_env=False) as http:
            return 200 == http.get("/health").status_code

    def stop(self) -> None:
        """Stop all services and wait until each has written its last line."""
        assert self.executor is not None
        for service in (self.gateway, self.scheduler, self.executor):
            service.process.terminate()
            service.process.wait(60)

    def close(self) -> None:
        """Kill all services."""
        super().close()
        self.gateway.end()


def succeed(system: Talkative, http: httpx.Client) -> list[int]:
    """Have a text and a conversation completed; return the ids of the text."""
    with system.client() as client:
        client.complete(MARKER, max_tokens=4, stop=[MARKER], cache_salt=MARKER, logprobs=2)
        ids = list(client.tokenize(MARKER).token_ids)
        client.detokenize(ids)
    chat = {"messages": [{"role": "user", "content": MARKER}], "max_tokens": 4, "stop": MARKER}
    for is_streamed in (False, True):
        answer = http.post("/v1/chat/completions", json={**chat, "stream": is_streamed})
        assert 200 == answer.status_code
    return ids


def be_refused(system: Talkative, http: httpx.Client) -> None:
    """Send a value out of range, too much text, no UTF-8, an unknown field and half a JSON."""
    with system.client() as client:
        for options in ({"temperature": 9.0}, {"stop": [MARKER] * 17}):
            with pytest.raises(TandemError):
                client.complete(MARKER, **options)
        with pytest.raises(TandemError):
            client.complete(MARKER * 1000)
    text = MARKER.encode()
    size = bytes([len(text) + 1])
    with grpc.insecure_channel(system.address) as channel:
        for raw in (AS_TEXT + size + text + b"\xff", UNKNOWN_FIELD + size + text + b"."):
            with pytest.raises(grpc.RpcError):
                next(channel.unary_stream(GENERATE)(raw))
    assert 400 == http.post("/v1/completions", content=f'{{"prompt": "{MARKER}').status_code
    body = {"prompt": MARKER, "temperature": 9}
    assert 400 == http.post("/v1/completions", json=body).status_code


def fail_in_the_template(system: Talkative, http: httpx.Client) -> None:
    """Send conversations that the template refuses, in words that quote them."""
    messages = [{"role": "refused", "content": MARKER}]
    with system.client() as client, pytest.raises(ChatTemplateError, match=MARKER):
        client.complete(messages=messages)
    for is_streamed in (False, True):
        body = {"messages": messages, "stream": is_streamed}
        answer = http.post("/v1/chat/completions", json=body)
        assert 400 == answer.status_code
        assert MARKER in answer.text


def leave(system: Talkative, http: httpx.Client) -> None:
    """Leave two streams that have begun, one at each door."""
    body = {"prompt": MARKER, "stream": True, **LONG}
    with system.held(), system.client() as client:
        stream = client.generate(MARKER, **LONG)
        assert isinstance(next(stream), Started)
        stream.close()
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert 200 == answer.status_code
        log = system.scheduler.log
        wait_until(lambda: 2 == log.read_text().count("request_ended_by_frontend"), "both ends")


def lose_the_executor(system: Talkative, _http: httpx.Client) -> None:
    """Kill the executor under a stream, which goes on at the next one."""
    with system.client() as client:
        with system.held(NUM_STEPS):
            stream = client.generate(MARKER, **LONG)
            next(event for event in stream if isinstance(event, Delta))
            assert system.executor is not None
            system.executor.kill()
        system.start_executor(ready=False)
        assert isinstance(list(stream)[-1], Done)


def lose_the_scheduler(system: Talkative, http: httpx.Client) -> None:
    """Kill the scheduler under two streams: the gateway's goes on, the other one fails."""
    body = {"prompt": MARKER, "stream": True, **LONG}
    with contextlib.ExitStack() as answers, system.client() as client:
        with system.held():
            answer = answers.enter_context(http.stream("POST", "/v1/completions", json=body))
            stream = client.generate(MARKER, **LONG)
            assert isinstance(next(stream), Started)
            system.scheduler.end()
            with pytest.raises(TandemError):
                list(stream)
        system.start_scheduler()
        assert "[DONE]" in answer.read().decode()


LOSSES = (lose_the_executor, lose_the_scheduler)


@pytest.fixture(scope="module")
def told(tiny_model, tmp_path_factory) -> Iterator[tuple[dict[str, str], list[int]]]:
    """Yield the log of each kind of service once all is over, and the ids of the marker."""
    folder = tmp_path_factory.mktemp("talkative")
    model = shutil.copytree(tiny_model, folder / "model")
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    system = Talkative(model, folder)
    with (
        contextlib.closing(system),
        httpx.Client(base_url=system.url, trust_env=False, timeout=120) as http,
    ):
        ids = succeed(system, http)
        for part in (be_refused, fail_in_the_template, leave, *LOSSES):
            part(system, http)
        system.stop()
        logs = dict.fromkeys(EVENTS, "")
        for path in sorted(folder.glob("*.log")):
            logs[path.stem.rpartition("-")[2]] += path.read_text()
        yield logs, ids


@pytest.mark.slow
@pytest.mark.parametrize("service", EVENTS)
class TestPromptsInLogs:
    def test_log_tells_of_the_requests(self, told, service):
        """
        The log of each service has the lines about these requests that it has at level debug.
        """
        logs, _ = told
        assert [] == [event for event in EVENTS[service] if event not in logs[service]]

    def test_log_has_no_text_of_a_request(self, told, service):
        """
        No line of a log quotes a prompt, a stop string or a salt, as text or as ids, whether the
        request succeeded, was refused, failed in the template, or lost its client or its server.
        """
        logs, ids = told
        quoted = (MARKER, MARKER.split(maxsplit=1)[0], str(ids)[1:-1], MARKER.encode().hex())
        lines = logs[service].splitlines()
        assert [] == [line for line in lines if any(text in line for text in quoted)]
