"""Chat template of a model, rendered in a sandbox with the environment that templates expect."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import ChatTemplateError, InvalidModel

MAX_RENDER_S = 5.0
FIELD = "chat.messages"
_TICK = "_tick"
_MAX_PRODUCT_LEN = 1 << 20


RESERVED_ARGS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
    | {"bos_token", "eos_token", "pad_token", "unk_token", _TICK}
)
"""Variables of a template that no client may set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """
    Variables that a chat template is rendered with.

    Attributes:
        messages: Messages, oldest first, with the keys that templates know.
        tools: Definitions of tools; empty for none.
        template_args: More variables.
        add_generation_prompt: The opening of an assistant turn comes at the end.
        continue_final_message: The text ends with that of the last message.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the template, but for the server's own functions and special tokens."""
        return {
            "messages": list(self.messages),
            "add_generation_prompt": self.add_generation_prompt,
            "tools": list(self.tools) or None,
            "documents": None,
            **self.template_args,
        }

    @property
    def final_text(self) -> str:
        """Text of the last message."""
        content = self.messages[-1].get("content") or ""
        return content if isinstance(content, str) else str(content[-1]["text"])


class ChatTemplate:
    """Compiled chat template; thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Compile a template.

        Args:
            source: Jinja text.
            special_tokens: Texts of special tokens by name, such as "bos_token".

        Raises:
            InvalidModel: The template is not valid.
        """
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,  # prompts are plain text, not HTML
            extensions=[loopcontrols, _GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            code = environment.compile(_with_ticks(environment.parse(source)))
        except TemplateSyntaxError as error:
            raise InvalidModel(
                f"the chat template is invalid in line {error.lineno}: {error.message}"
            ) from error
        except (SyntaxError, RecursionError, ValueError, MemoryError) as error:
            # Python cannot compile it: too many nested loops, or an expression that is too long.
            raise InvalidModel(
                f"the chat template is nested too deeply to be compiled: {error}"
            ) from error
        self._template = Template.from_code(environment, code, environment.make_globals(None))
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        conversation: Conversation,
        *,
        max_chars: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> str:
        """
        Render a conversation as a prompt.

        Args:
            conversation: Its messages, and the template's other variables.
            max_chars: Longest prompt that can be used, in characters.
            clock: Returns seconds, for the limit on rendering time.

        Raises:
            ChatTemplateError: The template refused the messages, failed, or exceeded a limit.
        """
        parts: list[str] = []
        num_chars, give_up_s = 0, clock() + MAX_RENDER_S

        def tick() -> None:
            if clock() > give_up_s:
                raise _TooLong

        try:
            for part in self._template.generate(
                **conversation.variables, **{_TICK: tick}, **self._special_tokens
            ):
                parts.append(part)
                num_chars += len(part)
                if num_chars > max_chars:
                    raise ChatTemplateError(
                        f"the chat template wrote more than {max_chars} characters, "
                        "more than any prompt may have",
                        field=FIELD,
                    )
        except _Raised as error:
            raise ChatTemplateError(
                f"the chat template refused the messages: {error.message}", field=FIELD
            ) from error
        except _TooLong:
            raise ChatTemplateError(
                f"the chat template took more than {MAX_RENDER_S:g} s", field=FIELD
            ) from None
        except SecurityError as error:
            raise ChatTemplateError(
                f"the chat template tried something unsafe: {error}", field=FIELD
            ) from error
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(
                f"the chat template cannot write these messages: {type(error).__name__}: {error}",
                field=FIELD,
            ) from error
        text = "".join(parts)
        return (
            _cut_after(text, conversation.final_text)
            if conversation.continue_final_message
            else text
        )


_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
    MemoryError,
)
"""Exceptions that a template's own expressions can raise."""


class _Raised(TemplateError):
    """The template called raise_exception."""


class _TooLong(Exception):  # not one of the faults that templates have by themselves
    """The template exceeded its time limit."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox: a template cannot reach the server, nor one operation take all memory or time."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or power, but refuse one that is larger than any prompt needs."""
        if operator == "**":
            if not all(isinstance(each, int | float) and abs(each) <= 64 for each in (left, right)):
                raise SecurityError(f"{operator} of numbers over 64, or of something else")
        else:
            for many, times in ((left, right), (right, left)):
                is_long = isinstance(many, Sized) and isinstance(times, int)
                if is_long and len(many) * times > _MAX_PRODUCT_LEN:
                    raise SecurityError(f"a product longer than {_MAX_PRODUCT_LEN}")
        return super().call_binop(context, operator, left, right)


def _cut_after(text: str, final_text: str) -> str:
    """
    Return the rendered text up to the end of the last message's text, which templates may strip.

    Raises:
        ChatTemplateError: The template does not write that text.
    """
    kept = final_text if final_text in text else final_text.strip()
    at = text.rfind(kept)
    if at < 0:
        raise ChatTemplateError(
            "the chat template does not write the last message as it is, so that it cannot be "
            "continued",
            field=FIELD,
        )
    return text[: at + len(kept)]


def _with_ticks(template: nodes.Template) -> nodes.Template:
    """
    Make a template check the clock in every iteration of a loop and at every call of a macro, so
    that neither can go on for ever.
    """
    loops: Iterable[nodes.For] = template.find_all(nodes.For)
    macros: Iterable[nodes.Macro] = template.find_all(nodes.Macro)
    bodies: list[nodes.For | nodes.Macro] = [*loops, *macros]
    for repeated in bodies:
        clock = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        repeated.body.insert(0, nodes.ExprStmt(clock).set_lineno(repeated.lineno))
    return template


def _raise(message: object) -> NoReturn:
    raise _Raised(str(message))


def _strftime_now(pattern: str) -> str:
    # Templates print the server's local date, as they do where they are developed.
    return dt.datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes for HTML, which would change prompts.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _GenerationTag(Extension):
    """Tag `{% generation %}`, which marks assistant text for training; only its content is used."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a plain class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
