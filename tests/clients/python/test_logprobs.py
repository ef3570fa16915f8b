"""Penalties and log probabilities in library and command."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from typer.testing import CliRunner

from tandem.errors import InvalidParameter, NoExecutor
from tandem_client import AsyncClient, Client, Delta, RetryPolicy, TokenLogprobs
from tandem_client.cli.app import app
from tandem_client.cli.generation.output import json_of
from tandem_client.request import build_request
from tests.clients.python.fake_server import ANSWER, Act

SOON = RetryPolicy(max_attempts=4, initial_delay_s=0.001, max_delay_s=0.001)
IDS = [ord(character) for character in ANSWER]
TOLD = tuple(
    TokenLogprobs(
        logprob=-token_id / 64,
        top=((token_id, 0.0), (token_id + 1, -1.0)),
        text=chr(token_id),
        top_texts=(chr(token_id), chr(token_id + 1)),
    )
    for token_id in IDS
)
OPTIONS = {
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.25,
    "presence_penalty": -0.5,
    "logit_bias": {7: 2.0, 3: -100.0},
}


@pytest.fixture
def client(server):
    with Client(server.address, retry=SOON) as connected:
        yield connected


def told(events) -> tuple[TokenLogprobs, ...]:
    """Return the entries of all deltas, each of which must have one entry per id."""
    found = []
    for event in events:
        if isinstance(event, Delta):
            assert len(event.token_ids) == len(event.logprobs)
            found += event.logprobs
    return tuple(found)


class TestBytes:
    def test_bytes_are_returned_where_they_are_asked_for(self, client):
        """
        With token_bytes each entry has the bytes of its token and of the likeliest ones.
        """
        events = list(client.generate("hi", logprobs=2, token_bytes=True))
        assert [(chr(one).encode(), (chr(one).encode(), chr(one + 1).encode())) for one in IDS] == [
            (one.token_bytes, one.top_token_bytes) for one in told(events)
        ]
        assert ANSWER.encode() == b"".join(one.token_bytes for one in told(events))

    def test_json_has_bytes_as_numbers_where_they_are_asked_for(self, client):
        """
        JSON, which has no bytes, gets lists of numbers; what was not asked for is not there.
        """
        asked = json.loads(
            json.dumps(json_of(client.complete("hi", logprobs=1, token_bytes=True)))
        )["logprobs"]
        assert [([one], [[one]]) for one in IDS] == [
            (one["token_bytes"], one["top_token_bytes"]) for one in asked
        ]
        plain = json_of(client.complete("hi", logprobs=1))["logprobs"]
        assert not any("token_bytes" in one or "top_token_bytes" in one for one in plain)


class TestRequest:
    def test_every_option_has_its_field(self):
        """
        Each option lands in the field of its name.
        """
        request = build_request("hi", {**OPTIONS, "min_tokens": 4, "logprobs": 0})
        sampling = request.sampling
        assert (0.125, 1.5, 0.25, -0.5) == (
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        assert {7: 2.0, 3: -100.0} == dict(sampling.logit_bias)
        assert 4 == request.stopping.min_tokens
        assert request.response.HasField("logprobs")

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"logprobs": -1}, "response.logprobs"),
            ({"min_tokens": -1}, "stopping.min_tokens"),
            ({"repetition_penalty": "much"}, "sampling.repetition_penalty"),
            ({"logit_bias": {"the": 1.0}}, "sampling.logit_bias"),
            ({"logit_bias": {2**40: 1.0}}, "sampling.logit_bias"),
        ],
        ids=str,
    )
    def test_what_cannot_be_sent_is_named(self, options, field):
        """
        A value that the message cannot carry raises InvalidParameter with its path.
        """
        with pytest.raises(InvalidParameter) as refused:
            build_request("hi", options)
        assert field == refused.value.field


class TestClient:
    def test_stream_has_one_entry_per_token(self, client):
        """
        Each Delta brings the log probabilities of its ids, and Started what was asked for.
        """
        stream = client.generate("hi", logprobs=2, **OPTIONS)
        assert TOLD == told(stream)
        params = stream.started.params
        assert (1.5, {7: 2.0, 3: -100.0}, 2) == (
            params.repetition_penalty,
            params.logit_bias,
            params.logprobs,
        )

    def test_complete_has_them_whole(self, client):
        """
        A completion has one entry per id, and none where they were not asked for.
        """
        assert TOLD == client.complete("hi", logprobs=2).logprobs
        assert () == client.complete("hi").logprobs

    def test_zero_tells_of_the_chosen_token_alone(self, client):
        """
        0 asks for no other tokens.
        """
        found = client.complete("hi", logprobs=0).logprobs
        assert [one.logprob for one in TOLD] == [one.logprob for one in found]
        assert {()} == {one.top for one in found}

    def test_broken_stream_goes_on_with_them(self, client, server):
        """
        After a break the rest comes with its own, and nothing is told twice.
        """
        broken = Act(num_tokens=9, error=NoExecutor("gone", retry_after_s=0.0))
        server.inference.acts = [broken, Act()]
        assert TOLD == told(client.generate("hi", logprobs=2))
        assert [2, 2] == [request.response.logprobs for request in server.seen.generate]

    async def test_async_client_has_the_same(self, server):
        """
        The asynchronous client takes the same options and gives the same events.
        """
        async with AsyncClient(server.address, retry=SOON) as client:
            events = [event async for event in client.generate("hi", logprobs=2)]
            assert TOLD == told(events)
            assert TOLD == (await client.complete("hi", logprobs=2)).logprobs


class TestCommand:
    @pytest.fixture
    def run(self, server):
        def invoke(*arguments):
            return CliRunner().invoke(app, [*arguments, "--address", server.address])

        return invoke

    def test_options_reach_the_server(self, run, server):
        """
        Each option is sent as the field of its name.
        """
        flags = "--min-p 0.125 --repetition-penalty 1.5 --frequency-penalty 0.25"
        run("generate", "hi", *flags.split(), "--presence-penalty", "-0.5", "--min-tokens", "4")
        (sent,) = server.seen.generate
        assert (0.125, 1.5, 0.25, -0.5, 4) == (
            sent.sampling.min_p,
            sent.sampling.repetition_penalty,
            sent.sampling.frequency_penalty,
            sent.sampling.presence_penalty,
            sent.stopping.min_tokens,
        )
        assert not sent.response.HasField("logprobs")

    @pytest.mark.parametrize("num_choices", [1, 2])
    def test_logprobs_are_printed_by_token(self, run, num_choices):
        """
        --logprobs prints a heading, and a line per token: id, log probability, share, text, and the likeliest.
        """
        result = run("generate", "hi", "--logprobs", "2", "--n", str(num_choices))
        lines = [line.split() for line in result.stdout.splitlines() if line.startswith("     ")]
        first = IDS[0]
        alternatives = [str(first), '"T"', "0.0000", str(first + 1), '"U"', "-1.0000"]
        assert ["84", "-1.3125", "26.91%", '"T"', *alternatives] == lines[0]
        assert num_choices == result.stdout.count("   token   logprob   share  text")
        assert IDS == [int(line[0]) for line in lines[: len(IDS)]]
        assert 0 == result.exit_code

    def test_refusal_comes_without_a_heading(self, run, server):
        """
        A request that is refused prints nothing on stdout.
        """
        server.play(Act(accept=False, error=InvalidParameter("no")))

        assert "" == run("generate", "hi", "--logprobs", "2").stdout

    def test_json_has_them(self, run):
        """
        --json has the entries beside the ids.
        """
        outcome = json.loads(run("generate", "hi", "--json", "--logprobs", "1").stdout)
        assert len(outcome["token_ids"]) == len(outcome["logprobs"])
        told = {"logprob": -1.3125, "top": [[84, 0.0]], "text": "T", "top_texts": ["T"]}
        assert told == outcome["logprobs"][0]

    def test_json_has_null_for_what_is_ruled_out(self, client):
        """
        A log probability of minus infinity is null: JSON has no infinities.
        """
        completion = client.complete("hi", logprobs=1)
        ruled_out = TokenLogprobs(logprob=-math.inf, top=((7, -math.inf),))
        choice = dataclasses.replace(completion.choices[0], logprobs=(ruled_out,))
        outcome = json_of(dataclasses.replace(completion, choices=(choice,)))
        (told,) = outcome["logprobs"]
        assert (None, [(7, None)]) == (told["logprob"], told["top"])
        assert json.dumps(outcome, allow_nan=False)
