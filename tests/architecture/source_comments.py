"""Comments of Python, C++ and shell scripts; the last two are found without a parser."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_CPP = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(?P<comment>//[^\n]*|/\*.*?\*/)', re.DOTALL
)
_SHELL = re.compile(
    r"\\.|\"(?:\\.|[^\"\\])*\"|'[^']*'|(?:(?<=\s)|^)(?P<comment>#(?!!)[^\n]*)",
    re.DOTALL | re.MULTILINE,
)
_MARKS = re.compile(r"^\s*(?://|/?\*+/?|#)+ ?|\*/$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comment:
    """
    A comment without its marks; lines that stand below each other without code are one comment.

    Attributes:
        line: Number of its first line, from 1.
        text: Words, with line breaks between its lines.
        is_alone: True if no code stands before it in its line.
    """

    line: int
    text: str
    is_alone: bool


def cpp_comments(source: str) -> list[Comment]:
    """Return the comments of a C++ source; strings that look like comments are none."""
    return list(_joined(_found(_CPP, source)))


def shell_comments(source: str) -> list[Comment]:
    """Return the comments of a shell script, without the line that names its interpreter."""
    return list(_joined(_found(_SHELL, source)))


def python_comments(source: str) -> list[Comment]:
    """Return the comments of a Python source."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return list(
        _joined(
            Comment(
                line=token.start[0],
                text=_MARKS.sub("", token.string).strip(),
                is_alone=not token.line[: token.start[1]].strip(),
            )
            for token in tokens
            if token.type == tokenize.COMMENT
        )
    )


def _found(pattern: re.Pattern[str], source: str) -> Iterator[Comment]:
    for match in pattern.finditer(source):
        if match["comment"] is not None:
            start = match.start("comment")
            before = source[source.rfind("\n", 0, start) + 1 : start]
            yield Comment(
                line=source.count("\n", 0, start) + 1,
                text=_MARKS.sub("", match["comment"]).strip(),
                is_alone=not before.strip(),
            )


def _joined(comments: Iterable[Comment]) -> Iterator[Comment]:
    held: Comment | None = None
    for comment in comments:
        if held is not None:
            next_line = held.line + held.text.count("\n") + 1
            if held.is_alone and comment.is_alone and comment.line == next_line:
                held = Comment(line=held.line, text=f"{held.text}\n{comment.text}", is_alone=True)
                continue
            yield held
        held = comment
    if held is not None:
        yield held
