"""`tandem generate --prompt-logprobs`: log probabilities of the prompt's tokens."""

from __future__ import annotations

import json

import pytest

from tandem.inference.v1 import stream_pb2
from tests.clients.python.fake_server import ANSWER, Act

FIRST = stream_pb2.TokenLogprobs(text="d")
SECOND = stream_pb2.TokenLogprobs(
    logprob=-0.5,
    rank=2,
    text="e",
    top_token_ids=[120, 101],
    top_logprobs=[-0.25, -0.5],
    top_texts=["x", "e"],
)
LAST = stream_pb2.TokenLogprobs(logprob=float("-inf"), rank=128, text="\n")
PARTS = (
    stream_pb2.PromptLogprobs(first_position=0, token_ids=[100, 101], logprobs=[FIRST, SECOND]),
    stream_pb2.PromptLogprobs(first_position=2, token_ids=[10], logprobs=[LAST]),
)
TABLE = [
    "  prompt   logprob   share   rank  text          likeliest: token text logprob",
    '     100         -       -      -  "d"',
    '     101   -0.5000  60.65%      2  "e"           120 "x" -0.2500  101 "e" -0.5000',
    r'      10      -inf   0.00%    128  "\n"',
]


def test_prompt_is_printed_before_the_output(run, server):
    """
    A line per token of the prompt comes first, without figures for the first; an empty line parts
    them from the output.
    """
    server.play(Act(prompt_parts=PARTS))
    result = run("generate", "de", "--prompt-logprobs", "2", "--address", server.address)
    assert (0, [*TABLE, "", ANSWER]) == (result.exit_code, result.stdout.splitlines())
    assert 2 == server.seen.generate[0].response.prompt_logprobs


def test_each_token_is_printed_once(run, server):
    """
    A prompt that is told again from its beginning, as after a break, is not printed again.
    """
    server.play(Act(prompt_parts=(PARTS[0], *PARTS)))
    result = run("generate", "de", "--prompt-logprobs", "2", "--address", server.address)
    assert [*TABLE, "", ANSWER] == result.stdout.splitlines()


def test_several_completions_follow_the_prompt(run, server):
    """
    With --n the prompt comes first, once, and then each completion.
    """
    server.play(Act(prompt_parts=PARTS))
    flags = ("--prompt-logprobs", "2", "--n", "2")
    lines = run("generate", "de", *flags, "--address", server.address).stdout.splitlines()
    assert [*TABLE, "", "--- choice 0, STOP_STRING", ANSWER] == lines[:7]


def test_scoring_prints_the_prompt_alone(run, server):
    """
    With --max-tokens 0 the prompt is all that is printed.
    """
    server.play(Act(answer="", prompt_parts=PARTS))
    flags = ("--prompt-logprobs", "2", "--max-tokens", "0")
    result = run("generate", "de", *flags, "--address", server.address)
    assert (0, TABLE) == (result.exit_code, result.stdout.splitlines())
    assert "+ 0 output tokens" in result.stderr


def test_json_has_the_prompt(run, server):
    """
    --json has ids, texts and log probabilities of the prompt; null where nothing is told.
    """
    server.play(Act(prompt_parts=PARTS))
    flags = ("--prompt-logprobs", "2", "--json")
    prompt = json.loads(run("generate", "de", *flags, "--address", server.address).stdout)["prompt"]
    assert ([100, 101, 10], ["d", "e", "\n"]) == (prompt["token_ids"], prompt["texts"])
    first, second, last = prompt["logprobs"]
    assert (None, -0.5, 2, [[120, -0.25], [101, -0.5]]) == (
        first,
        second["logprob"],
        second["rank"],
        second["top"],
    )
    assert None is last["logprob"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--prompt-logprobs", "2", "--echo"], "leave out --echo"),
        (["--prompt-logprobs", "many"], "--prompt-logprobs"),
    ],
    ids=["echo", "word"],
)
def test_wrong_use_is_refused(run, server, flags, sentence):
    """
    A flag that cannot be read, or would print the prompt twice, is wrong usage; nothing is sent.
    """
    result = run("generate", "de", *flags, "--address", server.address)
    assert (2, []) == (result.exit_code, server.seen.generate)
    assert sentence in result.stderr
