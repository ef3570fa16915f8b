"""Batches of ours that the executor refuses: bugs of the scheduler, not of the executor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from structlog.testing import capture_logs

from tandem.link.batch import Batch
from tests.scheduler_svc.service.fakes.arithmetic_runner import expected_outputs
from tests.scheduler_svc.service.three_requests import PROMPTS, start, stats_of


def _start_elsewhere(batch: Batch) -> Batch:
    """Have the row of slot 1 start where it should not."""
    return replace(batch, row_start=batch.row_start + (batch.row_slot == 1))


def _bad_admission(batch: Batch) -> Batch:
    """Admit slot 1 with a parameter that no scheduler sends."""
    return replace(
        batch,
        admits=tuple(
            replace(one, sampling=replace(one.sampling, top_p=7.0)) if one.slot == 1 else one
            for one in batch.admits
        ),
    )


def _copy_of_nothing(batch: Batch) -> Batch:
    """Copy a block that does not exist, which names no slot."""
    return replace(
        batch, copy_source=np.array([0], np.int32), copy_destination=np.array([1], np.int32)
    )


@pytest.fixture
def spoil(bench, monkeypatch):
    """Return a function that spoils batches on their way, and returns how many more it will."""

    def begin(change, times: int) -> list[int]:
        session, left = bench.session, [times]
        send = session.send

        def spoiled(command, state_hash, now):
            concerns = isinstance(command, Batch) and (
                len(command.row_slot) > 0
                if change is _copy_of_nothing
                else any(one.slot == 1 for one in command.admits)
            )
            if concerns and left[0]:
                left[0] -= 1
                command = change(command)
            return send(command, state_hash, now)

        monkeypatch.setattr(session, "send", spoiled)
        return left

    return begin


class TestRefusedBatch:
    @pytest.mark.parametrize("change", [_start_elsewhere, _bad_admission])
    def test_request_of_the_refused_slot_fails_alone(self, bench, spoil, change):
        """
        It fails INTERNAL at once, no death is counted, the bug is logged, and others complete.
        """
        spoil(change, 1)
        with capture_logs() as lines:
            frontend = start(bench)
            bench.until(lambda: len(frontend.ended) + len(frontend.failed) == len(PROMPTS))
        assert ["INTERNAL"] == [error.reason for error in frontend.failed.values()]
        for stream_id in frontend.ended:
            assert expected_outputs(PROMPTS[stream_id], 40) == frontend.tokens[stream_id]
        stats = stats_of(bench, frontend)
        assert (0, 0, 2) == (
            stats.executor_deaths,
            stats.poison_requests,
            stats.executor_sessions,
        )
        refused = [line for line in lines if line["event"] == "batch_refused"]
        assert [("error", 1)] == [(line["log_level"], line["slot"]) for line in refused]

    def test_batch_refused_once_without_a_slot_fails_no_request(self, bench, spoil):
        """A new session mends what one batch alone had wrong."""
        spoil(_copy_of_nothing, 1)
        frontend = start(bench)
        bench.until(lambda: len(frontend.ended) == len(PROMPTS))
        assert {} == frontend.failed

    def test_batch_refused_for_ever_fails_its_requests_as_our_bug(self, bench, spoil):
        """No executor is blamed, so no request is poison; later ones are served."""
        left = spoil(_copy_of_nothing, 1000)
        frontend = bench.frontend()
        bench.until(lambda: frontend.availabilities[-1].executor_attached)
        for stream_id, prompt in enumerate(PROMPTS):
            frontend.submit(stream_id, prompt, 40)
        bench.until(lambda: frontend.failed)
        left[0] = 0
        bench.until(lambda: len(frontend.ended) + len(frontend.failed) == len(PROMPTS))
        assert {"INTERNAL"} == {error.reason for error in frontend.failed.values()}
        stats = stats_of(bench, frontend)
        assert (0, 0) == (stats.executor_deaths, stats.poison_requests)
        frontend.submit(7, [5, 6, 7], 4)
        bench.until(lambda: 7 in frontend.ended)
        assert expected_outputs([5, 6, 7], 4) == frontend.tokens[7]
