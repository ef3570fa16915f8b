"""`tandem top`: what is shown of a server, and what rates are of."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tandem.admin.v1 import executors_pb2
from tandem_client import Stats
from tandem_client.admin.executors import executors_from_proto
from tandem_client.cli.top.table import table
from tandem_client.views.history import SnapshotHistory
from tandem_client.views.model import view_of
from tandem_client.views.snapshot import Snapshot
from tests.clients.python.fake_admin import EXECUTORS
from tests.stats import changed

ZERO = Stats()
SERVING = changed(ZERO, executor_attached=True, executor_address="box:1")


def shown(now, before=None, *, width=80, **console):
    """Return what a terminal of this width shows."""
    screen = Console(file=io.StringIO(), width=width, **console)
    history = SnapshotHistory(Snapshot(stats=now if before is None else before))
    if before is not None:
        history.add(Snapshot(stats=now))
    screen.print(table(view_of(history), width))
    return screen.file.getvalue()


class TestCommand:
    def test_once_shows_what_happens_now(self, run, server):
        """
        --once takes two snapshots, and shows the model, load, KV cache, and rates and latencies of the time between.
        """
        server.seen.num_polls = 1000  # what happened before does not count
        result = run("top", "--once", "--interval-s", "0.1", "--admin-address", server.address)

        assert (0, 1002) == (result.exit_code, server.seen.num_polls)
        for words in (
            "fake, float32, context of 512 tokens",
            "2 running, 0 waiting, policy lpm",
            "56% of 144 tokens, 48 cached",
            "200 output tokens/s, 1,000 prompt tokens/s",
            "TTFT 125 ms, ITL 12.5 ms",
            "25% of prompt tokens found",
            "133/s, forward 5.0 ms, sampling 1.2 ms, 75% from CUDA graphs",
            "6 by max_num_seqs",
        ):
            assert words in result.stdout

    def test_refused_token_ends_it_with_a_line(self, run, server):
        """
        A server that refuses the token is not asked again: one line says why, and the exit code is that of a refusal.
        """
        server.seen.operator_token = "token"
        where = ("--interval-s", "0.1", "--admin-address", server.address)
        result = run("top", "--once", "--api-key", "guessed", *where)
        assert (4, "") == (result.exit_code, result.stdout)
        assert "tandem: UNAUTHENTICATED: no valid token was sent" in result.stderr
        assert 0 == run("top", "--once", "--api-key", "token", *where).exit_code

    def test_every_snapshot_goes_into_a_pipe(self, tandem, server):
        """
        Each snapshot is printed below the one before when the output is no terminal.
        """
        process = tandem("top", "--interval-s", "0.1", "--admin-address", server.address)
        snapshots = (line for line in process.stdout if "policy lpm" in line)

        assert next(snapshots) == next(snapshots)

    def test_json_has_all_counters_and_the_rates(self, run, server):
        """
        --json prints every counter of the snapshot, and the rates beside them.
        """
        where = ("--admin-address", server.address)
        content = json.loads(run("top", "--once", "--json", "--interval-s", "0.1", *where).stdout)

        names = {field.name for field in Stats.DESCRIPTOR.fields}
        more = {"state", "why", "rates", "points", "requests", "num_requests", "executors"}
        more |= {"last_steps", "faults", "tells_activity"}
        assert names | more == set(content)
        assert (2, 5, 9) == tuple(
            content[name] for name in ("running_requests", "used_blocks", "total_blocks")
        )
        assert (1.5, 200.0, 125.0, 12.5) == tuple(
            content["rates"][name]
            for name in ("window_s", "output_tokens_per_s", "ttft_ms", "itl_ms")
        )


class TestExecutors:
    def test_each_has_a_line_where_several_serve(self, run, server):
        """
        The table has state, requests, KV memory and steps of each executor, if there are several.
        """
        once = ("top", "--once", "--interval-s", "0.1", "--admin-address", server.address)
        server.seen.executors = list(EXECUTORS)
        lines = run(*once).stdout.splitlines()
        first = next(at for at, line in enumerate(lines) if line.startswith("executors"))
        bar = "\N{FULL BLOCK}" * 2 + "\N{MEDIUM SHADE}" + "\N{LIGHT SHADE}" * 5
        assert ["executors", "box:1", "serving", "2/32", bar, "25%", "0.0/s", "2", "lost"] == lines[
            first
        ].split()
        assert ["box:2", "refused", "0/0", "-", "0.0/s"] == lines[first + 1].split()

        server.seen.executors = server.seen.executors[:1]
        assert not any(line.startswith("executors") for line in run(*once).stdout.splitlines())

    def test_older_server_has_no_lines(self, run, server):
        """
        A server that does not list its executors is shown as ever.
        """
        server.seen.executors = None
        where = ("--interval-s", "0.1", "--admin-address", server.address)
        result = run("top", "--once", "--json", *where)
        assert (0, []) == (result.exit_code, json.loads(result.stdout)["executors"])

    def test_lines_fit_eighty_columns(self):
        """
        A long address is cut in front, where sockets of one folder are alike.
        """
        path = "unix:/tmp/tandem-0123456789/executor-"
        executors = [summary(f"{path}{number}.sock", 10**6) for number in (1, 2)]
        screen = Console(file=io.StringIO(), width=80)
        before = tuple(summary(one.address, 0) for one in executors)
        history = SnapshotHistory(Snapshot(stats=changed(SERVING, uptime_s=1.0), executors=before))
        history.add(Snapshot(stats=changed(SERVING, uptime_s=3.0), executors=tuple(executors)))
        screen.print(table(view_of(history), 80))
        shown_lines = [line for line in screen.file.getvalue().splitlines() if ".sock" in line]
        assert ["executor-1.sock", "executor-2.sock"] == [
            line.split("/")[1].split()[0] for line in shown_lines
        ]
        assert all(line.rstrip().endswith("500000/s") for line in shown_lines)


def summary(address, steps):
    """Return an executor at work, with so many steps."""
    proto = executors_pb2.ExecutorSummary(
        address=address,
        state=executors_pb2.EXECUTOR_STATE_SERVING,
        running_requests=256,
        max_requests=256,
        used_blocks=99_999,
        total_blocks=100_000,
        steps=steps,
    )
    (one,) = executors_from_proto(executors_pb2.ListExecutorsResponse(executors=[proto]))
    return one


class TestTable:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({}, "serving, up 0 s"),
            ({"suspended": True}, "suspended, up 0 s; an operator suspended it"),
            ({"executor_attached": False, "executor_sessions": 1}, "not serving, up 0 s; its exec"),
            ({"uptime_s": 3 * 86400.0}, "up 3 days"),
            ({"waiting_requests": 3, "queued_tokens": 4096}, "3 waiting (4,096 prompt tokens)"),
            ({"preemptions": 7, "retractions": 4}, "7 times, 4 of them for lack of KV blocks"),
            ({"executor_losses": 2, "recomputed_tokens": 64}, "lost 2 times since the start"),
            ({"executor_reattachments": 2}, "connection restored 2 times"),
            ({"host_blocks": 5, "used_host_blocks": 1}, "1 of 5 blocks used"),
        ],
    )
    def test_what_is_unusual_is_said(self, changes, words):
        """
        States and counters that are worth a word appear in words of the field.
        """
        assert words in shown(changed(SERVING, **changes), width=120)

    def test_what_never_happened_takes_no_line(self):
        """
        A server without preemptions, host memory and a known model shows no lines for them.
        """
        names = {line.split("  ")[0] for line in shown(SERVING).splitlines()}

        assert set() == names & {"model", "preempted", "host memory"}

    @pytest.mark.parametrize(
        ("usage", "colour"), [(0.5, "32"), (0.85, "33"), (0.97, "31")], ids=["ok", "high", "full"]
    )
    def test_bar_takes_the_colour_of_what_is_left(self, usage, colour):
        """
        The bar of the KV cache is green, yellow when little is left, and red when nearly nothing is.
        """
        seen = shown(
            changed(SERVING, token_usage=usage, used_blocks=round(100 * usage), total_blocks=100),
            force_terminal=True,
            color_system="standard",
        )
        line = next(line for line in seen.splitlines() if "KV cache" in line)

        assert f"\x1b[{colour}m\N{FULL BLOCK}" in line

    def test_every_line_fits_eighty_columns(self):
        """
        The lines of a busy server with large numbers are not wrapped at 80 columns.
        """
        before = changed(SERVING, uptime_s=1.0)
        now = changed(
            SERVING, uptime_s=3601.0, model="llama-3.1-8b", dtype="bfloat16", max_model_len=131_072,
            running_requests=256, waiting_requests=999, queued_tokens=999_999, schedule_policy="lpm",
            token_usage=0.5, total_blocks=25_600, block_size=16, cached_blocks=9_999,
            output_tokens=36_000_000, prefill_tokens=99_000_000, finished_requests=99_999,
            first_tokens=9, time_to_first_token_s=9.0, next_tokens=9, inter_token_s=1.0,
            steps=99_999, executor_forward_s=999.0, executor_sample_s=99.0, graph_steps=99_999,
            steps_in_flight=16, prefix_cache_lookup_tokens=9, prefix_cache_hit_tokens=3,
        )  # fmt: skip

        assert 12 == len(shown(now, before).splitlines())
