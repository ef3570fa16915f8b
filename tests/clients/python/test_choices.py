"""Several completions of one prompt, and what requests say of themselves, in library and command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tandem.errors import Draining, InvalidParameter
from tandem_client import AsyncClient, Client, Delta, Finished, RetryPolicy
from tandem_client.cli.app import app
from tests.clients.python.fake_server import ANSWER, Act, answer_of

SOON = RetryPolicy(max_attempts=4, initial_delay_s=0.001, max_delay_s=0.001)
ANSWERS = [answer_of(Act(), choice) for choice in range(3)]


def texts(events) -> list[str]:
    found: dict[int, str] = {}
    for event in events:
        if isinstance(event, Delta):
            found[event.choice] = found.get(event.choice, "") + event.text
    return [found[choice] for choice in sorted(found)]


@pytest.fixture
def client(server):
    with Client(server.address, retry=SOON) as connected:
        yield connected


@pytest.fixture
def run(server):
    def invoke(*arguments):
        return CliRunner().invoke(app, [*arguments, "--address", server.address])

    return invoke


class TestChoices:
    def test_events_say_of_which_choice_they_are(self, client):
        """
        Deltas of each choice concatenate to its output, and each has its Finished.
        """
        stream = client.generate("hi", n=3)
        events = list(stream)
        assert ANSWERS == texts(events)
        assert [0, 1, 2] == [event.choice for event in events if isinstance(event, Finished)]
        assert [0, 1, 2] == sorted(stream.finished_choices)
        assert 0 == stream.finished.choice
        assert 3 == stream.started.params.n

    def test_text_is_choice_0s(self, client):
        """
        Iterating over text gives one readable output: that of choice 0.
        """
        assert ANSWER == "".join(client.generate("hi", n=2).text)

    def test_complete_has_every_choice(self, client):
        """
        A completion lists its choices in order; its own text is that of the first.
        """
        completion = client.complete("hi", n=3)
        assert ANSWERS == [choice.text for choice in completion.choices]
        assert [0, 1, 2] == [choice.choice for choice in completion.choices]
        assert ANSWER == completion.text

    @pytest.mark.parametrize("num_tokens", [0, 5, len(ANSWER)])
    def test_broken_stream_goes_on_in_every_choice(self, client, server, num_tokens):
        """
        Each choice goes on after what was delivered of it when the stream breaks.
        """
        broken = Act(num_tokens=num_tokens, error=Draining("stopping"))
        server.play(broken, Act())
        assert ANSWERS == texts(client.generate("hi", n=3))
        first, second = server.seen.generate
        assert (3, 3) == (first.n, second.n)

    async def test_async_client_streams_choices_too(self, server):
        """
        AsyncClient gives the same events and the same whole completion.
        """
        async with AsyncClient(server.address, retry=SOON) as client:
            stream = client.generate("hi", n=3)
            assert ANSWERS == texts([event async for event in stream])
            assert [0, 1, 2] == sorted(stream.finished_choices)
            pieces = [piece async for piece in client.generate("hi", n=2).text]
            assert ANSWER == "".join(pieces)
            completion = await client.complete("hi", n=2)
            assert ANSWERS[:2] == [choice.text for choice in completion.choices]


class TestOptions:
    def test_what_requests_share_by_is_sent(self, client, server):
        """
        n, priority, tenant and cache_salt are sent as given; unset ones are not sent at all.
        """
        list(client.generate("hi", n=2, priority=-5, tenant="alice", cache_salt="pepper"))
        list(client.generate("hi"))
        sent, plain = server.seen.generate
        assert (2, -5, "alice", "pepper") == (sent.n, sent.priority, sent.tenant, sent.cache_salt)
        assert not any(plain.HasField(name) for name in ("n", "priority", "tenant", "cache_salt"))

    @pytest.mark.parametrize("value", [-1, 2**32, "two"])
    def test_what_no_message_can_carry_is_refused_here(self, client, value):
        """
        An n that is no uint32 raises InvalidParameter at once.
        """
        with pytest.raises(InvalidParameter) as refused:
            client.generate("hi", n=value)
        assert "n" == refused.value.field

    def test_truncation_is_told(self, client, server):
        """
        Started says how many of the prompt's oldest tokens were dropped, and so does a completion.
        """
        server.play(Act(truncated=40))
        stream = client.generate("hi")
        list(stream)
        assert 40 == stream.started.truncated_prompt_tokens
        assert 40 == client.complete("hi").truncated_prompt_tokens


class TestGenerateCommand:
    def test_choices_stand_one_after_the_other(self, run, server):
        """
        With --n each completion has a line that names it, in order, and one summary for all.
        """
        result = run("generate", "hi", "--n", "2", "--priority=-1", "--tenant=t", "--cache-salt=s")
        assert 0 == result.exit_code
        expected = "".join(
            f"--- choice {choice}, STOP_STRING\n{answer}\n"
            for choice, answer in enumerate(ANSWERS[:2])
        )
        assert expected == result.stdout
        assert 1 == result.stderr.count("ended by STOP_STRING")
        sent = server.seen.generate[0]
        assert (2, -1, "t", "s") == (sent.n, sent.priority, sent.tenant, sent.cache_salt)

    def test_json_lists_every_choice(self, run):
        """
        JSON has the fields of choice 0 beside the request's, and all choices in a list.
        """
        found = json.loads(run("generate", "hi", "--n", "2", "--json").stdout)
        assert (ANSWER, "STOP_STRING") == (found["text"], found["reason"])
        assert ANSWERS[:2] == [choice["text"] for choice in found["choices"]]

    def test_truncation_is_in_the_summary(self, run, server):
        """
        A prompt that lost its beginning is not passed over in silence.
        """
        server.play(Act(truncated=40))
        assert "40 older prompt tokens dropped" in run("generate", "hi").stderr
