"""Each excuse from a check, and each tolerance, says why."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.test_sizes import ROOT, is_test, python_files

EXCUSE = re.compile(r"# (?:ruff: )?(?:noqa|type: ignore|pragma)\b(.*)$")
"""Comment that switches a check off for its line, and what follows in it."""

CODES_AND_REASON = re.compile(
    r"(?:: [A-Z]+\d+(?:, [A-Z]+\d+)*|\[[a-z-]+\])(?:  [#] noqa: [A-Z]+\d+)?(?P<reason>  # .+)?"
)
"""Codes of what is switched off, then the reason as a comment of its own."""

COMPARISONS = {"allclose", "approx", "assert_allclose", "assert_close", "isclose"}
"""Functions that compare numbers with a tolerance."""

TOLERANCES = {"abs", "abs_tol", "atol", "rel", "rel_tol", "rtol"}
"""Names of their tolerances."""


def excuses_without_reason(lines: list[str]) -> list[int]:
    """
    Return the numbers of the lines with an excuse that names no code or has no reason. Neighbouring
    excuses, such as imports in a function, share the reason of the first or of the comment above.
    """
    found = []
    is_given = False
    for number, line in enumerate(lines, 1):
        excuse = EXCUSE.search(line)
        if excuse is None:
            is_given = line.strip().startswith("#") or (is_given and not line.strip())
            continue
        parts = CODES_AND_REASON.fullmatch(excuse[1])
        is_given |= parts is not None and parts["reason"] is not None
        if parts is None or not is_given:
            found.append(number)
    return found


class TestExcuses:
    def test_every_excuse_has_its_code_and_reason(self):
        """
        Each `noqa`, `type: ignore` and `pragma` names what it switches off and says why, beside it or above.
        """
        assert [] == [
            f"{path.relative_to(ROOT)}:{number}"
            for path in python_files()
            for number in excuses_without_reason(path.read_text().splitlines())
        ]

    def test_excuse_without_reason_is_found(self):
        """
        An excuse is refused without a code, without a reason, and apart from the reason of another.
        """
        mark = "# no" + "qa"
        lines = [
            f"import a  {mark}",
            f"import b  {mark}: E402",
            "x = 1",
            "# Because.",
            f"import c  {mark}: E402",
            f"import d  {mark}: E402",
            "y = 1",
            f"import e  {mark}: E402",
            f"import f  {mark}: E402, F401  # registers itself",
            f"import g  {mark}: E402 -- in another shape",
        ]
        assert [1, 2, 8, 10] == excuses_without_reason(lines)


def tolerances(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the tolerances that comparisons are given, but those of zero."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        for keyword in call.keywords if name in COMPARISONS else ():
            is_zero = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if (keyword.arg is None or keyword.arg in TOLERANCES) and not is_zero:
                yield keyword.value


def undocumented(tree: ast.Module) -> set[str]:
    """Return the module's constants without a docstring below them."""
    followers = zip(tree.body, [*tree.body[1:], None], strict=True)
    return {
        target.id
        for statement, below in followers
        if isinstance(statement, ast.Assign)
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant))
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def tolerances_without_reason(source: str) -> list[int]:
    """
    Return the lines of tolerances without a reason. A number has it in a comment, beside it or above
    the statements without a blank line between; a constant has it in its docstring.
    """
    tree, lines = ast.parse(source), source.splitlines()
    silent, found = undocumented(tree), []
    for value in tolerances(tree):
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        is_told = bool(names) and not names & silent
        for line in reversed(lines[: value.end_lineno]):
            is_told = is_told or "  # " in line or line.strip().startswith("# ")
            if is_told or not line.strip() or line.strip().startswith(("def ", '"""')):
                break
        if not is_told:
            found.append(value.lineno)
    return sorted(found)


class TestTolerances:
    def test_every_tolerance_has_its_reason(self):
        """
        A tolerance of a comparison says why it has this size: named with a docstring, or in a comment.
        """
        assert [] == [
            f"{path.relative_to(ROOT)}:{line}"
            for path in python_files()
            if is_test(path)
            for line in tolerances_without_reason(path.read_text())
        ]

    def test_tolerance_without_reason_is_found(self):
        """
        A bare number and a constant without docstring are refused; zero needs no reason.
        """
        source = (
            "ROUNDING = 1e-6\n"
            '"""One rounding."""\n'
            "SILENT = 1e-6\n"
            "assert approx(1, abs=ROUNDING) == 1\n"
            "assert approx(1, abs=SILENT) == 1\n"
            "\n"
            "assert allclose(a, b, rtol=0, atol=2e-6)\n"
            "\n"
            "assert allclose(a, b, rtol=0, atol=2e-6)  # two roundings\n"
            "\n"
            "# Two roundings.\n"
            "assert isclose(a, b, rel_tol=2e-6)\n"
        )
        assert [5, 7] == tolerances_without_reason(source)
