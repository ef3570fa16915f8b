"""Names of fields in errors: what the user of HTTP has typed."""

from __future__ import annotations

import json

import pytest

from tandem.errors import InvalidParameter, PromptTooLong
from tandem_openai_gateway.api.field_names import TYPED, typed_message, typed_name
from tests.clients.python.fake_server import Act

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
CALLING = {"role": "assistant", "tool_calls": [{"type": "other"}]}
OF_ALL = [
    ("prompt", "prompt"),
    ("prompt.text", "prompt"),
    ("text", "prompt"),
    ("prompt.token_ids", "prompt"),
    ("token_ids", "prompt"),
    ("token_ids.ids", "prompt"),
    ("token_ids.ids[3]", "prompt[3]"),
    ("chat", "messages"),
    ("chat.template_args_json", "chat_template_kwargs"),
    ("chat.template_args", "chat_template_kwargs"),
    ("chat.continue_final_message", "continue_final_message"),
    ("chat.add_generation_prompt", "add_generation_prompt"),
    ("chat.tools", "tools"),
    ("chat.tools[1].definition_json", "tools[1]"),
    ("chat.messages", "messages"),
    ("chat.messages[2].role", "messages[2].role"),
    ("chat.messages[2].name", "messages[2].name"),
    ("chat.messages[2].content", "messages[2].content"),
    ("chat.messages[2].parts[1]", "messages[2].content[1]"),
    ("chat.messages[2].reasoning", "messages[2].reasoning_content"),
    ("chat.messages[2].tool_calls[1].name", "messages[2].tool_calls[1].function.name"),
    (
        "chat.messages[2].tool_calls[1].arguments_json",
        "messages[2].tool_calls[1].function.arguments",
    ),
    ("sampling.top_p", "top_p"),
    ("sampling.logit_bias[5]", "logit_bias[5]"),
    ("sampling.allowed_token_ids[0]", "allowed_token_ids[0]"),
    ("stopping.include_stop", "include_stop_str_in_output"),
    ("stopping.max_tokens", "max_tokens"),
    ("stopping.stop_token_ids[0]", "stop_token_ids[0]"),
    ("response.token_bytes", "logprobs"),
    ("response.logprobs", "logprobs"),
    ("response.prompt_logprobs", "prompt_logprobs"),
    ("with_texts", "return_token_strs"),
    ("n", "n"),
    ("model", "model"),
]
OF_ONE = [
    (CHAT, HI, ("prompt", "messages")),
    (CHAT, HI, ("stopping.max_tokens", "max_tokens")),
    (CHAT, HI | {"max_completion_tokens": 3}, ("stopping.max_tokens", "max_completion_tokens")),
    (CHAT, HI | {"logprobs": True}, ("response.logprobs", "logprobs")),
    (CHAT, HI | {"logprobs": True, "top_logprobs": 2}, ("response.logprobs", "top_logprobs")),
    (CHAT, HI | {"chat_template_kwargs": {}}, ("chat.template_args_json", "chat_template_kwargs")),
    (COMPLETION, TEXT, ("text", "prompt")),
    (COMPLETION, {"prompt": [1]}, ("token_ids.ids[0]", "prompt[0]")),
    (COMPLETION, {"prompt": [[1], [2]]}, ("token_ids.ids[0]", "prompt")),
    (COMPLETION, TEXT | {"prompt_logprobs": 1}, ("response.prompt_logprobs", "prompt_logprobs")),
    (COMPLETION, TEXT | {"echo": True, "logprobs": 1}, ("response.prompt_logprobs", "logprobs")),
    (COMPLETION, TEXT | {"echo": True, "max_tokens": 0}, ("response.prompt_logprobs", "echo")),
    (RESPONSE, {"input": "hi"}, ("prompt", "input")),
    (RESPONSE, {"input": "hi"}, ("chat.messages", "input")),
    (RESPONSE, {"input": "hi"}, ("chat.messages[0].content", "input")),
    (RESPONSE, {"input": "hi", "instructions": "a"}, ("chat.messages[0].content", "instructions")),
    (RESPONSE, {"input": "hi", "instructions": "a"}, ("chat.messages[1].content", "input")),
    (
        RESPONSE,
        {"input": HI["messages"], "instructions": "a"},
        ("chat.messages[1].role", "input[0].role"),
    ),
    (RESPONSE, {"input": "hi"}, ("stopping.max_tokens", "max_tokens")),
    (
        RESPONSE,
        {"input": "hi", "max_output_tokens": 3},
        ("stopping.max_tokens", "max_output_tokens"),
    ),
]


class TestNames:
    @pytest.mark.parametrize(("field", "typed"), OF_ALL)
    def test_field_has_the_name_of_http(self, field, typed):
        """
        A field that HTTP names otherwise has that name in an error, and others have their own.
        """
        assert typed == typed_name(field)

    def test_every_name_that_differs_is_here(self):
        """
        Each pair of the table is among those above.
        """
        tried = {(field.removeprefix("chat.").rpartition(".")[2], typed) for field, typed in OF_ALL}
        assert {(name.rpartition(".")[2], typed) for name, typed in TYPED.items()} <= tried

    @pytest.mark.parametrize(("path", "body", "field_typed"), OF_ONE)
    def test_error_names_what_the_request_typed(self, http, server, path, body, field_typed):
        """
        Where a path or a request has another name for a field an error has that one.
        """
        field, typed = field_typed
        server.play(*[Act(accept=False, error=InvalidParameter("x", field=field))] * 2)
        assert typed == http.post(path, json=body).json()["error"]["param"]

    def test_stream_that_fails_names_what_the_request_typed(self, http, server):
        """
        So does an error in the middle of a stream.
        """
        server.play(Act(error=PromptTooLong("x", field="prompt")))
        lines = http.post(CHAT, json=HI | {"stream": True}).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "messages" == events[-1]["error"]["param"]

    @pytest.mark.parametrize(
        ("path", "body", "typed"),
        [
            ("/tokenize", {"messages": [CALLING]}, "messages[0].tool_calls[0].type"),
            (CHAT, {"messages": [CALLING]}, "messages[0].tool_calls[0].type"),
            ("/detokenize", {"tokens": [1, -1]}, "tokens"),
        ],
    )
    def test_what_cannot_be_sent_is_named_as_it_was_typed(self, http, path, body, typed):
        """
        Errors that are found before a scheduler is asked are named so, too.
        """
        assert typed == http.post(path, json=body).json()["error"]["param"]


class TestMessages:
    @pytest.mark.parametrize(
        ("message", "field", "told"),
        [
            ("template_args_json is no object.", "chat.template_args_json", "chat_template_kwargs is no object."),
            ("the chat.template_args_json are long", "chat.template_args_json", "the chat_template_kwargs are long"),
            ("logprobs must be in [0, 20]", "response.logprobs", "logprobs must be in [0, 20]"),
            ("include_stop needs stop", "stopping.include_stop", "include_stop_str_in_output needs stop"),
            ("the text is too long", "text", "the text is too long"),
            ("top_p must be above 0, got 2.", "sampling.top_p", "top_p must be above 0, got 2."),
            ("chat.tools[1].definition_json is wrong", "chat.tools[1].definition_json", "tools[1] is wrong"),
            ("x", None, "x"),
        ],
    )  # fmt: skip
    def test_text_has_the_name_of_http(self, message, field, told):
        """
        The text of an error has the typed name where it had the field's, and words stay words.
        """
        error = InvalidParameter(message, field=field)
        assert told == typed_message(error, typed_name(field or ""))
