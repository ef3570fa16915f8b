"""Rows as JSON, printed as they come."""

from __future__ import annotations

import json

import pytest

from tandem_bench.device.json_rows import JsonRows


@pytest.mark.parametrize("count", [0, 1, 3])
def test_rows_are_one_list(capsys, count):
    """
    The rows are printed in the end as one JSON list, in order.
    """
    with JsonRows() as rows:
        for number in range(count):
            rows.add({"number": number})
    assert [{"number": number} for number in range(count)] == json.loads(capsys.readouterr().out)


def test_each_row_is_there_at_once(capsys):
    """
    Before the next row is known the ones before it have been printed whole.
    """
    with JsonRows() as rows:
        rows.add({"number": 1})
        assert '[{"number": 1}' == capsys.readouterr().out
        rows.add({"number": 2})
        assert ',\n{"number": 2}' == capsys.readouterr().out


def test_rows_before_a_failure_are_one_list(capsys):
    """
    A run that fails has printed a list of the rows that it had.
    """

    def fail_after_one() -> None:
        with JsonRows() as rows:
            rows.add({"number": 1})
            raise RuntimeError("a device that is lost")

    with pytest.raises(RuntimeError, match="a device that is lost"):
        fail_after_one()
    assert [{"number": 1}] == json.loads(capsys.readouterr().out)
