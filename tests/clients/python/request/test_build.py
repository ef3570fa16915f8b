"""Keyword arguments become a message."""

from __future__ import annotations

from typing import ClassVar

import pytest
from google.protobuf.json_format import ParseDict

from tandem.errors import InvalidParameter
from tandem.inference.v1 import chat_pb2, request_pb2, resume_pb2, tokens_pb2
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem_client import SAMPLING_PRESETS, AsyncClient, Client, GenerateOptions
from tandem_client.request import build, build_request, detokenize_request, tokenize_request


class TestBuildRequest:
    def test_what_is_not_given_stays_unset(self):
        """
        Only the prompt is sent when only the prompt is given, so that the server's defaults hold.
        """
        request = build_request("hi", {})

        assert ["text"] == [field.name for field, _ in request.ListFields()]

    def test_zero_is_sent_where_zero_is_given(self):
        """
        Zero and unset differ: temperature 0 and seed 0 reach the server.
        """
        request = build_request("hi", {"temperature": 0.0, "seed": 0, "max_tokens": 0})

        assert request.sampling.HasField("temperature")
        assert request.sampling.HasField("seed")
        assert request.stopping.HasField("max_tokens")
        assert not request.sampling.HasField("top_p")

    def test_every_option_has_its_field(self):
        """
        Each option lands in the field of its name.
        """
        request = build_request(
            None,
            {
                "token_ids": [1, 2],
                "temperature": 0.5,
                "top_k": -1,
                "top_p": 0.25,
                "seed": 2**64 - 1,
                "max_tokens": 9,
                "stop": ["a", "b"],
                "stop_token_ids": [3],
                "ignore_eos": True,
                "clamp_max_tokens": False,
                "time_limit_s": 1.5,
                "queue_limit_s": 0.5,
                "request_id": "mine",
                "model": "m",
                "parse_special_tokens": False,
                "attempt_key": "key",
                "logprobs": 0,
                "omit_text": True,
                "omit_token_ids": False,
                "min_delta_interval_s": 0.25,
            },
        )

        assert [1, 2] == list(request.token_ids.ids)
        assert (0.5, -1, 0.25, 2**64 - 1) == (
            request.sampling.temperature,
            request.sampling.top_k,
            request.sampling.top_p,
            request.sampling.seed,
        )
        assert (9, ["a", "b"], [3], True) == (
            request.stopping.max_tokens,
            list(request.stopping.stop),
            list(request.stopping.stop_token_ids),
            request.stopping.ignore_eos,
        )
        assert (1.5, 0.5, "mine", "m", "key") == (
            request.time_limit_s,
            request.queue_limit_s,
            request.request_id,
            request.model,
            request.attempt_key,
        )
        assert request.HasField("parse_special_tokens")
        assert request.stopping.HasField("clamp_max_tokens")
        assert (
            request_pb2.ResponseOptions(
                logprobs=0, omit_text=True, omit_token_ids=False, min_delta_interval_s=0.25
            )
            == request.response
        )

    def test_every_option_is_a_field_or_stands_for_a_prompt(self):
        """
        No option is left out of the message in silence: each is a field of the request or of a part
        of it, or belongs to the prompt.
        """
        parts = (
            inference.GenerateRequest,
            chat_pb2.ChatPrompt,
            *(request_pb2.SamplingParams, request_pb2.StoppingParams, request_pb2.ResponseOptions),
        )
        fields = {name for part in parts for name in part.DESCRIPTOR.fields_by_name}

        assert {"preset", "template_args"} == set(GenerateOptions.__annotations__) - fields
        sent = {name for names in build._NAMES_BY_PART.values() for name in names}
        plain = {
            *sent,
            *build._PLAIN,
            *build._OF_CHATS,
            "messages",
            "token_ids",
            "preset",
            "resume",
        }
        assert set() == set(GenerateOptions.__annotations__) - plain

    def test_resume_lists_what_the_caller_holds(self):
        """
        Each choice of `resume` is sent as it was given.
        """
        held = [{"token_ids": [1, 2]}, {"choice": 1, "token_ids": (3,), "finished": True}]
        request = build.build_request("hi", {"resume": held})
        wanted = {
            "choices": [{"token_ids": [1, 2]}, {"choice": 1, "token_ids": [3], "finished": True}]
        }
        assert ParseDict(wanted, resume_pb2.Resume()) == request.resume

    @pytest.mark.parametrize(
        ("held", "field"),
        [
            (7, "resume"),
            ([[1, 2]], "resume.choices[0]"),
            ([{"ids": [1]}], "resume.choices[0]"),
            ([{}, {"token_ids": 5}], "resume.choices[1].token_ids"),
            ([{"token_ids": [2**40]}], "resume.choices[0].token_ids"),
        ],
    )
    def test_resume_that_cannot_be_sent_is_refused(self, held, field):
        """
        A `resume` of another shape is refused with the path of what is wrong.
        """
        with pytest.raises(InvalidParameter) as refused:
            build.build_request("hi", {"resume": held})
        assert field == refused.value.field

    def test_single_stop_string_is_one_string(self):
        """
        A plain string for `stop` means that string, not its characters.
        """
        assert ["end"] == list(build_request("hi", {"stop": "end"}).stopping.stop)

    def test_messages_become_turns(self):
        """
        Messages keep their order, roles and contents.
        """
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
        request = build_request(None, {"messages": messages})

        assert messages == [{"role": m.role, "content": m.content} for m in request.chat.messages]

    def test_empty_conversation_is_sent_for_the_server_to_judge(self):
        """
        No messages and no ids are still a chosen kind of prompt.
        """
        assert "chat" == build_request(None, {"messages": []}).WhichOneof("prompt")
        assert "token_ids" == build_request(None, {"token_ids": []}).WhichOneof("prompt")

    @pytest.mark.parametrize(
        ("prompt", "options", "field"),
        [
            (None, {}, "prompt"),
            ("hi", {"token_ids": [1]}, "prompt"),
            ("hi", {"seed": -1}, "sampling.seed"),
            ("hi", {"seed": 2**64}, "sampling.seed"),
            ("hi", {"temperature": "hot"}, "sampling.temperature"),
            ("hi", {"max_tokens": 1.5}, "stopping.max_tokens"),
            ("hi", {"min_delta_interval_s": "long"}, "response.min_delta_interval_s"),
            ("hi", {"logprobs": -1}, "response.logprobs"),
            ("hi", {"queue_limit_s": [1.0]}, "queue_limit_s"),
            ("hi", {"model": 3}, "model"),
            ("\ud800", {}, "prompt.text"),
            (None, {"token_ids": [2**40]}, "prompt.token_ids"),
            (["hi"], {}, "prompt.text"),
            ("hi", {"max_tokens": [9]}, "stopping.max_tokens"),
            ("hi", {"temperature": {"0": 1}}, "sampling.temperature"),
            ("hi", {"logit_bias": [1]}, "sampling.logit_bias"),
            ("hi", {"stop_token_ids": 2}, "stopping.stop_token_ids"),
            ("hi", {"stop": 2}, "stopping.stop"),
            ("hi", {"time_limit_s": "long"}, "time_limit_s"),
            (None, {"token_ids": 7}, "prompt.token_ids"),
            (None, {"messages": "hi"}, "prompt.messages"),
            (None, {"messages": {"role": "user", "content": "hi"}}, "prompt.messages"),
            (None, {"messages": [{"role": "user"}]}, "chat.messages[0]"),
            (None, {"messages": [{"role": "user", "content": 3}]}, "chat.messages[0].content"),
        ],
    )
    def test_what_cannot_be_sent_is_named(self, prompt, options, field):
        """
        A value that the message cannot carry raises InvalidParameter with its path.
        """
        with pytest.raises(InvalidParameter) as refused:
            build_request(prompt, options)

        assert field == refused.value.field

    @pytest.mark.parametrize("limit_s", [-1.0, float("inf"), 0.0])
    def test_limit_out_of_range_is_sent_for_the_server_to_judge(self, limit_s):
        """
        A time limit that no server takes is sent as it is given, not rounded to one that it takes.
        """
        assert limit_s == build_request("hi", {"time_limit_s": limit_s}).time_limit_s

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            (
                [1, 2, 3],
                "prompt must be text, not list; pass ids as token_ids=[...], and texts one by one",
            ),
            (
                [{"role": "user", "content": "hi"}],
                "prompt must be text, not list; pass a conversation as messages=[...]",
            ),
            (7, "prompt must be text, not int"),
        ],
        ids=["ids", "conversation", "number"],
    )
    def test_prompt_that_is_no_text_is_told_the_right_option(self, prompt, message):
        """
        A prompt of another type is refused with the option that takes such a value.
        """
        with pytest.raises(InvalidParameter) as refused:
            build_request(prompt, {})

        assert message == refused.value.message

    @pytest.mark.parametrize(
        ("name", "value", "sentence"),
        [
            ("max_tokens", -1, "max_tokens must be in 0 to 4294967295, not -1"),
            ("seed", 2**64, f"seed must be in 0 to {2**64 - 1}, not {2**64}"),
            ("priority", 2**31, f"priority must be in {-(2**31)} to {2**31 - 1}, not {2**31}"),
        ],
    )
    def test_integer_that_no_field_holds_is_told_the_range(self, name, value, sentence):
        """
        An integer that is too small or too large for its field is refused with what the field holds.
        """
        with pytest.raises(InvalidParameter) as refused:
            build_request("hi", {name: value})

        assert sentence == refused.value.message


class TestTokenizeRequest:
    def test_prompt_is_that_of_a_completion(self):
        """
        A text or a conversation is sent as a completion sends it; what is not given stays unset.
        """
        messages = [{"role": "user", "content": "hi"}]
        options = {"messages": messages, "template_args": {"a": 1}, "model": "m"}

        assert tokens_pb2.TokenizeRequest(text="hi") == tokenize_request("hi", {})
        asked = tokenize_request(None, {**options, "with_texts": True})
        assert build_request(None, options).chat == asked.chat
        assert ("m", True) == (asked.model, asked.with_texts)
        marked = tokenize_request("<s>", {"parse_special_tokens": True})
        assert (True, "<s>") == (marked.parse_special_tokens, marked.text)

    @pytest.mark.parametrize(
        ("prompt", "options"), [(None, {}), ("hi", {"messages": []})], ids=["none", "two"]
    )
    def test_exactly_one_prompt_is_given(self, prompt, options):
        """
        No prompt, or two, are refused before anything is sent.
        """
        with pytest.raises(InvalidParameter) as refused:
            tokenize_request(prompt, options)

        message = f"give exactly one of prompt and messages, got {2 if prompt else 0}"
        assert (message, "prompt") == (refused.value.message, refused.value.field)

    def test_options_of_a_completion_are_unknown_here(self):
        """
        An option that has no meaning for tokens is refused like any unknown name.
        """
        for name in ("token_ids", "temperature", "max_new_tokens"):
            with pytest.raises(TypeError, match=name):
                tokenize_request("hi", {name: 1})

    def test_ids_are_sent_as_they_are(self):
        """
        Ids and the model's name reach the message; what is no list of ids is refused.
        """
        asked = detokenize_request((1, 2), True, "m")
        wanted = tokens_pb2.DetokenizeRequest(token_ids=[1, 2], keep_special_tokens=True, model="m")
        assert wanted == asked
        assert tokens_pb2.DetokenizeRequest(token_ids=[3]) == detokenize_request([3], False, None)
        for ids in ("12", 3, ["a"], [2**40]):
            with pytest.raises(InvalidParameter) as refused:
                detokenize_request(ids, False, None)
            assert "token_ids" == refused.value.field


class TestPresets:
    RANGES: ClassVar = {
        "code": {"temperature": (0.0, 0.2), "repetition_penalty": (1.0, 1.0)},
        "summary": {"temperature": (0.2, 0.5), "repetition_penalty": (1.1, 1.1)},
        "chat": {
            "temperature": (0.7, 0.7),
            "top_p": (0.9, 0.9),
            "repetition_penalty": (1.1, 1.2),
        },
        "creative": {
            "temperature": (0.8, 1.2),
            "top_p": (0.95, 0.95),
            "repetition_penalty": (1.0, 1.0),
        },
    }

    def test_each_sets_what_the_guide_recommends(self):
        """
        Each preset gives exactly the documented parameters, each in its documented range.
        """
        assert set(self.RANGES) == set(SAMPLING_PRESETS)
        for name, ranges in self.RANGES.items():
            sampling = build_request("hi", {"preset": name}).sampling
            sent = {field.name: value for field, value in sampling.ListFields()}
            assert set(ranges) == set(sent)
            for parameter, (low, high) in ranges.items():
                assert low - 1e-6 <= sent[parameter] <= high + 1e-6, (name, parameter)

    def test_given_option_wins_over_the_preset(self):
        """
        An option beside a preset replaces its value, also where it is 0; None leaves it.
        """
        options = {"preset": "chat", "temperature": 0.0, "top_p": None}
        sampling = build_request("hi", options).sampling

        assert (0.0, pytest.approx(0.9)) == (sampling.temperature, sampling.top_p)

    @pytest.mark.parametrize("name", ["poetry", "", 3, ["chat"]])
    def test_unknown_preset_is_refused_with_those_there_are(self, name):
        """
        A preset that does not exist raises InvalidParameter that lists all.
        """
        with pytest.raises(InvalidParameter) as refused:
            build_request("hi", {"preset": name})

        assert (
            "preset",
            f"unknown preset {name!r}; presets: code, summary, chat, creative",
        ) == (refused.value.field, refused.value.message)


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("temprature", "Did you mean 'temperature'?"),
            ("max_new_tokens", "Did you mean 'max_tokens'?"),
            ("timeout", "Did you mean 'deadline_s'?"),
            ("idempotency_key", "Did you mean 'attempt_key'?"),
            ("chat_template_kwargs", "Did you mean 'template_args'?"),
            ("colour", "see tandem_client.GenerateOptions"),
        ],
    )
    @pytest.mark.parametrize("method", ["generate", "complete"])
    async def test_unknown_option_is_refused_at_every_entrance(self, server, method, name, hint):
        """
        An option of an unknown name raises TypeError, as Python does, with the name that was meant.
        """
        with Client(server.address) as client, pytest.raises(TypeError) as refused:
            getattr(client, method)("hi", **{name: 1})
        async with AsyncClient(server.address) as client:
            with pytest.raises(TypeError) as refused_async:
                await getattr(client, method)("hi", **{name: 1})

        assert f"unexpected keyword argument {name!r}" in str(refused.value)
        assert hint in str(refused.value)
        assert str(refused.value) == str(refused_async.value)
        assert [] == [*server.seen.generate, *server.seen.complete]

    def test_hints_name_options_that_exist(self):
        """
        Each name of another library points to an option of ours.
        """
        known = {*GenerateOptions.__annotations__, "deadline_s"}

        assert set() == set(build._ELSEWHERE.values()) - known
        assert set() == set(build._ELSEWHERE) & known
