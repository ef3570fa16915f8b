"""Input of `tandem chat`: messages of one or more lines, and commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tandem.wording import nearest
from tandem_client.cli.shared.request_options import SAMPLING_OPTIONS, kind_of
from tandem_client.params import BOTH_CHANGED, SAMPLING_PRESETS, GenerateOptions, changes_both

Turn = dict[str, str]

FENCE = '"""'
UNSET = "default"
HELP = f"""\
/help             list these commands
/exit             leave, as Ctrl-D does
/clear            forget the conversation, but not the instructions; also /reset
/system TEXT      replace the instructions; without TEXT show them, "" for none
/set NAME VALUE   change an option, e.g. /set temperature 0.7; {UNSET} takes it back; /set shows all
/save FILE        write the conversation to a file, as JSON
//TEXT            send TEXT with one slash before it
{FENCE}               begin and end a message of several lines; or end each line with a backslash"""

SETTABLE = {
    name: kind_of(name) for name in ("preset", "max_tokens", "min_tokens", *SAMPLING_OPTIONS)
}
"""Options that /set takes, with the types of their values; the server checks the ranges."""


class Leave(Exception):
    """Signal that the user wants to end the conversation."""


class Mistake(Exception):
    """Error of a command that cannot be executed; the text says why, and what to type."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Instructions, turns so far, and the options of the next turn."""

    system: str | None
    options: GenerateOptions
    turns: list[Turn] = field(default_factory=list)

    @property
    def opening(self) -> list[Turn]:
        """List with the instructions as a turn; empty without instructions."""
        return [] if self.system is None else [_turn("system", self.system)]

    def messages_with(self, asked: str) -> list[Turn]:
        """Return the conversation with one more turn of the user."""
        return [*self.opening, *self.turns, _turn("user", asked)]

    def add(self, asked: str, answer: str) -> None:
        """Append a question and its answer."""
        self.turns += [_turn("user", asked), _turn("assistant", answer)]


@dataclass(frozen=True, slots=True)
class Message:
    """Typed text: a message for the model, or a command."""

    text: str
    is_command: bool


def read_message(ask: Callable[[str], str]) -> Message:
    """
    Read one message with all its lines.

    Args:
        ask: Function that shows a prompt and reads a line; raises EOFError at the end of input.
    """
    line = ask("> ")
    if line.strip().startswith(FENCE):
        return Message(_until_fence(line.strip().removeprefix(FENCE), ask), is_command=False)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        try:
            lines.append(ask("... "))
        except EOFError:
            break
    text = "\n".join(lines).strip()
    if text.startswith("//"):
        return Message(text[1:], is_command=False)
    return Message(text, is_command=text.startswith("/"))


def _until_fence(first: str, ask: Callable[[str], str]) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(ask("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    return "\n".join(lines).strip("\n")


def run_command(text: str, conversation: Conversation) -> str:
    """
    Execute a line that begins with a slash, and return the text for the user.

    Raises:
        Leave: The command is /exit or an alias of it.
        Mistake: There is no such command, or its arguments are wrong.
    """
    name, _, argument = text.partition(" ")
    command = _COMMANDS.get(name)
    if command is None:
        meant = nearest(name, _COMMANDS)
        hint = f"did you mean {meant}?" if meant else "/help lists all."
        raise Mistake(f"there is no command {name}: {hint} To send it as it is, type /{name}")
    return command(conversation, argument.strip())


def _help(_conversation: Conversation, _argument: str) -> str:
    return f"commands:\n{HELP}"


def _leave(_conversation: Conversation, _argument: str) -> str:
    raise Leave


def _clear(conversation: Conversation, _argument: str) -> str:
    conversation.turns.clear()
    return "the conversation is forgotten"


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        conversation.system = None if argument == '""' else argument
    if conversation.system is None:
        return "there are no instructions"
    return f"the instructions are: {conversation.system}"


def _set(conversation: Conversation, argument: str) -> str:
    options = cast("dict[str, Any]", conversation.options)
    if not argument:
        given = [f"{name} {options[name]}" for name in SETTABLE if options.get(name) is not None]
        rest = f"all else is the server's choice; there are {', '.join(SETTABLE)}"
        return f"{', '.join(given) or 'nothing is set'}; {rest}"
    name, _, text = argument.partition(" ")
    name = name.replace("-", "_")
    if name not in SETTABLE:
        meant = nearest(name, SETTABLE)
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(SETTABLE)}"
        raise Mistake(f"there is no option {name}: {hint}")
    if text.strip() == UNSET:
        options[name] = None
        return f"{name} is the server's choice"
    if name == "preset" and text.strip() not in SAMPLING_PRESETS:
        raise Mistake(
            f"there is no preset {text.strip()!r}: there are {', '.join(SAMPLING_PRESETS)}"
        )
    try:
        options[name] = SETTABLE[name](text.strip())
    except ValueError:
        kind = "a whole number" if SETTABLE[name] is int else "a number"
        raise Mistake(f"{name} must be {kind} or {UNSET}, not {text.strip()!r}") from None
    is_both = name in ("temperature", "top_p") and changes_both(options)
    return f"{name} is {options[name]}{f'; {BOTH_CHANGED}' if is_both else ''}"


def _save(conversation: Conversation, argument: str) -> str:
    if not argument:
        raise Mistake("say where: /save FILE")
    messages = [*conversation.opening, *conversation.turns]
    try:
        Path(argument).expanduser().write_text(
            json.dumps({"messages": messages}, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Mistake(f"{argument}: {why or error}") from None
    return f"{len(messages)} messages are in {argument}"


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


_COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/help": _help,
    "/?": _help,
    "/exit": _leave,
    "/quit": _leave,
    "/bye": _leave,
    "/clear": _clear,
    "/reset": _clear,
    "/system": _system,
    "/set": _set,
    "/save": _save,
}
