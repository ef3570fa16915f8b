"""Flags of benchmarks: what they refuse, and in which words."""

from __future__ import annotations

import pytest

from tandem_bench.command_line import (
    BenchParser,
    above_zero,
    at_least_one,
    at_most,
    count,
    time_above_zero,
)


class TestValues:
    @pytest.mark.parametrize(
        ("kind", "text", "why"),
        [
            (count, "-1", "must be a whole number, 0 or more, not '-1'"),
            (count, "1.5", "must be a whole number, 0 or more, not '1.5'"),
            (count, "1048577", "must be at most 1048576, not 1048577"),
            (count, "9" * 5000, "must be at most 1048576"),
            (at_least_one, "0", "must be at least 1"),
            (at_most(8), "9", "must be at most 8, not 9"),
            (at_most(8), "0", "must be at least 1"),
            (time_above_zero, "soon", "must be a number, not 'soon'"),
            (time_above_zero, "nan", "must be above 0 and below 3600"),
            (time_above_zero, "3600", "must be above 0 and below 3600"),
            (above_zero, "fast", "must be a number, not 'fast'"),
            (above_zero, "inf", "must be above 0"),
        ],
        ids=lambda value: value[:10] if isinstance(value, str) else value.__name__,
    )
    def test_senseless_value_ends_with_one_line_that_names_the_flag(self, kind, text, why, capsys):
        """
        A value that is none, or absurd, ends with 2 and one line: the flag and what it takes.
        """
        parser = BenchParser("link", None)
        parser.add_argument("--value", type=kind)
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([f"--value={text}"])
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"bench: argument --value: {why}")
        assert line.endswith("; see --help")

    @pytest.mark.parametrize(("kind", "text", "value"), [(count, "00", 0), (count, "0001", 1)])
    def test_leading_zeros_are_no_harm(self, kind, text, value):
        """
        A count is read as a decimal number.
        """
        assert value == kind(text)
