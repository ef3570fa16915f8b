"""Log probabilities of prompts through client, scheduler and executor, beside transformers'."""

from __future__ import annotations

import pytest

from tandem.errors import InvalidParameter
from tandem_client import FinishReason, PromptLogprobs
from tests.e2e.cluster import BUNDLED_MODEL, Cluster
from tests.executor_svc.stepping import hugging_face_logits

PROMPT = "def read_json(path: str) -> dict:\n    with open(path) as file:\n        return json"
NOISE = 1e-3
"""Logits of up to 20 in float32, summed in another order, in products of packed weights too."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The bundled model in float32, with steps that cut the prompt."""
    folder = tmp_path_factory.mktemp("prompts")
    options = [
        "--max-total-tokens=16",
        "--max-batch-size=8",
        "--dtype=float32",
        "--max-model-len=256",
    ]
    running = Cluster(BUNDLED_MODEL, folder, options, [])
    try:
        running.start_executor()
        yield running
    finally:
        running.close()


@pytest.fixture
def client(cluster):
    with cluster.client() as connected:
        yield connected


def check(found) -> None:
    """Check a completion's prompt against transformers' log-softmax."""
    ids = found.prompt.token_ids
    assert len(ids) == found.usage.prompt_tokens
    assert found.prompt_logprobs[0] is None
    expected = hugging_face_logits(BUNDLED_MODEL, ids)[:-1].log_softmax(dim=-1)
    for at, one in enumerate(found.prompt_logprobs[1:]):
        assert expected[at][ids[at + 1]].item() == pytest.approx(one.logprob, abs=NOISE)
        assert expected[at].max().item() == pytest.approx(one.top[0][1], abs=NOISE)
        assert (one.rank <= len(one.top)) == (ids[at + 1] in dict(one.top))


class TestScores:
    @pytest.mark.parametrize("max_tokens", [0, 1, 5])
    def test_equal_the_log_softmax_of_transformers(self, client, max_tokens):
        """
        A prompt that is computed in chunks is scored as a whole, with output behind it or without.
        """
        options = {"max_tokens": max_tokens, "temperature": 0, "prompt_logprobs": 3}
        whole = client.complete(PROMPT, ignore_eos=True, **options)
        check(whole)
        assert (max_tokens, FinishReason.MAX_TOKENS) == (whole.usage.output_tokens, whole.reason)
        streamed = client.generate(PROMPT, ignore_eos=True, **options).result()
        assert whole.prompt == streamed.prompt
        assert whole.text == streamed.text
        assert 0 == streamed.usage.cached_tokens

    def test_they_come_before_output(self, client):
        """
        All of the prompt is told before the first output.
        """
        stream = client.generate(PROMPT, max_tokens=4, prompt_logprobs=0, temperature=0)
        names = [type(event).__name__ for event in stream]
        last = len(names) - 1 - names[::-1].index("PromptLogprobs")
        assert last < names.index("Delta")
        assert names.count("PromptLogprobs") > 1

    def test_another_executor_tells_the_rest(self, cluster, client):
        """
        After the executor was killed in the middle of a prompt, each token is told once.
        """
        prompt = [*range(100, 200)]
        expected = client.complete(token_ids=prompt, max_tokens=0, prompt_logprobs=1).prompt
        with client.generate(token_ids=prompt, max_tokens=0, prompt_logprobs=1) as stream:
            next(one for one in stream if isinstance(one, PromptLogprobs) and one.first_position)
            cluster.executor.kill()
            cluster.start_executor()
            found = stream.result().prompt
        assert expected.token_ids == found.token_ids
        assert [one.logprob for one in found.logprobs[1:]] == pytest.approx(
            [one.logprob for one in expected.logprobs[1:]], abs=NOISE
        )


class TestBounds:
    def test_prompt_of_one_token(self, client):
        """
        The first token of a prompt is named without a log probability.
        """
        found = client.complete(token_ids=[101], max_tokens=0, prompt_logprobs=2)
        assert ((101,), (None,)) == (found.prompt.token_ids, found.prompt_logprobs)

    def test_prompt_may_fill_the_context(self, client):
        """
        Without output a prompt of max_model_len tokens is scored.
        """
        found = client.complete(token_ids=[101] * 256, max_tokens=0, prompt_logprobs=0)
        assert 256 == len(found.prompt_logprobs)

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"max_tokens": 0}, "stopping.max_tokens"),
            ({"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, "n"),
            (
                {"max_tokens": 0, "prompt_logprobs": 1, "min_tokens": 1},
                "stopping.min_tokens",
            ),
            ({"prompt_logprobs": 21}, "response.prompt_logprobs"),
        ],
    )
    def test_what_cannot_be_scored_is_refused(self, client, options, field):
        """
        A request without output scores one choice, and a bounded number of ids.
        """
        with pytest.raises(InvalidParameter) as refused:
            client.complete(PROMPT, **options)
        assert field == refused.value.field
