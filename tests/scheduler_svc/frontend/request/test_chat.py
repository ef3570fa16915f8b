"""A conversation becomes what templates know; what they cannot be given is refused by its path."""

from __future__ import annotations

import pytest

from scheduler_svc.frontend.request.chat import MAX_JSON_CHARS, MAX_JSON_SIGNS, read_chat
from scheduler_svc.frontend.text.chat_template import ChatTemplate
from tandem.errors import ChatTemplateError, EmptyPrompt, FeatureUnsupported, InvalidParameter
from tandem.inference.v1.chat_pb2 import ChatPrompt

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "name": "add", "arguments_json": '{"b": 12345678901234567890, "a": 1}'}


def rendered(source: str, **fields) -> str:
    """Return what a template writes of a conversation."""
    return ChatTemplate(source, {}).render(read_chat(ChatPrompt(**fields)), max_chars=10_000)


class TestReading:
    def test_unset_fields_are_not_there_for_the_template(self):
        """
        A message has only the keys that were sent; an empty content is one.
        """
        source = "{% for m in messages %}{{ m.keys() | list | join(',') }};{% endfor %}"
        messages = [{"role": "user", "content": ""}, {"role": "assistant"}]
        assert "role,content;role;" == rendered(source, messages=messages)

    def test_calls_of_tools_have_the_shape_that_templates_know(self):
        """
        Arguments keep the order of their keys and integers of any size.
        """
        messages = [
            USER,
            {"role": "assistant", "reasoning": "sum", "tool_calls": [CALL]},
            {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        ]
        source = (
            "{% for m in messages %}{{ m.reasoning_content }}{{ m.tool_call_id }}{{ m.name }}"
            "{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{% endfor %}"
        )
        call = (
            '{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '
            '{"b": 12345678901234567890, "a": 1}}}'
        )
        assert f"sum{call}c1add" == rendered(source, messages=messages)

    def test_parts_become_a_list(self):
        """
        A content in pieces is a list of texts with their type.
        """
        messages = [{"role": "user", "parts": [{"text": "a"}, {"text": "b"}]}]
        source = "{{ messages[0].content | tojson }}"
        expected = '[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]'
        assert expected == rendered(source, messages=messages)

    def test_tools_and_arguments_reach_the_template(self):
        """
        Definitions of tools and more variables are handed over as they are.
        """
        source = "{{ tools | tojson }}{{ enable_thinking }}{{ tools is none }}"
        tools = [{"definition_json": '{"z": 1, "a": [1.5]}'}]
        args = '{"enable_thinking": false}'
        assert '[{"z": 1, "a": [1.5]}]FalseFalse' == rendered(
            source, messages=[USER], tools=tools, template_args_json=args
        )
        assert "nullTrue" == rendered(source, messages=[USER])

    @pytest.mark.parametrize(
        ("fields", "written"),
        [
            ({}, "[hi]>"),
            ({"add_generation_prompt": True}, "[hi]>"),
            ({"add_generation_prompt": False}, "[hi]"),
            ({"continue_final_message": True}, "[hi"),
        ],
    )
    def test_end_of_the_prompt_is_chosen(self, fields, written):
        """
        An assistant turn is opened unless that is switched off or the last message goes on.
        """
        source = (
            "{% for m in messages %}[{{ m.content }}]{% endfor %}"
            "{% if add_generation_prompt %}>{% endif %}"
        )
        assert written == rendered(source, messages=[USER], **fields)

    def test_stripped_final_message_is_continued_where_it_ends(self):
        """
        A template that strips messages is cut after the stripped text.
        """
        messages = [{"role": "assistant", "content": " so "}]
        assert "[so" == rendered(
            "[{{ messages[0].content.strip() }}]", messages=messages, continue_final_message=True
        )

    def test_final_message_that_is_not_written_cannot_be_continued(self):
        """
        A template that does not write the last message is refused for it.
        """
        with pytest.raises(ChatTemplateError, match="cannot be continued"):
            rendered("x", messages=[USER], continue_final_message=True)


class TestRefusal:
    def test_conversation_without_messages_is_an_empty_prompt(self):
        """
        A chat has at least one message.
        """
        with pytest.raises(EmptyPrompt, match="at least one message"):
            read_chat(ChatPrompt())

    def test_part_of_an_unknown_kind_is_not_supported(self):
        """
        A part that newer clients know, such as an image, is refused and not left out.
        """
        with pytest.raises(FeatureUnsupported) as caught:
            read_chat(ChatPrompt(messages=[{"role": "user", "parts": [{"text": "a"}, {}]}]))
        assert "chat.messages[0].parts[1]" == caught.value.field

    @pytest.mark.parametrize(
        ("fields", "path", "sentence"),
        [
            (
                {"messages": [USER, {"content": "x"}]},
                "chat.messages[1].role",
                "role must not be empty.",
            ),
            (
                {"messages": [USER] * 4097},
                "chat.messages",
                "chat must have at most 4096 messages, got 4097.",
            ),
            (
                {"messages": [USER], "tools": [{"definition_json": "{}"}] * 129},
                "chat.tools",
                "chat must have at most 128 tools, got 129.",
            ),
            (
                {"messages": [USER | {"parts": [{"text": "x"}]}]},
                "chat.messages[0].parts",
                "set content or parts, not both.",
            ),
            (
                {"messages": [USER | {"tool_calls": [{"id": "c"}]}]},
                "chat.messages[0].tool_calls[0].name",
                "the name of a tool must not be empty.",
            ),
            (
                {"messages": [USER], "template_args_json": '{"messages": []}'},
                "chat.template_args_json",
                "messages is set by the server itself.",
            ),
            (
                {"messages": [{"role": "user"}], "continue_final_message": True},
                "chat.continue_final_message",
                "continue_final_message needs a last message with text.",
            ),
            (
                {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
                "chat.continue_final_message",
                "add_generation_prompt and continue_final_message exclude each other.",
            ),
        ],
    )
    def test_malformed_conversation_is_refused(self, fields, path, sentence):
        """
        The path of the wrong field comes with a sentence.
        """
        with pytest.raises(InvalidParameter) as caught:
            read_chat(ChatPrompt(**fields))
        assert (path, sentence) == (caught.value.field, caught.value.message)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            '{"a": NaN}',
            '{"a": "\\ud800"}',
            '{"a": ["\\ud83d", "\\ude00"]}',
            '{"a": {"\\udfff": 1}}',
            "[" * 100_000,
            '{"a":' * 70 + "1" + "}" * 70,
        ],
    )
    def test_text_that_is_no_json_object_is_refused(self, text):
        """
        Broken, endless or deep JSON, numbers that JSON lacks and half a character are refused.
        """
        chat = ChatPrompt(messages=[USER], tools=[{"definition_json": text}])
        with pytest.raises(InvalidParameter) as caught:
            read_chat(chat)
        assert "chat.tools[0].definition_json" == caught.value.field

    def test_half_a_character_is_told(self):
        """
        The sentence says which half, and what to write instead.
        """
        chat = ChatPrompt(messages=[USER], template_args_json='{"a": "\\ud83d"}')
        with pytest.raises(InvalidParameter, match=r"surrogate pair, \\ud83d: write both halves"):
            read_chat(chat)


def called(arguments: str, count: int = 1) -> dict[str, object]:
    """Return a message that calls a tool with these arguments so many times."""
    return {"role": "assistant", "tool_calls": [{"name": "f", "arguments_json": arguments}] * count}


class TestBoundOfJson:
    NESTED = '{"a":[' + ",".join(["[" * 50 + "]" * 50] * 38_000) + "]}"

    @pytest.mark.parametrize("text", [NESTED, '{"a":[' + "{}," * 20_000 + "{}]}"])
    def test_many_values_are_refused_unparsed(self, text, monkeypatch):
        """
        A text of millions of values costs no more than its signs take to be counted.
        """
        monkeypatch.setattr("json.loads", None)
        with pytest.raises(InvalidParameter) as caught:
            read_chat(ChatPrompt(messages=[USER], template_args_json=text))
        assert "chat.template_args_json" == caught.value.field

    def test_signs_of_all_texts_count_together(self):
        """
        The error has the path of the text that passes the limit, the limit, and what to do.
        """
        half = '{"a":[' + "[]," * (MAX_JSON_SIGNS // 4 - 2) + "[]]}"
        tools = [{"definition_json": half}]
        read_chat(ChatPrompt(messages=[USER, called(half)], tools=tools))
        with pytest.raises(InvalidParameter) as caught:
            read_chat(ChatPrompt(messages=[USER, called(half, 2)], tools=tools))
        assert "chat.messages[1].tool_calls[1].arguments_json" == caught.value.field
        assert {"limit": "16384"} == caught.value.metadata
        assert (
            "the JSON texts of chat (template_args_json, definition_json, arguments_json) must have "
            "at most 16384 of the signs [ { , : outside of strings together, and pass that here: "
            "send fewer values."
        ) == caught.value.message

    def test_signs_in_strings_do_not_count(self):
        """
        Code that a tool was called with has thousands of commas, and is one value.
        """
        code = r'{"code": "' + r"f([a, {b: \"c\\\"}])\n" * 10_000 + r'", "to": "x"}'
        conversation = read_chat(ChatPrompt(messages=[USER, called(code)]))
        (call,) = conversation.messages[1]["tool_calls"]
        assert 'f([a, {b: "c\\"}])\n' * 10_000 == call["function"]["arguments"]["code"]

    @pytest.mark.parametrize("text", ['"' + "," * 250_000, '"' + '\\",' * 80_000, '",\\' * 80_000])
    def test_strings_without_end_are_refused(self, text):
        """
        Signs after a quote that is never closed are those of a string, which is no object.
        """
        with pytest.raises(InvalidParameter, match="not JSON"):
            read_chat(ChatPrompt(messages=[USER], template_args_json=text))

    def test_characters_of_all_texts_count_together(self):
        """
        Texts are refused over 256 Ki characters, and served with just as many.
        """
        text = '{"a": "' + "x" * (MAX_JSON_CHARS // 2 - 9) + '"}'
        read_chat(ChatPrompt(messages=[USER, called(text, 2)]))
        with pytest.raises(InvalidParameter) as caught:
            read_chat(ChatPrompt(messages=[USER, called(text, 2), called("{}")]))
        assert "chat.messages[2].tool_calls[0].arguments_json" == caught.value.field
        assert {"limit": "262144"} == caught.value.metadata
        assert (
            "the JSON texts of chat (template_args_json, definition_json, arguments_json) must have "
            "at most 262144 characters together, and pass that here: leave out tools or old calls "
            "of tools, or shorten them."
        ) == caught.value.message
