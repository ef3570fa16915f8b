"""Docstrings and comments are sentences with subjects, in the words of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.source_comments import (
    Comment,
    cpp_comments,
    python_comments,
    shell_comments,
)
from tests.architecture.test_sizes import ROOT, python_files, tracked

RIDDLE = re.compile(
    r"\W*(Who|Whom|Whoever|Whose|What|Whatever|Whether|Nobody|Nothing|Somebody|Someone)\b"
)
"""Openings that leave the subject of a docstring to be guessed."""

PERSON = re.compile(r"\b(whoever|whom|nobody|somebody|everybody|anybody)\b", re.IGNORECASE)
"""Requests, rows, slots and processes are none."""

FRAGMENT = re.compile(
    r"(Of|As|By|Within|Those|That|Which|Where|Never|Written|Built|Made|Kept|Taken|Given)\b(?![^.]*,\s)"
)
"""Openings of a comment that has no subject; those with a comma may be followed by one."""

WHO = re.compile(r"\bwho\b", re.IGNORECASE)
"""In C++ and in scripts there are threads, items and tests only."""

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


def cpp_files() -> list[Path]:
    return tracked("*.cpp", "*.cc", "*.c", "*.h", "*.hpp", "*.cu", "*.cuh")


def scripts() -> list[Path]:
    """Return shell scripts: they have the suffix, or none and a comment as their first line."""
    named = [path for path in tracked() if not path.suffix and path.read_bytes()[:1] == b"#"]
    return [*named, *tracked("*.sh", "*.bash")]


@cache
def all_texts() -> list[tuple[str, str, bool]]:
    """Return `file:line`, text and whether it is a docstring, for all files but this one."""
    described = [
        (f"{path.relative_to(ROOT)}:{line}", text, True)
        for path in python_files()
        if path != Path(__file__)
        for line, text in docstrings(path)
    ]
    return described + [(where, comment.text, False) for where, comment in all_comments()]


@cache
def all_comments() -> list[tuple[str, Comment]]:
    """Return `file:line` and comment of all sources and scripts but this file."""
    return [
        (f"{path.relative_to(ROOT)}:{comment.line}", comment)
        for paths, find in (
            (python_files(), python_comments),
            (cpp_files(), cpp_comments),
            (scripts(), shell_comments),
        )
        for path in paths
        if path != Path(__file__)
        for comment in find(path.read_text())
    ]


def is_python(where: str) -> bool:
    return where.partition(":")[0].endswith(".py")


def is_fragment(comment: Comment) -> bool:
    """Return whether a comment above a line opens without a subject; others may be phrases."""
    return comment.is_alone and bool(FRAGMENT.match(comment.text) or RIDDLE.match(comment.text))


def fault(comment: Comment) -> str | None:
    """Return what keeps a comment of C++ or of a script from being a sentence, or None."""
    if WHO.search(comment.text) or PERSON.search(comment.text):
        return "speaks of a person"
    if is_fragment(comment):
        return "opens without a subject"
    has_end = not comment.is_alone or comment.text.endswith((".", ":"))
    return None if has_end else "has no end"


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


class TestSources:
    def test_comment_above_a_line_has_a_subject(self):
        """
        No comment that has its own line opens with a preposition, a participle or a question.
        """
        assert [] == [
            f"{where}: {comment.text.splitlines()[0]}"
            for where, comment in all_comments()
            if is_fragment(comment)
        ]

    def test_comment_of_cpp_or_a_script_is_a_sentence(self):
        """
        A comment above a line of C++ or of a script opens with its subject or verb and has an end.
        """
        assert [] == [
            f"{where}: {found}: {comment.text.splitlines()[0]}"
            for where, comment in all_comments()
            if not is_python(where) and (found := fault(comment)) is not None
        ]

    def test_comments_of_all_kinds_of_sources_are_read(self):
        """
        Python and C++ sources, headers and scripts are found, those without a suffix too.
        """
        files = {where.partition(":")[0] for where, _ in all_comments()}
        assert {
            "kernels/sampling/filters.py",
            "kernels/cpu_extension/products/linear.cpp",
            "kernels/cpu_extension/attention/tile.h",
            "deploy/local/setup",
            ".ci/run",
        } <= files

    @pytest.mark.parametrize(
        ("comment", "expected"),
        [
            ("Of the struct that both sides must agree on.", "opens without a subject"),
            ("As the type holds it.", "opens without a subject"),
            ("Those that row m of an item sees.", "opens without a subject"),
            ("What the environment keeps.", "opens without a subject"),
            ("Returns the sum of all lanes", "has no end"),
            ("The next one takes over from who is not done.", "speaks of a person"),
            ("The lock is free when nobody waits.", "speaks of a person"),
            ("Within a step, a thread polls for a while.", None),
            ("Returns the sum of all lanes.", None),
        ],
    )
    @pytest.mark.parametrize(
        ("find", "mark"), [(cpp_comments, "//"), (shell_comments, "#"), (python_comments, "#")]
    )
    def test_planted_fault_is_seen(self, find, mark: str, comment: str, expected: str | None):
        """
        A fragment, a riddle, a missing end or a person in a comment of two lines is named.
        """
        first, _, rest = comment.partition(" ")
        source = f'text="{mark} Of no comment."\n\n  {mark} {first}\n  {mark} {rest}\ncode {mark} of it\n'
        planted, phrase = find(source)
        assert (3, f"{first}\n{rest}", True) == (planted.line, planted.text, planted.is_alone)
        assert expected == fault(planted)
        assert ("of it", None) == (phrase.text, fault(phrase))
