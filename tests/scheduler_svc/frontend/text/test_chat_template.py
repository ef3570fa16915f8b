"""Rendering of a model's own chat template."""

import itertools
from pathlib import Path

import pytest

from scheduler_svc.frontend.text.chat_template import ChatTemplate, Conversation
from scheduler_svc.frontend.text.tokenizer import TextModel
from tandem.errors import ChatTemplateError, InvalidModel

BUNDLED = Path(__file__).parents[4] / "deploy" / "models" / "tandem-py"
USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages=USER, max_chars: int = 1000, **options: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(Conversation(messages=messages), max_chars=max_chars, **options)


class TestRender:
    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
            ("{% if add_generation_prompt %}go{% endif %}", "go"),
            ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
            ("{% for m in messages %}{% break %}{% endfor %}z", "z"),
            ("{% generation %}{{ 1 + 1 }}{% endgeneration %}", "2"),
            ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
            ("{{ strftime_now('%Y') | length }}", "4"),
            ("{{ 'no' if tools is none else 'tools' }}", "no"),
            ("{{ eos_token is defined }}", "False"),
        ],
        ids=["bos", "opening", "blocks", "loops", "generation", "json", "date", "tools", "eos"],
    )
    def test_environment_is_what_templates_expect(self, source, text):
        """
        Names, filters, tags and white space behave as model templates expect.
        """
        assert text == render(source)


class TestRefusal:
    @pytest.mark.parametrize(
        ("source", "sentence"),
        [
            ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must"),
            ("{{ messages[7].content.x }}", "cannot write these messages: UndefinedError"),
            ("{{ 1 / 0 }}", "cannot write these messages: ZeroDivisionError"),
            ("{{ messages[0].content + 1 }}", "cannot write these messages: TypeError"),
            ("{{ ''.__class__.__mro__ }}", "tried something unsafe"),
            ("{{ messages.append(1) }}", "tried something unsafe"),
            ("{{ 'a' * 10000000000 }}", "tried something unsafe: a product longer than"),
            ("{{ 9999999999 * [1] }}", "tried something unsafe: a product longer than"),
            ("{{ 10 ** 10 ** 9 }}", r"tried something unsafe: \*\* of numbers over 64"),
            ("{% for i in range(999999) %}{% endfor %}", "cannot write these messages"),
            ("{% for i in range(99999) %}{{ i }}{% endfor %}", "more than 1000 characters"),
        ],
    )
    def test_failure_is_a_sentence_about_the_messages(self, source, sentence):
        """
        A template that fails in any way raises ChatTemplateError on chat.messages.
        """
        with pytest.raises(ChatTemplateError, match=sentence) as caught:
            render(source)
        assert "chat.messages" == caught.value.field

    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(9) %}{{ i }}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% macro f() %}{% for i in range(9) %}x{% endfor %}{% endmacro %}{{ f() }}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        ],
        ids=["writing", "silent", "macro", "branching macro"],
    )
    def test_endless_loop_is_stopped_by_the_clock(self, source):
        """
        A loop that goes on past the time limit is given up, whether it writes or not.
        """
        clock = itertools.count(0.0, 2.0)
        with pytest.raises(ChatTemplateError, match="took more than 5 s"):
            render(source, clock=lambda: next(clock))

    def test_invalid_template_is_found_when_compiled(self):
        """
        A syntax error raises InvalidModel with its line.
        """
        with pytest.raises(InvalidModel, match="the chat template is invalid in line 2"):
            ChatTemplate("\n{% endfor %}", {})

    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in 'a' %}" * 30 + "{% endfor %}" * 30,
            "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
            "{{ " + "-" * 5000 + "1 }}",
        ],
        ids=["loops", "parentheses", "signs"],
    )
    def test_template_too_deep_to_compile_is_found_when_compiled(self, source):
        """
        A template that jinja2 or Python cannot compile raises InvalidModel too.
        """
        with pytest.raises(InvalidModel, match="the chat template is"):
            ChatTemplate(source, {})

    def test_products_and_powers_of_small_things_are_computed(self):
        """
        Small products and powers, the arithmetic that templates use, are computed.
        """
        assert "ababab 512 6 6.25" == render(
            "{{ 'ab' * 3 }} {{ 2 ** 9 }} {{ 2 * 3 }} {{ 2.5 ** 2 }}"
        )


CONVERSATIONS = [
    [{"role": "user", "content": "  hi\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Größe?\n  two lines"},
        {"role": "assistant", "content": "<b>&amp;</b> 'x'"},
        {"role": "user", "content": ""},
    ],
]


@pytest.mark.slow
class TestReference:
    @pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["one", "four"])
    @pytest.mark.parametrize("name", ["small", "bundled"])
    def test_prompt_is_what_transformers_makes(self, model_dir, name, conversation):
        """
        A conversation becomes the very ids that transformers makes with the same files.
        """
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415  # takes seconds

        directory = model_dir if name == "small" else BUNDLED
        reference = PreTrainedTokenizerFast.from_pretrained(directory)
        expected = reference.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=False
        )
        ids = TextModel.load(directory).encode_chat(
            Conversation(messages=conversation), max_prompt_len=2048
        )
        assert expected == ids
