"""
`tandem bench stream [flags]`: how many tokens reach how many clients.

A whole scheduler service is measured with an executor without a model. Its steps take a fixed short
time: every stream gets a token per step, and frontends merge tokens that they cannot send at once.
The client is a reader of all streams in processes of its own. With --stalled some streams are no
longer read: steps must go on as before, and only the requests of those streams must end.

Without options for points, a few of them are measured, and none is begun after 38 s. With several
values of an option every combination is measured.

With --tls one point is measured in plain text and with TLS on the public port, in turns; it needs
the command openssl, which makes the certificate.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.process.exit_codes import EXIT_DONE, EXIT_FAILED
from tandem_bench.command_line import (
    BenchParser,
    at_least_one,
    count,
    time_above_zero,
)
from tandem_bench.link.points import Row, Table, measure_points
from tandem_bench.link.processes import BenchFailed, FixedStepExecutor, started_reader
from tandem_bench.link.requests import generate_requests
from tandem_bench.reader import ReadCounts, Reader
from tandem_bench.reader.readers import ReaderFailed
from tandem_bench.stream.certificate import SelfMadeCertificate
from tandem_bench.stream.encryption import Rates, compare
from tandem_bench.stream.points import FULL_POINTS, MAIN_POINTS, Point
from tandem_bench.stream.service import StreamService, Usage

MOST_PER_MS = 256
"""Most tokens made per millisecond, unless --step-ms is given."""
TIME_LIMIT_S = 38.0
"""Seconds after which none of `MAIN_POINTS` is begun."""
READER = "python"
"""The reader that measured, in results; older results may come from a compiled one."""
ABORTED = "10"
"""The gRPC status of SLOW_CONSUMER."""
_LIMIT_S = 60.0
_SETTLE_S = 0.5
_FULL_S = 1.0
"""Seconds without a token after which a stalled stream's windows are taken to be full."""
_POLL_S = 0.05

_TABLE = Table(
    name="stream",
    title="Delivered while an executor without a model makes a token per stream and step.",
    headings={
        "streams": "streams",
        "frontends": "frontends",
        "stalled": "stalled",
        "tokens_per_s": "tokens/s",
        "messages_per_s": "messages/s",
        "tokens_per_message": "tokens/msg",
        "frontend_us_per_message": "us/msg",
        "frontend_us_per_token": "us/token",
        "core_us_per_step": "core us/step",
        "step_ms": "step ms",
        "reading_step_ms": "if read",
        "frontend_mib": "MiB",
        "slow_consumers": "slow ended",
        "failed": "failed",
        "bad_offsets": "bad offsets",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """
    Result of one point; CPU time is that of all threads.

    Attributes:
        streams, frontends, stalled: As in `Point`.
        tokens_per_s: Tokens that all clients got, per second.
        messages_per_s: Messages that all clients got, per second.
        tokens_per_message: Tokens per message on average.
        frontend_us_per_message: CPU of the frontends per message, microseconds.
        frontend_us_per_token: CPU of the frontends per token, microseconds.
        core_us_per_step: CPU of the core process per step, microseconds.
        step_ms: Time from one step to the next on average, milliseconds.
        reading_step_ms: The same just before, while the stalled streams were still read; None
            without stalled streams.
        executor_step_ms: Fixed duration of the executor's steps, milliseconds.
        frontend_mib: Memory of all frontends at the end, MiB.
        slow_consumers: Stalled streams that ended with SLOW_CONSUMER.
        failed: Streams that ended with another error, and stalled ones that ended otherwise.
        bad_offsets: Messages that did not continue where the choice's last one ended.
        reader: Program that read the streams; always `READER`.
    """

    streams: int
    frontends: int
    stalled: int
    tokens_per_s: int
    messages_per_s: int
    tokens_per_message: float
    frontend_us_per_message: float
    frontend_us_per_token: float
    core_us_per_step: float
    step_ms: float
    reading_step_ms: float | None
    executor_step_ms: float
    frontend_mib: float
    slow_consumers: int
    failed: int
    bad_offsets: int
    reader: str

    @property
    def scheduler_us_per_token(self) -> float:
        """CPU of the core and all frontends per token that clients got, microseconds."""
        core_us_per_s = self.core_us_per_step * 1e3 / self.step_ms
        return self.frontend_us_per_token + core_us_per_s / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class _Moment:
    counts: ReadCounts
    usage: Usage
    steps: float


def measure(
    point: Point,
    *,
    step_ms: float,
    seconds: float,
    connections: int,
    certificate: SelfMadeCertificate | None = None,
) -> Delivery:
    """
    Start the processes of a point and measure once every stream was accepted; with a certificate,
    the public port is encrypted.

    Raises:
        BenchFailed: A process or stream failed, did not start in time, or brought nothing.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as name:
        directory = Path(name)
        with (
            FixedStepExecutor(step_ms, point.streams, "unix", directory) as executor,
            StreamService(
                executor,
                point.streams,
                point.frontends,
                directory,
                is_to_stall=point.stalled > 0,
                certificate=certificate,
            ) as service,
            started_reader(
                service.address,
                generate_requests(point.streams, 1),
                connections=connections,
                ca=None if certificate is None else certificate.file,
            ) as reader,
        ):
            time.sleep(_SETTLE_S)

            def now() -> _Moment:
                return _Moment(reader.report(), service.usage(), executor.report()["steps"])

            reading_step_ms = None
            if point.stalled:
                first = now()
                time.sleep(seconds)
                reading_step_ms = _step_ms(first, now())
                reader.stall(point.stalled)
                _wait_until_full(reader)
            before = now()
            time.sleep(seconds)
            after = now()
            if point.stalled:
                executor.wait_for_rows(point.streams - point.stalled)
                # A stream's end comes only after the messages that its client did not read.
                reader.resume()
                _wait(
                    reader,
                    lambda counts: sum(counts.stalled_statuses.values()) == point.stalled,
                    "stalled streams did not end",
                )
            return _delivery(point, (step_ms, reading_step_ms), before, after, reader)


def _step_ms(before: _Moment, after: _Moment) -> float:
    seconds = after.counts.time_s - before.counts.time_s
    return round(1e3 * seconds / max(1, after.steps - before.steps), 3)


def _delivery(
    point: Point,
    steps_ms: tuple[float, float | None],
    before: _Moment,
    after: _Moment,
    reader: Reader,
) -> Delivery:
    last = reader.report()
    seconds = after.counts.time_s - before.counts.time_s
    tokens = after.counts.tokens - before.counts.tokens
    messages = after.counts.messages - before.counts.messages
    steps = after.steps - before.steps
    if not (tokens and messages and steps):
        raise BenchFailed("nothing was delivered while it was measured")
    if last.malformed:
        raise BenchFailed(f"{last.malformed} messages could not be read and were not counted")
    frontend_us = (after.usage.frontend_cpu_ns - before.usage.frontend_cpu_ns) / 1e3
    core_us = (after.usage.core_cpu_ns - before.usage.core_cpu_ns) / 1e3
    return Delivery(
        streams=point.streams,
        frontends=point.frontends,
        stalled=point.stalled,
        tokens_per_s=round(tokens / seconds),
        messages_per_s=round(messages / seconds),
        tokens_per_message=round(tokens / messages, 1),
        frontend_us_per_message=round(frontend_us / messages, 1),
        frontend_us_per_token=round(frontend_us / tokens, 2),
        core_us_per_step=round(core_us / steps, 1),
        step_ms=_step_ms(before, after),
        reading_step_ms=steps_ms[1],
        executor_step_ms=steps_ms[0],
        frontend_mib=round(after.usage.frontend_mib, 1),
        slow_consumers=last.stalled_statuses.get(ABORTED, 0),
        failed=last.failed
        + sum(last.stalled_statuses.values())
        - last.stalled_statuses.get(ABORTED, 0),
        bad_offsets=last.bad_offsets,
        reader=READER,
    )


def _wait_until_full(reader: Reader) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    tokens = -1
    while (counts := reader.report()).stalled_tokens != tokens:
        if time.monotonic() > deadline_s:
            raise BenchFailed(f"stalled streams went on for {_LIMIT_S:.0f} s: {counts}")
        tokens = counts.stalled_tokens
        time.sleep(_FULL_S)


def _wait(
    reader: Reader,
    is_so: Callable[[ReadCounts], bool],
    what: str,
) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    while not is_so(counts := reader.report()):
        if counts.failed:
            raise BenchFailed(f"{what}: {counts.failed} failed, by status {counts.statuses}")
        if time.monotonic() > deadline_s:
            raise BenchFailed(f"{what} within {_LIMIT_S:.0f} s: {counts}")
        time.sleep(_POLL_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code, as `measure_points` does."""
    given = _parser().parse_args(arguments)
    points, is_default = _chosen(given)

    def delivery_of(point: Point, certificate: SelfMadeCertificate | None = None) -> Delivery:
        return measure(
            point,
            step_ms=given.step_ms or max(1.0, point.streams / MOST_PER_MS),
            seconds=given.seconds,
            connections=given.connections,
            certificate=certificate,
        )

    if given.tls:
        return _compare_encryption(given, delivery_of)

    def row_of(point: Point) -> Row:
        return asdict(delivery_of(point))

    return measure_points(
        _TABLE,
        points,
        row_of,
        as_json=given.json,
        time_limit_s=TIME_LIMIT_S if is_default else None,
    )


def _compare_encryption(
    given: argparse.Namespace,
    delivery_of: Callable[[Point, SelfMadeCertificate | None], Delivery],
) -> int:
    if (
        given.full
        or given.stalled
        or any(len(n or ()) > 1 for n in (given.streams, given.frontends))
    ):
        _parser().error("--tls compares one point: give one --streams and one --frontends")
    (streams,), (frontends,) = given.streams or (256,), given.frontends or (1,)
    point = Point(streams, frontends)

    def rates_of(certificate: SelfMadeCertificate | None) -> Rates:
        delivery = delivery_of(point, certificate)
        if delivery.failed or delivery.bad_offsets:
            raise BenchFailed(f"streams failed: {delivery}")
        return Rates(
            tokens_per_s=delivery.tokens_per_s,
            scheduler_us_per_token=round(delivery.scheduler_us_per_token, 3),
        )

    try:
        compare(rates_of, given.turns, as_json=given.json)
    except (BenchFailed, ReaderFailed) as error:
        sys.stderr.write(f"bench stream: {point.in_words}: {error}\n")
        return EXIT_FAILED
    return EXIT_DONE


def _chosen(given: argparse.Namespace) -> tuple[Sequence[Point], bool]:
    if given.full:
        return FULL_POINTS, False
    if not (given.streams or given.frontends or given.stalled):
        return MAIN_POINTS, True
    points = [
        Point(streams, frontends, stalled)
        for streams in given.streams or (256,)
        for frontends in given.frontends or (1,)
        for stalled in given.stalled or (0,)
        if stalled < streams
    ]
    if not points:
        _parser().error("--stalled must be less than --streams: some client has to read")
    return points, False


def _parser() -> BenchParser:
    parser = BenchParser("stream", __doc__)
    parser.add_list("--streams", type=at_least_one, help="client streams; default: 256")
    parser.add_list("--frontends", type=at_least_one, help="frontend processes; default: 1")
    parser.add_list("--stalled", type=count, help="streams that are not read meanwhile; default: 0")
    parser.add_argument(
        "--full",
        action="store_true",
        help="eight points, whatever the three options above; no time limit",
    )
    parser.add_argument(
        "--step-ms",
        type=time_above_zero,
        help="duration of a step in milliseconds; default: 1, or longer for more than 256 streams, "
        "so that at most 256 tokens are made per millisecond",
    )
    parser.add_argument(
        "--seconds",
        type=time_above_zero,
        default=1.5,
        help="seconds for each measurement, twice with stalled streams; default: 1.5",
    )
    parser.add_argument(
        "--connections",
        type=at_least_one,
        default=8,
        help="HTTP/2 connections of a reader process, which its streams share; default: 8",
    )
    parser.add_argument(
        "--tls", action="store_true", help="compare one point with itself behind TLS, in turns"
    )
    parser.add_argument(
        "--turns", type=at_least_one, default=5, help="turns of --tls; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON value and nothing else")
    return parser
