"""Words for operators on a server that answers and is not ready."""

from __future__ import annotations

import pytest

from tandem_client.admin import Stats
from tandem_client.cli.top.table import executor_line
from tandem_client.views.unready import why_unready
from tests.stats import changed

ZERO = Stats()
LOST = changed(ZERO, executor_sessions=1, executor_address="a:1")


class TestUnready:
    @pytest.mark.parametrize(
        ("now", "words"),
        [
            (ZERO, "its executor is missing or still loading"),
            (LOST, "its executor a:1 does not answer"),
            (changed(LOST, executor_attached=True), "executor a:1 is silent or late"),
            (changed(LOST, executor_refusal="b holds it"), "b holds it"),
            (changed(LOST, suspended=True), "an operator suspended it"),
            (changed(LOST, draining=True), "it was drained, or is stopping"),
        ],
    )
    def test_advice_names_the_cause(self, now, words):
        """An unready server is described by what its figures say: drained, suspended, refused, late or lost."""
        assert words in why_unready(now)

    @pytest.mark.parametrize(
        ("now", "words"), [(ZERO, "none attached"), (LOST, "none attached; the last was a:1")]
    )
    def test_top_names_the_executor_that_is_lost(self, now, words):
        """Without an executor `tandem top` says so, and which one it was."""
        assert words == executor_line(now)
