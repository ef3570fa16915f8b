"""
An embedded engine and a server have the same defaults for everything that a request leaves unset.
"""

from __future__ import annotations

import pytest

from tandem_client import Client
from tandem_embedded import CompletedRequest, GenerationParams, InferenceEngine
from tests.e2e.cluster import BUNDLED_MODEL

PROMPT = "def fibonacci(n):"
MESSAGES = [{"role": "user", "content": "Add two numbers."}]


@pytest.fixture(scope="module")
def engine():
    return InferenceEngine(model_dir=BUNDLED_MODEL, dtype="float32", num_threads=1)


def check(completion, found: CompletedRequest) -> None:
    """Check that ids, texts, reasons and stop strings of every choice are equal."""
    told = [
        (list(choice.token_ids), choice.text, choice.reason.name, choice.matched)
        for choice in completion.choices
    ]
    assert told == [
        (
            choice.output_tokens,
            choice.output_text,
            choice.finish_reason.name,
            choice.stop_string
            or (choice.output_tokens[-1] if choice.finish_reason.name == "EOS" else None),
        )
        for choice in found.choices
    ]


@pytest.mark.slow
class TestSameAsServer:
    @pytest.fixture(scope="class")
    @staticmethod
    def client(bundled):
        with Client(bundled.address) as client:
            yield client

    def test_a_prompt_is_continued_as_a_server_continues_it(self, client, engine):
        """
        A request with only a seed follows generation_config.json in both.
        """
        found = engine.complete(PROMPT, GenerationParams(seed=11))
        check(client.complete(PROMPT, seed=11), found)

    def test_choices_and_stop_strings_are_those_of_a_server(self, client, engine):
        """
        Every choice ends at the same stop string in both.
        """
        asked = {"seed": 5, "n": 3, "stop": ["\n\n", "return"], "max_tokens": 40}
        found = engine.complete(PROMPT, GenerationParams(**asked | {"stop": tuple(asked["stop"])}))
        check(client.complete(PROMPT, **asked), found)
        assert any(choice.stop_string for choice in found.choices)

    def test_a_chat_is_answered_as_a_server_answers_it(self, client, engine):
        """
        A chat has the same template, special tokens and sampling in both.
        """
        found = engine.complete(messages=MESSAGES, params=GenerationParams(seed=3, max_tokens=60))
        check(client.complete(messages=MESSAGES, seed=3, max_tokens=60), found)
