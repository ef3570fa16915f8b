"""Scripted streams of clients/conformance, replayed with the program of every client."""

from __future__ import annotations

import pytest

from tests.clients.conformance.cases import (
    ANSWERS,
    STREAMS,
    check_calls,
    check_result,
    with_deadline,
)
from tests.clients.conformance.scripted_server import scripted_server


class TestStreams:
    @pytest.mark.parametrize("case", STREAMS, ids=[case["name"] for case in STREAMS])
    def test_stream_is_as_promised(self, player, case, record):
        """
        The client sends the calls of the case and gives its caller the result.
        """
        with record.of(player, case["name"]):
            for times in (1, 6, 60):
                patient = with_deadline(case, times)
                options = {"request": case["request"], **patient.get("client", {})}
                with scripted_server(case["calls"]) as script:
                    result = player.ask(
                        do="generate", targets=[script.address], retry="soon", **options
                    )
                    if not script.seen:  # a slow machine had not made the call by its deadline
                        continue
                    check_calls(case, script)
                check_result(case, result)
                return
            pytest.fail("no call was made")

    @pytest.mark.parametrize("case", ANSWERS, ids=[case["name"] for case in ANSWERS])
    def test_whole_answer_is_as_promised(self, player, case, record):
        """
        A call of `Complete` is repeated, or fails, as the case says.
        """
        with record.of(player, case["name"]), scripted_server(case["calls"]) as script:
            targets, request = [script.address], case["request"]
            result = player.ask(do="complete", targets=targets, retry="soon", request=request)
            check_calls(case, script)
            check_result(case, result)
