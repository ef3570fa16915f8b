"""
Measure the delivery of tokens to many clients, check what is claimed of it and write README.md.

    python -m tests.bench.streams.report

Takes some minutes, with nothing else running if the figures are to mean anything; the page says how
busy the machine was. A claim that does not hold ends it with 1, and the page is left as it was.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bench.machine import machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
COLUMNS = {
    "streams": "streams",
    "frontends": "frontends",
    "stalled": "stalled",
    "tokens_per_s": "tokens/s",
    "messages_per_s": "messages/s",
    "tokens_per_message": "tokens per message",
    "frontend_us_per_message": "frontend CPU µs per message",
    "frontend_us_per_token": "per token",
    "core_us_per_step": "core CPU µs per step",
    "step_ms": "step to step, ms",
    "reading_step_ms": "the same before they stalled",
    "frontend_mib": "frontend MiB",
    "slow_consumers": "ended SLOW_CONSUMER",
}
TEXT = """# Tokens delivered to many clients

Written by `python -m tests.bench.streams.report`; change that, not this page. It runs `tandem bench
stream --full`: a whole scheduler service, an executor without a model whose steps take 1 ms (4 ms with
1,024 streams, so that no more tokens are made than for 256), and a reader ({reader}) over eight HTTP/2
connections, all on one machine: {machine}. Load average before the run, from other
work: **{load:.1f}**; the benchmark ran at niceness {niceness}. CPU figures are those of all threads of a process.

{table}

Checked by the script: no stream failed, no message had an offset that did not follow the last one,
each client that stopped reading ended `SLOW_CONSUMER` and no other did.

- When {stalled} of 256 clients stop reading, the core's step takes {stalled_ratio:.2f} times as long as just before
  (one frontend), and frontends hold {mib:+.1f} MiB: what waits for a client is merged, 4 bytes a token.
- Merging is what makes the rate: a message costs a frontend {us_per_message:.0f} µs at 256 streams, of which gRPC
  takes about half, and a frontend that has no time for one per token puts more tokens into each. Clients
  then get {per_client:.0f} messages a second each, not one per token.
- A second frontend helps only where there is a core for it: here it brings {second:.2f} times the tokens of
  one at 256 streams and {second_1024:.2f} times at 1,024, and executor, core and reader share its cores.
- 64 streams are bound by the step, not by delivery. At 1,024 streams clients get {share_1024:.0f} % of the
  tokens that steps made while it was measured; the rest waits, merged, and follows.
"""


def measure() -> list[dict]:
    command = [sys.executable, "-m", "tandem_bench", "stream", "--full", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def table(rows: list[dict]) -> str:
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---:|" * len(COLUMNS)]
    for row in rows:
        cells = ["" if row[name] is None else f"{row[name]:,}" for name in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def find(rows: list[dict], streams: int, frontends: int, *, stalled: bool = False) -> dict:
    (row,) = (
        row
        for row in rows
        if (row["streams"], row["frontends"], row["stalled"] > 0) == (streams, frontends, stalled)
    )
    return row


def check(rows: list[dict]) -> None:
    """Raise AssertionError for a claim that does not hold."""
    for row in rows:
        assert row["failed"] == 0, row
        assert row["bad_offsets"] == 0, row
        assert row["slow_consumers"] == row["stalled"], row


def main() -> int:
    load = os.getloadavg()[0]
    rows = measure()
    try:
        check(rows)
    except AssertionError as error:
        print(f"does not hold: {error}")
        return 1
    one, stalled = find(rows, 256, 1), find(rows, 256, 1, stalled=True)
    many = find(rows, 1024, 1)
    page = TEXT.format(
        reader=one["reader"],
        machine=machine(),
        load=load,
        niceness=os.nice(0),
        table=table(rows),
        stalled=stalled["stalled"],
        stalled_ratio=stalled["step_ms"] / stalled["reading_step_ms"],
        mib=stalled["frontend_mib"] - one["frontend_mib"],
        us_per_message=one["frontend_us_per_message"],
        per_client=one["messages_per_s"] / one["streams"],
        second=find(rows, 256, 2)["tokens_per_s"] / one["tokens_per_s"],
        second_1024=find(rows, 1024, 2)["tokens_per_s"] / many["tokens_per_s"],
        share_1024=100 * many["tokens_per_s"] * many["step_ms"] / 1e3 / many["streams"],
    )
    (HERE / "README.md").write_text(page, encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
