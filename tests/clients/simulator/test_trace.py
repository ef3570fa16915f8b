"""Workloads from a file: what a line may say, and what is said about a wrong one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tandem.errors import InvalidConfig
from tandem_simulator.workload.trace import read_trace
from tests.clients.simulator.experiments import run_one

LINE = {"arrival_s": 1.5, "prompt_len": 40, "output_len": 6}


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return path


class TestReading:
    def test_lines_become_requests_in_order_of_arrival(self, tmp_path):
        """
        Lines may stand in any order, empty ones are skipped, and what is left out has its default.
        """
        early = {"arrival_s": 0, "token_ids": [5, 9], "output_len": 6}
        path = write(tmp_path, LINE, "", early)
        first, second = read_trace(path, 0).opening()

        assert (0.0, [5, 9], 6) == (first.arrival_s, first.prompt.tolist(), first.output_len)
        assert (1.5, 40, 6, 6) == (
            second.arrival_s, len(second.prompt), second.output_len, second.max_tokens
        )  # fmt: skip
        assert (0, "", b"", 1, None) == (
            second.priority, second.tenant, second.cache_salt, second.num_choices, second.timeout_s
        )  # fmt: skip

    def test_everything_a_line_says_is_kept(self, tmp_path):
        """
        Each optional key sets its value.
        """
        more = {
            "max_tokens": 64, "priority": -2, "tenant": "a", "cache_salt": "s", "choices": 2,
            "timeout_s": 9.5,
        }  # fmt: skip
        trace = read_trace(write(tmp_path, {**LINE, **more}), 0)
        (ask,) = trace.opening()

        assert (64, -2, "a", b"s", 2, 9.5) == (
            ask.max_tokens, ask.priority, ask.tenant, ask.cache_salt, ask.num_choices,
            ask.timeout_s,
        )  # fmt: skip
        assert 2 == trace.max_handles

    def test_prefix_groups_share_their_beginning(self, tmp_path):
        """
        Two prompts of a group are equal for as long as the shorter of their prefixes, no further.
        """
        group = {"prefix_group": "bot"}
        lines = [
            {**LINE, **group, "prefix_len": 30}, {**LINE, **group, "prefix_len": 20},
            {**LINE, "prefix_group": 7, "prefix_len": 30},
        ]  # fmt: skip
        one, two, other = (ask.prompt for ask in read_trace(write(tmp_path, *lines), 0).opening())

        assert one[:20].tolist() == two[:20].tolist()
        assert np.count_nonzero(one[20:] == two[20:]) < 3
        assert np.count_nonzero(one[:30] == other[:30]) < 3

    def test_trace_runs(self, tmp_path):
        """
        A simulation runs on a trace, everything checked, and reports no workload of its own.
        """
        lines = [
            {**LINE, "arrival_s": i / 50, "prefix_group": i % 2, "prefix_len": 33}
            for i in range(20)
        ]
        outcome = run_one({"trace": str(write(tmp_path, *lines)), "check": "true"})
        assert 20 == outcome.results["requests"]["finished"]
        assert 120 == outcome.results["tokens"]["output"]
        assert "request_rate" not in outcome.settings


class TestErrors:
    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"arrival_s": None}, "arrival_s must be seconds, 0 or more, got None"),
            ({"arrival_s": -1}, "arrival_s must be seconds"),
            ({"arrival_s": float("nan")}, "arrival_s must be seconds"),
            ({"arrival_s": True}, "arrival_s must be seconds"),
            ({"prompt_len": 0}, "prompt_len must be a whole number from 1 up, got 0"),
            ({"prompt_len": 2.5}, "prompt_len must be a whole number"),
            ({"output_len": "9"}, "output_len must be a whole number"),
            ({"output_len": 2**31}, "output_len must be a whole number"),
            ({"choices": 0}, "choices must be a whole number"),
            ({"priority": True}, "priority must be a whole number"),
            ({"tenant": 3}, "tenant must be text"),
            ({"timeout_s": -2}, "timeout_s must be seconds"),
            ({"token_ids": [5]}, "exactly one of prompt_len and token_ids"),
            ({"prefix_len": 5}, "means nothing without prefix_group"),
            ({"prefix_group": "a"}, "prefix_len must be a whole number from 0 up, it is missing"),
            ({"prefix_group": "a", "prefix_len": 41}, "prefix_len 41 is over prompt_len 40"),
            ({"promt_len": 5}, "unknown key 'promt_len'"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_wrong_value_names_its_line(self, tmp_path, changes, said):
        """
        The first wrong line is an error with its number, the key and what was expected.
        """
        path = write(tmp_path, LINE, "", {**LINE, **changes}, "nonsense")
        with pytest.raises(InvalidConfig) as error:
            read_trace(path, 0)
        assert f"{path}, line 3: " in error.value.message
        assert said in error.value.message

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("{", "not valid JSON"),
            ("[" * 100_000, "not valid JSON"),
            ("[1, 2]", "a JSON object was expected, got [1, 2]"),
            ('{"arrival_s": 0, "token_ids": [], "output_len": 1}', "token_ids must be a list"),
            ('{"arrival_s": 0, "token_ids": [5, 2], "output_len": 1}', "token_ids must be a list"),
            ('{"arrival_s": 0, "token_ids": [true], "output_len": 1}', "token_ids must be a list"),
            ('{"arrival_s": 0, "output_len": 1}', "exactly one of prompt_len and token_ids"),
            ('{"arrival_s": 0, "prompt_len": 1}', "output_len must be a whole number from 1 up, it is missing"),
        ],
        ids=["cut", "deep", "list", "no-ids", "eos", "truth", "no-prompt", "no-output"],
    )  # fmt: skip
    def test_wrong_line_names_its_number(self, tmp_path, line, said):
        """
        A line that is no request is an error with its number.
        """
        with pytest.raises(InvalidConfig) as error:
            read_trace(write(tmp_path, line), 0)
        assert "line 1: " in error.value.message
        assert said in error.value.message

    def test_file_without_requests_is_refused(self, tmp_path):
        """
        A missing, unreadable or empty file is an error that names it.
        """
        binary = tmp_path / "binary"
        binary.write_bytes(b"\xff\xfe")
        for path, said in [
            (tmp_path / "none", "cannot read"), (tmp_path, "cannot read"),
            (write(tmp_path, "", " "), "has no request"), (binary, "is not UTF-8"),
        ]:  # fmt: skip
            with pytest.raises(InvalidConfig, match=said) as error:
                read_trace(path, 0)
            assert str(path) in error.value.message
