"""Conversations in the shape of OpenAI's API become a message."""

from __future__ import annotations

import json

import pytest

from tandem.errors import InvalidParameter
from tandem.inference.v1 import chat_pb2
from tandem_client.request import build_request

USER = {"role": "user", "content": "hi"}


def chat_of(*messages: object, **options: object) -> chat_pb2.ChatPrompt:
    """Return the conversation that these messages and options become."""
    return build_request(None, {"messages": messages, **options}).chat


class TestMessages:
    def test_every_key_has_its_field(self):
        """
        A conversation with tools keeps each key in its field, and what is absent stays unset.
        """
        call = {"name": "f", "arguments": '{"b": 1,  "a": 2}'}
        user, assistant, tool = chat_of(
            {**USER, "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "it asks",
                "tool_calls": [{"id": "c", "type": "function", "function": call}],
            },
            {"role": "tool", "content": "", "tool_call_id": "c"},
        ).messages

        assert chat_pb2.ChatMessage(role="user", content="hi", name="ann") == user
        assert not assistant.HasField("content")
        assert "it asks" == assistant.reasoning
        (sent,) = assistant.tool_calls
        assert ("c", "f", call["arguments"]) == (sent.id, sent.name, sent.arguments_json)
        assert tool.HasField("content")
        assert ("tool", "", "c") == (tool.role, tool.content, tool.tool_call_id)

    def test_pieces_are_parts(self):
        """
        A content in pieces stays in pieces, and is no content besides.
        """
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]
        (message,) = chat_of({"role": "user", "content": parts}).messages

        assert ["a", ""] == [part.text for part in message.parts]
        assert not message.HasField("content")

    def test_arguments_that_are_a_dict_keep_order_and_numbers(self):
        """
        Arguments given as a dict become JSON with the keys in order, whole numbers and plain text.
        """
        arguments = {"b": 2**60 + 1, "a": "é", "c": {"z": None, "y": [1.5]}}
        function = {"name": "f", "arguments": arguments}
        (message,) = chat_of({"role": "assistant", "tool_calls": [{"function": function}]}).messages
        text = message.tool_calls[0].arguments_json

        assert list(arguments) == list(json.loads(text))
        assert arguments == json.loads(text)
        assert "é" in text

    def test_call_without_arguments_has_none(self):
        """
        A call without arguments is sent without, for the server to take as an empty object.
        """
        calls = [{"function": {"name": "f"}}]
        (message,) = chat_of({"role": "assistant", "tool_calls": calls}).messages

        assert chat_pb2.ToolCall(name="f") == message.tool_calls[0]

    def test_keys_without_a_value_are_absent(self):
        """
        None counts as absent, since libraries fill in every key that a message may have.
        """
        filled = {**USER, "refusal": None, "tool_calls": None, "name": None, "reasoning": None}
        (message,) = chat_of(filled).messages

        assert chat_pb2.ChatMessage(**USER) == message

    def test_reasoning_has_two_names(self):
        """
        `reasoning_content` is `reasoning`; both together are refused.
        """
        (message,) = chat_of({**USER, "reasoning_content": "so"}).messages
        assert "so" == message.reasoning
        with pytest.raises(InvalidParameter) as refused:
            chat_of({**USER, "reasoning_content": "so", "reasoning": "so"})
        assert "chat.messages[0].reasoning" == refused.value.field


CALL = {"id": "c", "type": "function", "function": {"name": "f"}}
WRONG = {
    "no dict": ("hi", ""),
    "no role": ({"content": "hi"}, ""),
    "no content": ({"role": "user"}, ""),
    "role is a number": ({"role": 3, "content": "hi"}, ".role"),
    "content is a number": ({"role": "user", "content": 3}, ".content"),
    "content is a dict": ({"role": "user", "content": {"text": "hi"}}, ".content"),
    "unknown key": ({**USER, "colour": "red"}, ".colour"),
    "piece is text": ({"role": "user", "content": ["hi"]}, ".content[0]"),
    "picture": (
        {"role": "user", "content": [{"type": "image_url", "text": "x"}]},
        ".content[0]",
    ),
    "unknown key of a piece": (
        {"role": "user", "content": [{"type": "text", "text": "a", "image_url": "b"}]},
        ".content[0].image_url",
    ),
    "piece without text": ({"role": "user", "content": [{"type": "text"}]}, ".content[0]"),
    "text of a piece is a number": (
        {"role": "user", "content": [{"type": "text", "text": 3}]},
        ".content[0].text",
    ),
    "calls are text": ({"role": "assistant", "tool_calls": "f"}, ".tool_calls"),
    "call is text": ({"role": "assistant", "tool_calls": ["f"]}, ".tool_calls[0]"),
    "call of another type": (
        {"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]},
        ".tool_calls[0].type",
    ),
    "call of nothing": (
        {"role": "assistant", "tool_calls": [CALL, {"id": "c"}]},
        ".tool_calls[1].function",
    ),
    "call without a name": (
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
        ".tool_calls[0].function",
    ),
    "id is a number": (
        {"role": "assistant", "tool_calls": [{**CALL, "id": 7}]},
        ".tool_calls[0].id",
    ),
    "unknown key of a call": (
        {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]},
        ".tool_calls[0].index",
    ),
    "arguments are a list": (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
        ".tool_calls[0].function.arguments",
    ),
    "arguments are no JSON": (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": {1}}}}]},
        ".tool_calls[0].function.arguments",
    ),
    "half a character": ({"role": "user", "content": "\ud800"}, ".content"),
}


class TestRefusals:
    @pytest.mark.parametrize("case", WRONG)
    def test_what_cannot_be_sent_is_named(self, case):
        """
        A key or value that the message cannot carry raises InvalidParameter with its path.
        """
        message, path = WRONG[case]
        with pytest.raises(InvalidParameter) as refused:
            chat_of(USER, message)

        assert f"chat.messages[1]{path}" == refused.value.field

    def test_misspelt_key_is_told_the_right_one(self):
        """
        An unknown key is refused with the one that was meant, or with all that are known.
        """
        with pytest.raises(InvalidParameter, match="did you mean 'tool_calls'"):
            chat_of({**USER, "tool_cals": []})
        with pytest.raises(InvalidParameter, match="known are role, name, tool_call_id"):
            chat_of({**USER, "zzz": 1})


class TestTemplate:
    def test_tools_and_arguments_are_json_in_their_order(self):
        """
        Tools and template arguments become JSON texts: keys in order, numbers and text as given.
        """
        tools = [{"type": "function", "function": {"name": "é", "parameters": {"z": 1, "a": 2}}}]
        args = {"enable_thinking": False, "budget": 2**60 + 1}
        chat = chat_of(USER, tools=tools, template_args=args)
        (tool,) = chat.tools

        expected = '{"type": "function", "function": {"name": "é", "parameters": {"z": 1, "a": 2}}}'
        assert expected == tool.definition_json
        assert (
            '{"enable_thinking": false, "budget": 1152921504606846977}' == chat.template_args_json
        )

    def test_what_is_not_given_stays_unset(self):
        """
        Without options of the template nothing of it is sent; False and an empty dict are.
        """
        assert ["messages"] == [field.name for field, _ in chat_of(USER).ListFields()]
        chat = chat_of(
            USER, template_args={}, add_generation_prompt=False, continue_final_message=True
        )
        assert chat.HasField("add_generation_prompt")
        assert ("{}", False, True) == (
            chat.template_args_json,
            chat.add_generation_prompt,
            chat.continue_final_message,
        )

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"tools": {"name": "f"}}, "chat.tools"),
            ({"tools": ["f"]}, "chat.tools[0]"),
            ({"tools": [{}, {"a": float("nan")}]}, "chat.tools[1]"),
            ({"template_args": "{}"}, "chat.template_args_json"),
            ({"template_args": {"a": object()}}, "chat.template_args_json"),
            ({"add_generation_prompt": "yes"}, "chat.add_generation_prompt"),
        ],
    )
    def test_what_cannot_be_sent_is_named(self, options, field):
        """
        A value that JSON or the message cannot carry raises InvalidParameter with its path.
        """
        with pytest.raises(InvalidParameter) as refused:
            chat_of(USER, **options)

        assert field == refused.value.field

    @pytest.mark.parametrize(
        "name", ["tools", "template_args", "add_generation_prompt", "continue_final_message"]
    )
    @pytest.mark.parametrize("prompt", [{"prompt": "hi"}, {"token_ids": [1]}], ids=["text", "ids"])
    def test_options_of_a_conversation_need_one(self, name, prompt):
        """
        An option of a conversation beside a text or ids is refused, not left out in silence.
        """
        options = {name: [] if name == "tools" else True, **prompt}
        with pytest.raises(InvalidParameter) as refused:
            build_request(options.pop("prompt", None), options)

        assert f"chat.{name}" == refused.value.field
