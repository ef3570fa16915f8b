"""/v1/completions through OpenAI's client, against a fake scheduler."""

from __future__ import annotations

import openai
import pytest

from tests.clients.python.fake_server import ANSWER, Act

SHOUTED = f"{ANSWER.upper()}1"


def ask(client, prompt="hi", **options):
    return client.completions.create(model="fake", prompt=prompt, **options)


class TestPrompts:
    def test_text_is_continued(self, client, server):
        """
        One text is one request, with OpenAI's default of 16 tokens.
        """
        assert ANSWER == ask(client).choices[0].text
        assert ("hi", 16) == (
            server.seen.generate[0].text,
            server.seen.generate[0].stopping.max_tokens,
        )

    def test_ids_are_continued(self, client, server):
        """
        A list of ids is one prompt.
        """
        ask(client, [1, 2, 3])
        assert [1, 2, 3] == list(server.seen.generate[0].token_ids.ids)

    @pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
    @pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]]], ids=["texts", "ids"])
    def test_several_are_numbered_through(self, client, server, prompts, is_streamed):
        """
        With two prompts and two choices each, choices 0 and 1 are those of the first prompt, and
        the usage is that of all.
        """
        options = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        answer = ask(client, prompts, n=2, **options)
        chunks = list(answer) if is_streamed else [answer]
        texts = dict.fromkeys(range(4), "")
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert dict(enumerate([ANSWER, SHOUTED] * 2)) == texts
        assert 2 * (3 + len(ANSWER)) == chunks[-1].usage.total_tokens
        assert 2 == len(server.seen.generate)

    @pytest.mark.parametrize(
        "prompt", [[], ["a", 1], [[1], "a"], {"a": 1}, ["a"] * 257], ids=lambda one: str(one)[:12]
    )
    def test_other_forms_are_refused(self, client, prompt):
        """
        A prompt of another form is refused by its name.
        """
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, prompt)
        assert "prompt" == refused.value.param

    def test_one_that_fails_ends_all(self, client, server):
        """
        When the stream of one prompt fails, the client gets its error, and no half answer.
        """
        server.play(Act(), Act(num_tokens=2, ends_early=True))
        with pytest.raises(openai.InternalServerError):
            ask(client, ["a", "b"])


class TestOutput:
    def test_stream_makes_up_the_whole(self, client):
        """
        The texts of all chunks are the output, and the last one says why it ended.
        """
        chunks = [chunk.choices[0] for chunk in ask(client, stream=True)]
        assert ANSWER == "".join(one.text for one in chunks)
        assert "stop" == chunks[-1].finish_reason

    @pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
    def test_echo_puts_the_prompt_before_the_output(self, client, is_streamed):
        """
        With echo the text begins with the prompt.
        """
        answer = ask(client, "Hi. ", echo=True, stream=is_streamed)
        chunks = list(answer) if is_streamed else [answer]
        assert f"Hi. {ANSWER}" == "".join(one.choices[0].text for one in chunks)

    @pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
    def test_logprobs_are_parallel_lists(self, client, is_streamed):
        """
        Tokens, their log probabilities, the likeliest ones, and where each begins in the text.
        """
        answer = ask(client, logprobs=1, stream=is_streamed)
        found = [
            one.choices[0].logprobs
            for one in (answer if is_streamed else [answer])
            if one.choices[0].logprobs
        ]
        assert list(ANSWER) == [token for one in found for token in one.tokens]
        assert list(range(len(ANSWER))) == [place for one in found for place in one.text_offset]
        assert -ord("T") / 64 == found[0].token_logprobs[0]
        assert {"T": 0.0} == found[0].top_logprobs[0]

    def test_token_ids_are_told_if_asked_for(self, client):
        """
        With return_token_ids a choice has the ids of its output.
        """
        answer = ask(client, extra_body={"return_token_ids": True})
        assert [ord(letter) for letter in ANSWER] == answer.choices[0].token_ids

    @pytest.mark.parametrize(
        ("param", "options"),
        [
            ("suffix", {"suffix": "end"}),
            ("best_of", {"best_of": 2}),
            ("echo", {"echo": True, "logprobs": 1, "stream": True}),
            ("prompt_logprobs", {"extra_body": {"prompt_logprobs": 1}, "stream": True}),
            ("echo", {"echo": True, "prompt": [1, 2]}),
        ],
    )
    def test_what_cannot_be_done_is_refused(self, client, param, options):
        """
        A parameter that needs another output is refused by its name.
        """
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, **options)
        assert param == refused.value.param
