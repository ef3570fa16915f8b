"""Advice on a running server: which counters lead to which change."""

from __future__ import annotations

import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tandem_client.admin import Setting, Stats
from tandem_client.cli.app import app
from tandem_client.cli.config import advise as advise_command
from tandem_client.cli.config.advice import advise
from tandem_client.cli.config.load import Load, load_between
from tests.stats import changed

BUSY = Load(
    seconds=60,
    running=30,
    waiting=120,
    token_usage=0.95,
    retractions=0,
    refused=0,
    out_of_memory_steps=0,
    prompt_tokens=50_000,
    hit_rate=0.4,
    planning_share=0.01,
    executors=1,
    busy_share=0.95,
    step_s=0.012,
    inter_token_s=0.015,
    schedule_policy="lpm",
    max_batch_size=256,
    conservativeness=1.0,
    prompt_chunk=8192,
)
"""Load of a server as it should be."""

SETTINGS = {
    "max_batch_size": 32,
    "schedule_conservativeness": 1.0,
    "enable_chunked_prefill": True,
    "chunked_prefill_size": -1,
    "max_total_tokens": 4096,
}

STATS = Stats(schedule_policy="lpm")


def advice(**changes):
    """Return the advice on a busy server with changes, by subject."""
    return {one.subject: one for one in advise(dataclasses.replace(BUSY, **changes))}


def stats(**changes) -> Stats:
    return changed(STATS, **changes)


class TestRules:
    def test_busy_server_needs_no_change(self):
        """
        A queue of 50 to 500, usage over 0.9 and no retraction need no change.
        """
        subjects = {
            "queue", "memory", "retractions", "prefix cache", "planning", "executors", "tokens",
        }  # fmt: skip
        assert subjects == set(advice())
        assert {"ok"} == {one.verdict for one in advice().values()}

    @pytest.mark.parametrize(
        ("waiting", "verdict", "words"),
        [
            (0, "change", "requests come too slowly"),
            (0.5, "change", "requests come too slowly"),
            (1, "ok", "short"),
            (49, "ok", "short"),
            (50, "ok", "healthy"),
            (500, "ok", "healthy"),
            (501, "change", "long"),
        ],
    )
    def test_queue_length_says_who_waits_for_whom(self, waiting, verdict, words):
        """
        No queue means that submission is the limit, 50 to 500 is healthy, more is long.
        """
        found = advice(waiting=waiting)["queue"]
        assert verdict == found.verdict
        assert found.advice.startswith(words)

    @pytest.mark.parametrize(
        ("usage", "waiting", "value"),
        [(0.91, 100, None), (0.9, 100, 0.3), (0.5, 1, 0.3), (0.5, 0, None)],
    )
    def test_idle_memory_with_a_queue_lowers_conservativeness(self, usage, waiting, value):
        """
        Usage under 0.9 while requests wait advises schedule_conservativeness 0.3; over it, or without a queue, nothing.
        """
        found = advice(token_usage=usage, waiting=waiting)["memory"]
        assert value == found.value
        assert ("change" if value else "ok") == found.verdict
        assert ("schedule_conservativeness" if value else None) == found.setting

    def test_full_batch_is_the_limit_before_conservativeness(self):
        """
        Idle memory with every place of a step taken advises a larger max_batch_size.
        """
        found = advice(token_usage=0.5, running=64, max_batch_size=64)["memory"]
        assert ("max_batch_size", 128) == (found.setting, found.value)

    def test_batch_of_one_executor_is_not_the_limit_of_two(self):
        """
        Places of all executors count: a number that fills one batch leaves half of two.
        """
        found = advice(token_usage=0.5, running=64, max_batch_size=64, executors=2)["memory"]
        assert "schedule_conservativeness" == found.setting

    def test_careless_admission_points_at_the_token_budget(self):
        """
        Idle memory although conservativeness is 0.3 already advises more tokens per step.
        """
        found = advice(token_usage=0.5, conservativeness=0.3)["memory"]
        assert ("max_total_tokens", None) == (found.setting, found.value)

    @pytest.mark.parametrize(
        ("retractions", "seconds", "is_frequent"),
        [(1, 60, False), (2, 60, True), (10, 600, False), (11, 600, True), (1, 30, True)],
    )
    def test_frequent_retractions_raise_conservativeness(self, retractions, seconds, is_frequent):
        """
        More than one retraction a minute advises schedule_conservativeness 1.3; fewer are rare enough.
        """
        found = advice(retractions=retractions, seconds=seconds)["retractions"]
        assert ("change" if is_frequent else "ok") == found.verdict
        assert (1.3 if is_frequent else None) == found.value

    def test_careful_admission_that_retracts_lowers_the_batch(self):
        """
        Retractions although conservativeness is 1.3 already advise half the max_batch_size.
        """
        found = advice(retractions=9, conservativeness=1.3)["retractions"]
        assert ("max_batch_size", 128) == (found.setting, found.value)

    def test_advice_never_pulls_both_ways(self):
        """
        While retractions are frequent nothing advises to admit more.
        """
        found = advice(retractions=9, token_usage=0.5)
        assert ("ok", None) == (found["memory"].verdict, found["memory"].setting)
        assert 1.3 == found["retractions"].value

    @pytest.mark.parametrize(
        ("share", "policy", "setting"),
        [(0.2, "lpm", None), (0.21, "lpm", "schedule_policy"), (0.3, "fcfs", None)],
    )
    def test_dear_planning_points_at_the_policy(self, share, policy, setting):
        """
        Planning that takes over a fifth of the time advises fcfs, unless that is the policy.
        """
        found = advice(planning_share=share, schedule_policy=policy)["planning"]
        assert setting == found.setting
        assert ("ok" if share <= 0.2 else "change") == found.verdict

    @pytest.mark.parametrize(
        ("changes", "setting", "value"),
        [
            ({"prompt_chunk": 8192}, "chunked_prefill_size", 4096),
            ({"prompt_chunk": 4096}, "chunked_prefill_size", 2048),
            ({"prompt_chunk": 2048}, "chunked_prefill_size", 1024),
            ({"prompt_chunk": 1}, "chunked_prefill_size", 1),
            ({"prompt_chunk": None}, "enable_chunked_prefill", None),
            ({"prompt_tokens": 0, "running": 200.5}, "max_batch_size", 100),
            ({"prompt_tokens": 0, "running": 200, "max_batch_size": 64}, "max_batch_size", 32),
            ({"prompt_tokens": 0, "running": 0.5}, "max_batch_size", 1),
        ],
    )
    def test_running_out_of_memory_names_the_setting_of_its_phase(self, changes, setting, value):
        """
        Steps without memory advise smaller parts of prompts, or fewer sequences where only decoding went on; in any
        case less memory for the KV.
        """
        found = advice(out_of_memory_steps=3, **changes)["out of memory"]
        assert ("change", setting, value) == (found.verdict, found.setting, found.value)
        assert "mem_fraction_static" in found.advice
        assert found.advice.endswith(setting)

    def test_running_out_of_memory_outweighs_idle_memory(self):
        """
        While steps run out of memory nothing advises to admit more or to compute more in one.
        """
        for changes in ({}, {"running": 256}, {"conservativeness": 0.1}):
            found = advice(out_of_memory_steps=1, token_usage=0.5, **changes)
            assert ("ok", None) == (found["memory"].verdict, found["memory"].setting)

    @pytest.mark.parametrize(
        ("policy", "changes", "to"),
        [
            ("lpm", {"hit_rate": 0.049}, "fcfs"),
            ("lpm", {"hit_rate": 0.05}, None),
            ("lpm", {"hit_rate": 0.0, "waiting": 0}, None),
            ("fcfs", {"hit_rate": 0.2}, "lpm"),
            ("fcfs", {"hit_rate": 0.199}, None),
            ("fcfs", {"hit_rate": 0.9, "waiting": 128}, "lpm"),
            ("fcfs", {"hit_rate": 0.9, "waiting": 129}, None),
            ("fcfs", {"hit_rate": 0.9, "waiting": 0}, None),
            ("fcfs", {"hit_rate": 0.9, "planning_share": 0.3}, None),
            ("lof", {"hit_rate": 0.0}, None),
        ],
    )
    def test_policy_follows_the_hit_rate(self, policy, changes, to):
        """
        While requests wait, rare hits advise fcfs instead of lpm, and frequent ones lpm instead of fcfs where the
        queue is short enough for lpm and planning cheap.
        """
        found = advice(schedule_policy=policy, **changes)["prefix cache"]
        assert ("change" if to else "ok") == found.verdict
        assert ("schedule_policy" if to else None) == found.setting
        assert not to or f"set schedule_policy to {to}" in found.advice

    def test_nothing_is_said_of_a_cache_that_nobody_asked(self):
        """
        A prefix cache without look-ups has no finding.
        """
        assert "prefix cache" not in advice(hit_rate=None)

    @pytest.mark.parametrize(
        ("changes", "verdict", "words"),
        [
            ({"waiting": 500}, "ok", "enough for this queue"),
            ({}, "change", "busy and their memory full: add executors"),
            ({"busy_share": 0.8}, "change", "busy and their memory full: add executors"),
            ({"busy_share": 0.79}, "ok", "they wait for work: more executors would wait too"),
            ({"planning_share": 0.21}, "change", "the scheduler is the limit"),
            ({"token_usage": 0.9}, "ok", "they could run more requests as they are"),
            ({"retractions": 9}, "ok", "they could run more requests as they are"),
            ({"out_of_memory_steps": 1}, "ok", "they could run more requests as they are"),
            ({"token_usage": 0.5, "running": 256}, "change", "every place in a step is taken"),
            ({"token_usage": 0.5, "running": 256, "executors": 2}, "ok", "they could run more"),
        ],
    )
    def test_long_queue_needs_executors_only_where_they_are_busy_and_full(
        self, changes, verdict, words
    ):
        """
        More executors are advised for a long queue where those there are compute nearly all the time with full memory;
        another cell where planning is the limit, a larger batch where only places lack, and else neither.
        """
        found = advice(**{"waiting": 501} | changes)["executors"]
        assert (verdict, True) == (found.verdict, found.advice.startswith(words))

    @pytest.mark.parametrize(
        ("changes", "verdict", "words"),
        [
            ({"inter_token_s": 0.1}, "ok", ""),
            ({"inter_token_s": 0.11, "step_s": 0.05}, "change", "slow, but not by the model"),
            ({"running": 8}, "change", "steps are slow with 8 rows: tensor parallel"),
            ({"running": 16, "executors": 2}, "change", "steps are slow with 8 rows: tensor"),
            ({"running": 9}, "change", "steps have 9 rows: add executors"),
        ],
    )
    def test_slow_tokens_need_tensor_parallel_where_few_share_a_step(self, changes, verdict, words):
        """
        Over 100 ms between tokens, steps of few rows need more devices each and those of many more executors; where
        the device takes less than half of the time neither helps.
        """
        found = advice(**{"inter_token_s": 0.2, "step_s": 0.19} | changes)["tokens"]
        assert (verdict, True) == (found.verdict, found.advice.startswith(words))

    def test_nothing_is_said_of_executors_that_computed_no_step(self):
        """
        Without a step in the interval there is neither a share of the time nor a time of a step.
        """
        found = advice(busy_share=None, step_s=None, inter_token_s=None)
        assert not {"executors", "tokens"} & set(found)

    def test_refusals_are_named(self):
        """
        Requests refused in the interval are a finding; none are not.
        """
        assert "3 requests refused in 60 s" == advice(refused=3)["refusals"].fact

    def test_idle_server_gets_no_advice(self):
        """
        Without any request there is nothing to say but to ask again.
        """
        (found,) = advise(dataclasses.replace(BUSY, running=0, waiting=0))
        assert ("ok", "load", None) == (found.verdict, found.subject, found.setting)


class TestReadings:
    def test_interval_joins_levels_and_differences(self):
        """
        Levels are averaged over the readings, counters subtracted, time is the server's own.
        """
        samples = [
            stats(uptime_s=100, waiting_requests=4, running_requests=2, token_usage=0.5,
                  retractions=7, refused_requests=1, schedule_s=3.0, prefill_tokens=10,
                  prefix_cache_lookup_tokens=100, prefix_cache_hit_tokens=90),
            stats(uptime_s=105, waiting_requests=6, running_requests=2, token_usage=0.7,
                  retractions=7, refused_requests=1, schedule_s=3.0),
            stats(uptime_s=120, waiting_requests=8, running_requests=5, token_usage=0.9,
                  retractions=9, refused_requests=4, schedule_s=4.0, prefill_tokens=50,
                  prefix_cache_lookup_tokens=300, prefix_cache_hit_tokens=140,
                  out_of_memory_steps=2),
        ]  # fmt: skip
        changed = {"max_batch_size": 9, "schedule_conservativeness": 0.4}
        load = load_between(samples, SETTINGS | changed)
        assert (20, 3, 6) == (load.seconds, load.running, load.waiting)
        assert pytest.approx(0.7) == load.token_usage
        assert (2, 3, 0.05) == (load.retractions, load.refused, load.planning_share)
        assert pytest.approx(6.0) == load.retractions_per_minute
        assert ("lpm", 9, 0.4) == (
            load.schedule_policy,
            load.max_batch_size,
            load.conservativeness,
        )
        assert (2, 40, 0.25) == (load.out_of_memory_steps, load.prompt_tokens, load.hit_rate)
        assert (1, None, None, None) == (
            load.executors,
            load.busy_share,
            load.step_s,
            load.inter_token_s,
        )

    def test_time_of_executors_is_shared_by_all_of_them(self):
        """
        Forward passes and sampling of all executors, over their number and the time, are the busy share of one.
        """
        samples = [
            stats(uptime_s=10, steps=100, executor_forward_s=1.0, executor_sample_s=0.5),
            stats(uptime_s=20, steps=600, executor_forward_s=12.0, executor_sample_s=2.5,
                  next_tokens=100, inter_token_s=5.0),
        ]  # fmt: skip
        load = load_between(samples, SETTINGS | {"executor": "a:1,b:2"})
        assert (2, 64, 0.65) == (load.executors, load.places, pytest.approx(load.busy_share))
        assert (0.026, 0.05) == (pytest.approx(load.step_s), pytest.approx(load.inter_token_s))

    @pytest.mark.parametrize(
        ("changes", "chunk"),
        [
            ({}, 4096),
            ({"chunked_prefill_size": 512}, 512),
            ({"chunked_prefill_size": 8192}, 4096),
            ({"enable_chunked_prefill": False}, None),
        ],
    )
    def test_prompt_chunk_is_the_lower_limit(self, changes, chunk):
        """
        A prompt has in one step what chunked_prefill_size and max_total_tokens both allow; all where it is computed whole.
        """
        load = load_between([stats(uptime_s=1), stats(uptime_s=2)], SETTINGS | changes)
        assert (chunk, None) == (load.prompt_chunk, load.hit_rate)

    @pytest.mark.parametrize(
        "samples",
        [[stats(uptime_s=5)], [stats(uptime_s=5), stats(uptime_s=1)]],
        ids=["one", "restart"],
    )
    def test_readings_must_span_time(self, samples):
        """
        One reading, or readings around a restart, give no interval.
        """
        with pytest.raises(ValueError, match="two readings"):
            load_between(samples, SETTINGS)


class FakeAdmin:
    """Stands for a server's admin port: settings, then one reading after the other."""

    def __init__(self, *samples: Stats) -> None:
        self.samples = list(samples)

    def __call__(self, _address: str, **_options: object):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def config(self):
        return [Setting(name=name, value=value, source="flag") for name, value in SETTINGS.items()]

    def stats(self) -> Stats:
        return self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]


class TestCommand:
    @pytest.fixture
    def run(self, monkeypatch):
        def run(*arguments: str, last: Stats):
            first = stats(uptime_s=1, waiting_requests=80, running_requests=8, token_usage=0.4)
            monkeypatch.setattr(advise_command, "AdminClient", FakeAdmin(first, last))
            return CliRunner().invoke(app, ["config", "advise", "--seconds=0.1", *arguments])

        return run

    def test_report_says_what_to_change(self, run):
        """
        Each finding is a line, with the setting's new value where one is to be changed.
        """
        last = stats(uptime_s=61, waiting_requests=80, running_requests=8, token_usage=0.4)
        result = run(last=last)
        assert 0 == result.exit_code, result.output
        assert "ok      queue: 80 waiting, 8 running; healthy\n" in result.stdout
        assert (
            "change  memory: token usage 0.40 while 80 wait; admission is too careful: lower "
            "schedule_conservativeness to 0.3\n"
        ) in result.stdout

    def test_json_is_only_json(self, run):
        """
        With --json the load and the advice are one object.
        """
        last = stats(uptime_s=61, waiting_requests=80, running_requests=8, token_usage=0.4)
        report = json.loads(run("--json", last=last).stdout)
        assert 60 == report["load"]["seconds"]
        assert {"setting": "schedule_conservativeness", "value": 0.3}.items() <= report["advice"][
            1
        ].items()

    def test_two_readings_are_taken_however_long_the_first_took(self, run, monkeypatch):
        """
        A command that is held up for longer than it was to watch reads a second time all the same.
        """
        clock = SimpleNamespace(monotonic=itertools.count(0, 60).__next__, sleep=lambda _: None)
        monkeypatch.setattr(advise_command, "time", clock)
        last = stats(uptime_s=61, waiting_requests=80, running_requests=8, token_usage=0.4)
        assert 60 == json.loads(run("--json", last=last).stdout)["load"]["seconds"]

    def test_restarted_server_is_one_line(self, run):
        """
        A server that was restarted while watched cannot be judged, which is said.
        """
        result = run(last=stats(uptime_s=0.5))
        assert 1 == result.exit_code
        assert "tandem: the server was restarted meanwhile: ask again\n" == result.output
