"""/v1/chat/completions through OpenAI's client, against a fake scheduler."""

from __future__ import annotations

import json

import openai
import pytest

from tests.clients.python.fake_server import ANSWER, CHOSEN_SEED

HI = [{"role": "user", "content": "hi"}]
SHOUTED = f"{ANSWER.upper()}1"

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}]


def ask(client, **options):
    return client.chat.completions.create(model="fake", messages=HI, **options)


class TestWhole:
    def test_answer_has_text_usage_and_revision(self, client):
        """
        An answer holds the text, why it ended, its tokens, and the revision as its fingerprint.
        """
        answer = ask(client)
        assert ("assistant", ANSWER) == (
            answer.choices[0].message.role,
            answer.choices[0].message.content,
        )
        assert "stop" == answer.choices[0].finish_reason
        assert "!" == answer.choices[0].stop_reason
        assert (3, 32, 35) == (
            answer.usage.prompt_tokens,
            answer.usage.completion_tokens,
            answer.usage.total_tokens,
        )
        assert ("fake", "revision-1") == (answer.model, answer.system_fingerprint)
        assert answer.id.startswith("chatcmpl-")

    def test_choices_come_in_order(self, client):
        """
        With n choices each has its number and its own text.
        """
        answer = ask(client, n=2)
        assert [(0, ANSWER), (1, SHOUTED)] == [
            (one.index, one.message.content) for one in answer.choices
        ]

    def test_logprobs_name_tokens_with_their_bytes(self, client):
        """
        With logprobs each token has its own and those of the likeliest tokens.
        """
        first = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content[0]
        assert ("T", -ord("T") / 64, [ord("T")]) == (first.token, first.logprob, first.bytes)
        assert [("T", 0.0, [ord("T")]), ("U", -1.0, [ord("U")])] == [
            (one.token, one.logprob, one.bytes) for one in first.top_logprobs
        ]

    def test_names_of_vllm_arrive(self, client, server):
        """
        allowed_token_ids and include_stop_str_in_output reach the scheduler under its own names.
        """
        ask(
            client,
            extra_body={"allowed_token_ids": [4, 3], "include_stop_str_in_output": True},
        )
        (sent,) = server.seen.generate
        assert ([4, 3], True) == (
            list(sent.sampling.allowed_token_ids),
            sent.stopping.include_stop,
        )

    def test_no_logprobs_unless_asked(self, client):
        """
        Without logprobs the field is null.
        """
        assert ask(client).choices[0].logprobs is None


class TestStream:
    def test_chunks_make_up_the_whole(self, client):
        """
        The first chunk says who speaks, the last why it ended, and the texts between are the answer.
        """
        chunks = [chunk.choices[0] for chunk in ask(client, stream=True)]
        assert "assistant" == chunks[0].delta.role
        assert ANSWER == "".join(one.delta.content or "" for one in chunks)
        assert [None] * (len(chunks) - 1) + ["stop"] == [one.finish_reason for one in chunks]

    def test_chunks_of_choices_are_told_apart(self, client):
        """
        Chunks name the choice that they belong to.
        """
        texts = ["", ""]
        for chunk in ask(client, stream=True, n=2):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert [ANSWER, SHOUTED] == texts

    def test_usage_is_the_last_chunk_if_asked_for(self, client):
        """
        With include_usage a chunk without choices has the usage; all others have null.
        """
        *chunks, last = ask(client, stream=True, stream_options={"include_usage": True})
        assert ([], 35) == (last.choices, last.usage.total_tokens)
        assert {None} == {chunk.usage for chunk in chunks}

    def test_logprobs_come_with_their_tokens(self, client):
        """
        The log probabilities of all chunks are those of the answer's tokens.
        """
        chunks = [one.choices[0] for one in ask(client, stream=True, logprobs=True)]
        tokens = [token.token for one in chunks if one.logprobs for token in one.logprobs.content]
        assert ANSWER == "".join(tokens)

    async def test_asynchronous_client_streams_too(self, url):
        """
        OpenAI's client for asyncio reads the same stream.
        """
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key") as client:
            chunks = await ask(client, stream=True)
            text = "".join([one.choices[0].delta.content or "" async for one in chunks])
        assert ANSWER == text


class TestOptions:
    def test_all_reach_the_scheduler(self, client, server):
        """
        OpenAI's parameters and vLLM's further ones arrive under Tandem's names.
        """
        ask(
            client,
            temperature=0.5,
            top_p=0.75,
            frequency_penalty=0.25,
            presence_penalty=0.125,
            logit_bias={"7": 1.5},
            seed=11,
            stop=["a", "b"],
            max_tokens=3,
            max_completion_tokens=5,
            extra_body={
                "top_k": 4,
                "min_p": 0.25,
                "repetition_penalty": 1.5,
                "cache_salt": "salt",
                "priority": -2,
                "stop_token_ids": [9],
                "ignore_eos": True,
                "min_tokens": 1,
            },
        )
        sent = server.seen.generate[0]
        sampling, stopping = sent.sampling, sent.stopping
        assert (0.5, 0.75, 0.25, 0.125, 4, 0.25, 1.5, 11) == (
            sampling.temperature,
            sampling.top_p,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.top_k,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.seed,
        )
        assert {7: 1.5} == dict(sampling.logit_bias)
        assert (5, ["a", "b"], [9], True, 1) == (
            stopping.max_tokens,
            list(stopping.stop),
            list(stopping.stop_token_ids),
            stopping.ignore_eos,
            stopping.min_tokens,
        )
        assert ("salt", -2) == (sent.cache_salt, sent.priority)

    def test_missing_ones_are_left_to_the_scheduler(self, client, server):
        """
        A request without parameters sends none: the scheduler knows the model's defaults.
        """
        ask(client)
        sent = server.seen.generate[0]
        assert [] == [*sent.sampling.ListFields(), *sent.stopping.ListFields()]

    def test_negative_seed_is_sent(self, client, server):
        """
        OpenAI's seeds may be negative; they are counted from the end of Tandem's.
        """
        ask(client, seed=-1)
        assert 2**64 - 1 == server.seen.generate[0].sampling.seed

    def test_parts_of_text_are_one_text(self, client, server):
        """
        A message of several parts of text is sent as their concatenation.
        """
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}])
        assert "ab" == server.seen.generate[0].chat.messages[0].content

    def test_harmless_unknown_keys_are_ignored(self, client):
        """
        Keys that do not change the output, known or not, are no reason to refuse.
        """
        answer = ask(client, user="u", store=True, metadata={"a": "b"}, extra_body={"x_new": 1})
        assert ANSWER == answer.choices[0].message.content

    @pytest.mark.parametrize(
        ("param", "options"),
        [
            ("response_format", {"response_format": {"type": "json_object"}}),
            ("tool_choice", {"tool_choice": "required", "tools": TOOLS}),
            ("functions", {"functions": [{"name": "f"}]}),
            ("best_of", {"extra_body": {"best_of": 2}}),
            ("guided_json", {"extra_body": {"guided_json": {}}}),
            ("echo", {"extra_body": {"echo": True}}),
            ("reasoning_effort", {"reasoning_effort": "high"}),
        ],
    )
    def test_what_would_change_the_output_is_refused(self, client, server, param, options):
        """
        A parameter that asks for another output, and that is not served, is refused by its name.
        """
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, **options)
        assert (param, "unsupported_parameter") == (refused.value.param, refused.value.code)
        assert [] == server.seen.generate

    def test_neutral_values_are_accepted(self, client):
        """
        A parameter that is refused otherwise may say what holds anyway.
        """
        answer = ask(
            client, response_format={"type": "text"}, tools=[], n=1, extra_body={"best_of": 1}
        )
        assert ANSWER == answer.choices[0].message.content

    def test_tools_are_rendered_by_the_template(self, client, server):
        """
        Definitions of tools, calls of them and their answers reach the template as they were sent.
        """
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1}'}}
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ]
        extra = {"chat_template_kwargs": {"enable_thinking": False}}
        client.chat.completions.create(
            model="fake", messages=messages, tools=TOOLS, tool_choice="auto", extra_body=extra
        )
        (request,) = server.seen.generate
        _, assistant, answer = request.chat.messages
        assert TOOLS == [json.loads(tool.definition_json) for tool in request.chat.tools]
        assert ("c1", "f", '{"b": 1}') == (
            assistant.tool_calls[0].id,
            assistant.tool_calls[0].name,
            assistant.tool_calls[0].arguments_json,
        )
        assert not assistant.HasField("content")
        assert ("2", "c1") == (answer.content, answer.tool_call_id)
        assert '{"enable_thinking":false}' == request.chat.template_args_json

    def test_image_is_refused(self, client):
        """
        A part of a message that is no text is refused by its place.
        """
        part = {"type": "image_url", "image_url": {"url": "data:"}}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": [part]}]
            )
        assert "messages[0].content[0]" == refused.value.param

    def test_idempotency_key_of_http_is_not_ours(self, client, server):
        """
        The header Idempotency-Key does not become Tandem's key, which means another thing.
        """
        ask(client, seed=CHOSEN_SEED, extra_headers={"Idempotency-Key": "theirs"})
        assert "theirs" not in str(server.seen.generate[0])
