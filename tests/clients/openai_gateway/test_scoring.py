"""Scoring of prompts through the gateway, as lm-eval-harness asks for it, against real services."""

from __future__ import annotations

import openai
import pytest

from tandem_client import Client
from tests.clients.openai_gateway.serving import gateway
from tests.e2e.cluster import BUNDLED_MODEL, Cluster

NOISE = 1e-4
"""Of float32 sums in steps that are cut in other places."""
PROMPT = "def read_json(path: str) -> dict:"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    running = Cluster(BUNDLED_MODEL, tmp_path_factory.mktemp("scoring"), [], [])
    try:
        running.start_executor()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def client(cluster):
    with (
        gateway(cluster.address) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as connected,
    ):
        yield connected


@pytest.fixture(scope="module")
def expected(cluster):
    """Return the prompt as Tandem's own client tells it."""
    with Client(cluster.address) as connected:
        return connected.complete(PROMPT, max_tokens=0, prompt_logprobs=1).prompt


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("kind", ["text", "ids"])
def test_echo_with_logprobs_scores_the_prompt(client, expected, kind, max_tokens):
    """
    The lists begin with the prompt's tokens, of which the first has no log probability.
    """
    prompt = PROMPT if kind == "text" else list(expected.token_ids)
    answer = client.completions.create(
        model="tandem-py", prompt=prompt, echo=True, max_tokens=max_tokens, logprobs=1,
        temperature=0,
    )  # fmt: skip
    told, count = answer.choices[0].logprobs, len(expected.token_ids)
    assert max_tokens == answer.usage.completion_tokens
    assert count + max_tokens == len(told.tokens) == len(told.token_logprobs)
    assert list(expected.texts) == told.tokens[:count]
    assert (None, None) == (told.token_logprobs[0], told.top_logprobs[0])
    assert [one.logprob for one in expected.logprobs[1:]] == pytest.approx(
        told.token_logprobs[1:count], abs=1e-4
    )
    for one, top in zip(expected.logprobs[1:], told.top_logprobs[1:count], strict=True):
        assert (one.rank == 1) == (max(top, key=top.get) == one.text)
    assert answer.choices[0].text.startswith(PROMPT if kind == "text" else expected.texts[0])


def test_prompt_logprobs_have_the_form_of_vllm(client, expected):
    """
    With prompt_logprobs each place has the prompt's token and the likeliest ones by id.
    """
    answer = client.completions.create(
        model="tandem-py", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    told = answer.choices[0].prompt_logprobs
    assert told[0] is None
    for token_id, one, place in zip(
        expected.token_ids[1:], expected.logprobs[1:], told[1:], strict=True
    ):
        own = place[str(token_id)]
        assert (one.rank, one.text) == (own["rank"], own["decoded_token"])
        assert one.logprob == pytest.approx(own["logprob"], abs=NOISE)


def test_no_output_without_scores_is_refused(client):
    """
    Max_tokens 0 without echo or prompt_logprobs is a bad request.
    """
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tandem-py", prompt=PROMPT, max_tokens=0)
