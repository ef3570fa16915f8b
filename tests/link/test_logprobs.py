"""Columns of log probabilities: an entry that is chosen keeps its own likeliest ids."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.link.logprobs import LogprobColumns
from tests.link.values import logprobs, same

QUICK = settings(max_examples=100, deadline=None)
NUM_ROWS = 6


def listed(columns: LogprobColumns) -> list[tuple[int, str]]:
    """Return (row, entry) pairs; an entry is text, since NaN would not equal itself."""
    return [
        (int(row), str(entry)) for row, entry in zip(columns.row, columns.entries(), strict=True)
    ]


@QUICK
@given(logprobs(NUM_ROWS), st.data())
def test_selected_entries_keep_what_is_theirs(columns, data):
    """
    Entries chosen by mask or by number are those entries, in the order asked for.
    """
    mask = np.array([data.draw(st.booleans()) for _ in range(len(columns))], np.bool_)
    whole = listed(columns)
    expected = [entry for entry, kept in zip(whole, mask, strict=True) if kept]
    assert expected == listed(columns.select(mask))
    assert same(columns.select(mask), columns.select(mask.nonzero()[0]))
    turned = np.arange(len(columns))[::-1]
    assert whole[::-1] == listed(columns.select(turned))


@QUICK
@given(logprobs(NUM_ROWS), st.data())
def test_rows_that_are_left_are_numbered_anew(columns, data):
    """
    Entries of the rows that are left name the new places of these rows.
    """
    kept = np.array([data.draw(st.booleans()) for _ in range(NUM_ROWS)], np.bool_)
    place = {row: number for number, row in enumerate(kept.nonzero()[0].tolist())}
    expected = [(place[row], entry) for row, entry in listed(columns) if kept[row]]
    found = columns.of_rows(kept)
    assert expected == listed(found)
    assert found.row.dtype == found.top_start.dtype == np.int32
