"""/v1/responses through OpenAI's client, against a fake scheduler."""

from __future__ import annotations

import json

import openai
import pytest

from tandem.errors import InternalError
from tests.clients.python.fake_server import ANSWER, Act

SEQUENCE = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def ask(client, **options):
    return client.responses.create(model="fake", **{"input": "hi"} | options)


class TestWhole:
    def test_answer_has_text_and_usage(self, client):
        """
        A response is completed, with its text and its tokens, and nothing of it is stored.
        """
        answer = ask(client)
        assert ("completed", ANSWER) == (answer.status, answer.output_text)
        assert (3, 32, 35) == (
            answer.usage.input_tokens,
            answer.usage.output_tokens,
            answer.usage.total_tokens,
        )
        assert answer.store is False

    def test_conversation_reaches_the_scheduler(self, client, server):
        """
        Instructions are the system's message, before those of the input, whose parts are texts.
        """
        ask(
            client,
            instructions="Be brief.",
            max_output_tokens=7,
            input=[
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"role": "assistant", "content": "b"},
            ],
        )
        sent = server.seen.generate[0]
        assert ["system", "user", "assistant"] == [one.role for one in sent.chat.messages]
        assert 7 == sent.stopping.max_tokens

    @pytest.mark.parametrize(
        ("param", "options"),
        [
            ("tools", {"tools": [{"type": "web_search"}]}),
            ("previous_response_id", {"previous_response_id": "resp_1"}),
            ("background", {"background": True}),
            ("text.format", {"text": {"format": {"type": "json_object"}}}),
            ("input[0]", {"input": [{"type": "function_call_output", "call_id": "1", "output": ""}]}),
            ("input", {"input": []}),
            ("n", {"extra_body": {"n": 2}}),
        ],
    )  # fmt: skip
    def test_what_needs_state_or_tools_is_refused(self, client, param, options):
        """
        A parameter that needs what is not kept or not served is refused by its name.
        """
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, **options)
        assert param == refused.value.param


class TestStream:
    def test_sequence_is_complete(self, client):
        """
        Each thing that begins is done later, in order, and the events are numbered.
        """
        events = list(ask(client, stream=True))
        kinds = [event.type for event in events]
        assert SEQUENCE == list(dict.fromkeys(kinds))
        assert all(kinds.count(kind) == 1 for kind in SEQUENCE if not kind.endswith("delta"))
        assert list(range(len(events))) == [event.sequence_number for event in events]

    def test_last_events_have_the_text_of_the_deltas(self, client):
        """
        Text, part, message and response at the end hold what the deltas brought.
        """
        events = {}
        deltas = []
        for event in ask(client, stream=True):
            events[event.type] = event
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
        assert ANSWER == "".join(deltas)
        assert ANSWER == events["response.output_text.done"].text
        assert ANSWER == events["response.content_part.done"].part.text
        assert ANSWER == events["response.output_item.done"].item.content[0].text
        assert ANSWER == events["response.completed"].response.output_text
        assert 35 == events["response.completed"].response.usage.total_tokens

    def test_openais_helper_reads_it(self, client):
        """
        The helper of OpenAI's client, which checks the sequence, gives the whole response.
        """
        with client.responses.stream(model="fake", input="hi") as stream:
            assert ANSWER == stream.get_final_response().output_text

    def test_failure_is_an_event(self, http, server):
        """
        A response that fails on its way ends with its error.
        """
        server.play(Act(num_tokens=3, error=InternalError("broken")))
        text = http.post(
            "/v1/responses", json={"model": "fake", "input": "hi", "stream": True}
        ).text
        name, data = text.strip().rpartition("\n\n")[2].split("\n")
        assert "event: response.failed" == name
        response = json.loads(data.removeprefix("data: "))["response"]
        assert ("failed", "broken") == (response["status"], response["error"]["message"])
