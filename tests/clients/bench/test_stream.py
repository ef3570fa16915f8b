"""The benchmark of streams, on few of them and for a short time."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from tandem_bench.__main__ import main
from tandem_bench.reader.readers import ReaderFailed
from tandem_bench.stream import command as stream
from tandem_bench.stream.encryption import Rates, compare

SERVICE = SimpleNamespace(address="127.0.0.1:1")


def measured(capsys, *flags: str) -> list[dict]:
    assert main(["stream", "--json", "--seconds=1", "--step-ms=2", *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
class TestDelivery:
    def test_measured_numbers_agree(self, capsys):
        """
        The output is a list with one entry per point, with rates that agree and with nothing lost.
        """
        (one,) = measured(capsys, "--streams=8", "--frontends=2")
        assert set(stream.Delivery.__dataclass_fields__) == set(one)
        assert (8, 2, 0, 2.0) == (
            one["streams"], one["frontends"], one["stalled"], one["executor_step_ms"],
        )  # fmt: skip
        assert (0, 0, 0) == (one["failed"], one["bad_offsets"], one["slow_consumers"])
        assert one["step_ms"] > 0
        # A stream's first and last message may carry no token; rates are rounded apart.
        assert 0 < one["messages_per_s"] <= 1.1 * one["tokens_per_s"]
        assert 0 < one["frontend_us_per_token"] <= 1.1 * one["frontend_us_per_message"]

    def test_stalled_streams_end_alone(self, capsys):
        """
        Clients that stop reading end as slow consumers, and all others get every token in order.
        """
        (one,) = measured(capsys, "--streams=24", "--stalled=3", "--step-ms=0.5")
        assert (24, 3, 3) == (one["streams"], one["stalled"], one["slow_consumers"])
        assert (0, 0) == (one["failed"], one["bad_offsets"])

    def test_one_connection_carries_all_streams(self, capsys):
        """
        With one connection the same is measured, and the result names the reader.
        """
        (one,) = measured(capsys, "--streams=4", "--connections=1")
        assert ("python", 0, 0) == (one["reader"], one["failed"], one["bad_offsets"])


class TestFlags:
    @pytest.mark.parametrize(
        ("flags", "why"),
        [
            (["--streams=4", "--stalled=4"], "some client has to read"),
            (["--seconds=-1"], "must be above 0"),
            (["--step-ms=0"], "must be above 0"),
            (["--tls", "--streams=4", "--streams=8"], "--tls compares one point"),
            (["--tls", "--stalled=1"], "--tls compares one point"),
        ],
        ids=["nobody reads", "no time", "no step", "TLS of two points", "TLS with stalled streams"],
    )
    def test_what_cannot_be_measured_is_refused(self, capsys, flags, why):
        """
        Flags that leave nothing to measure are an error, not an empty table.
        """
        with pytest.raises(SystemExit) as stopped:
            main(["stream", *flags])
        assert 2 == stopped.value.code
        assert why in capsys.readouterr().err


class TestReader:
    def test_failed_reader_is_told(self, monkeypatch, capsys):
        """
        A reader that ends is one line on stderr, with the point that is left out.
        """

        def fail(*_, **__):
            raise ReaderFailed("the reader ended with 1")

        monkeypatch.setattr(stream, "FixedStepExecutor", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(
            stream, "StreamService", lambda *_, **__: contextlib.nullcontext(SERVICE)
        )
        monkeypatch.setattr(stream, "started_reader", fail)
        assert 1 == main(["stream", "--streams=1", "--json"])
        (line,) = capsys.readouterr().err.splitlines()
        assert "1 streams, 1 frontends, 0 stalled: the reader ended with 1" in line


class TestEncryption:
    def test_turns_alternate_and_give_ratios_with_their_spread(self, capsys):
        """
        Every other turn begins with TLS; each ratio is told with its median, least and largest.
        """
        order = []

        def rates(certificate) -> Rates:
            order.append(certificate is not None)
            speed = 90 + 2 * len(order) if certificate else 100
            return Rates(tokens_per_s=speed, scheduler_us_per_token=2.5 if certificate else 2.0)

        compare(rates, 3, as_json=True)
        found = json.loads(capsys.readouterr().out)
        assert [False, True, True, False, False, True] == order
        assert {"median": 0.96, "least": 0.94, "most": 1.02} == found["tokens_ratio"]
        assert {"median": 1.25, "least": 1.25, "most": 1.25} == found["cpu_ratio"]
        assert 3 == len(found["turns"])

    @pytest.mark.slow
    def test_streams_behind_tls_are_measured(self, capsys):
        """
        A service with a self-made certificate on its public port serves the readers.
        """
        command = ["stream", "--tls", "--turns=1", "--streams=4", "--seconds=1", "--step-ms=2"]
        assert 0 == main(command)
        output = capsys.readouterr().out
        assert "tokens/s with TLS: " in output
        assert "CPU per token with TLS: " in output


@pytest.mark.slow
class TestUsage:
    def test_table_has_a_column_per_number(self, capsys):
        """
        Without --json a table is printed, one row per point.
        """
        assert main(["stream", "--seconds=1", "--step-ms=2", "--streams=2"]) == 0
        title, headings, row = capsys.readouterr().out.splitlines()
        assert "token per stream" in title
        assert "tokens/s" in headings
        assert len(stream._TABLE.headings) == len(row.split())
