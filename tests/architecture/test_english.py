"""Docstrings and comments are sentences with subjects, in the words of the field."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.test_sizes import ROOT, python_files, tracked

RIDDLE = re.compile(
    r"\W*(Who|Whom|Whoever|Whose|What|Whatever|Whether|Nobody|Nothing|Somebody|Someone)\b"
)
"""Openings that leave the subject of a docstring to be guessed."""

PERSON = re.compile(r"\b(whoever|whom|nobody|somebody|everybody|anybody)\b", re.IGNORECASE)
"""Requests, rows, slots and processes are none."""

HOUSE_WORDS = {
    r"giving way": "priority preemption",
    r"forks? of (a|the) request": "parallel sampling, choices",
    r"applier": "output processor",
    r"step drafts?": "batch builder",
}
"""Words of our own, as patterns, for what the field has a name for."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Return line and text of every docstring, those below attributes too."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Return line and text of every comment."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@cache
def all_texts() -> list[tuple[str, str, bool]]:
    """Return `file:line`, text and whether it is a docstring, for all files but this one."""
    return [
        (f"{path.relative_to(ROOT)}:{line}", text, is_docstring)
        for path in python_files()
        if path != Path(__file__)
        for texts, is_docstring in ((docstrings(path), True), (comments(path), False))
        for line, text in texts
    ]


def offences(pattern: re.Pattern[str], *, at_start: bool = False) -> list[str]:
    """Return the docstrings that open with a pattern, or all texts that it is found in."""
    return [
        f"{where}: {text.splitlines()[0]}"
        for where, text, is_docstring in all_texts()
        if (is_docstring and pattern.match(text) if at_start else pattern.search(text))
    ]


class TestEnglish:
    def test_docstring_opens_with_its_verb_or_noun(self):
        """
        No docstring opens with a word that asks: its first words say what a thing is or does.
        """
        assert [] == offences(RIDDLE, at_start=True)

    def test_requests_and_processes_are_no_persons(self):
        """
        Docstrings and comments name the request, row or process that they are about.
        """
        assert [] == offences(PERSON)

    def test_contract_names_what_it_is_about(self):
        """
        No comment of a .proto file speaks of persons where it means requests or processes.
        """
        assert [] == [
            f"{path.relative_to(ROOT)}:{line}: {text.strip()}"
            for path in tracked("protos/**/*.proto")
            for line, text in enumerate(path.read_text().splitlines(), 1)
            if PERSON.search(text.partition("//")[2])
        ]

    @pytest.mark.parametrize("word", HOUSE_WORDS)
    def test_things_have_the_names_that_the_field_gives_them(self, word: str):
        """
        No docstring or comment has a word of our own for what has a standard name.
        """
        assert [] == offences(re.compile(word, re.IGNORECASE))
