"""Least time between two chunks of a stream."""

from __future__ import annotations

import httpx
import pytest

from tandem.errors import InvalidConfig
from tandem_openai_gateway.delta_interval import DeltaIntervals, adaptive_interval_s
from tandem_openai_gateway.settings import read_settings
from tests.clients.openai_gateway.serving import gateway
from tests.clients.python.fake_server import ANSWER
from tests.waiting import wait_until

BODY = {"model": "fake", "prompt": "hi"}


@pytest.mark.parametrize(
    ("num_streams", "expected_ms"),
    [(1, 0), (8, 0), (9, 40), (64, 40), (1000, 40)],
)
def test_interval_is_for_many_streams(num_streams, expected_ms):
    """
    Few streams have each token at once; those that begin beside many have an interval.
    """
    assert adaptive_interval_s(num_streams) == pytest.approx(expected_ms / 1000)


def test_streams_that_ended_do_not_count():
    """
    A stream begins as one of those that run then.
    """
    intervals = DeltaIntervals(None)
    assert [0.0] * 8 + [0.04] == [intervals.begin(1) for _ in range(9)]
    intervals.end(4)
    assert 0.0 == intervals.begin(1)


@pytest.mark.parametrize(
    ("setting", "expected"), [(0.0, 0.0), (0.25, 0.25)], ids=["each delta", "quarter second"]
)
@pytest.mark.parametrize("num_prompts", [1, 40])
def test_setting_holds_for_all_streams(server, setting, expected, num_prompts):
    """
    The scheduler is asked for the interval that is set, however many streams run.
    """
    with gateway(server.address, min_delta_interval_s=setting) as url:
        body = BODY | {"prompt": ["hi"] * num_prompts}
        httpx.post(f"{url}/v1/completions", json=body, trust_env=False)
    asked = [one.response.min_delta_interval_s for one in server.seen.generate]
    assert [expected] * num_prompts == asked


def test_many_prompts_are_many_streams(http, server):
    """
    Prompts of one request count one by one, and no longer once they are answered.
    """
    answer = http.post("/v1/completions", json=BODY | {"prompt": ["hi"] * 40})
    assert [ANSWER] * 40 == [one["text"] for one in answer.json()["choices"]]
    assert {0.04} == {one.response.min_delta_interval_s for one in server.seen.generate}

    def is_prompt_again():
        http.post("/v1/completions", json=BODY)
        return not server.seen.generate[-1].response.HasField("min_delta_interval_s")

    wait_until(is_prompt_again, "the end of the streams")


class TestFlag:
    def test_is_seconds(self):
        """
        The flag is read in seconds; left out, the number of streams decides.
        """
        assert 0.5 == read_settings(["--min-delta-interval-s", "0.5"]).min_delta_interval_s
        assert read_settings([]).min_delta_interval_s is None

    @pytest.mark.parametrize("value", ["-1", "10.5", "nan"])
    def test_is_bounded(self, value):
        """
        A value that no scheduler would take is refused at the start.
        """
        with pytest.raises(InvalidConfig, match="min_delta_interval_s"):
            read_settings([f"--min-delta-interval-s={value}"])
