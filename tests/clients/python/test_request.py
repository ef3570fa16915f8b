"""Keyword arguments become a message."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tandem.errors import InvalidParameter
from tandem_client import SAMPLING_PRESETS, AsyncClient, Client, GenerateOptions
from tandem_client import request as request_module
from tandem_client.request import build_request


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
                "time_limit_s": 1.5,
                "request_id": "mine",
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
        assert (1500, "mine") == (request.time_limit_ms, request.request_id)

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
            ("hi", {"time_limit_s": -1}, "time_limit_ms"),
            ("\ud800", {}, "prompt.text"),
            (None, {"token_ids": [2**40]}, "prompt.token_ids"),
            (["hi"], {}, "prompt.text"),
            ("hi", {"max_tokens": [9]}, "stopping.max_tokens"),
            ("hi", {"temperature": {"0": 1}}, "sampling.temperature"),
            ("hi", {"logit_bias": [1]}, "sampling.logit_bias"),
            ("hi", {"stop_token_ids": 2}, "stopping.stop_token_ids"),
            ("hi", {"stop": 2}, "stopping.stop"),
            ("hi", {"time_limit_s": "long"}, "time_limit_ms"),
            ("hi", {"time_limit_s": float("inf")}, "time_limit_ms"),
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

        assert set() == set(request_module._ELSEWHERE.values()) - known
        assert set() == set(request_module._ELSEWHERE) & known
