"""Each excuse from a check says why."""

from __future__ import annotations

import re

from tests.architecture.test_sizes import ROOT, python_files

EXCUSE = re.compile(r"# (?:ruff: )?(?:noqa|type: ignore|pragma)\b(.*)$")
"""Comment that switches a check off for its line, and what follows in it."""

CODES_AND_REASON = re.compile(
    r"(?:: [A-Z]+\d+(?:, [A-Z]+\d+)*|\[[a-z-]+\])(?:  [#] noqa: [A-Z]+\d+)?(?P<reason>  # .+)?"
)
"""Codes of what is switched off, then the reason as a comment of its own."""


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
