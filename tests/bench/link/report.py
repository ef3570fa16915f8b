"""
Measure how long a device waits for its scheduler, at every combination, and write README.md.

    python -m tests.bench.link.report [RESULTS.json ...]

Takes a quarter of an hour, with nothing else running if the figures are to mean anything. Given what
`tandem bench link --full --json` printed, it writes the page from that; given more, of some points
measured again, from the median of each point.
"""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import chain, product
from pathlib import Path
from statistics import median

from tests.bench.machine import machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PLACE = "step_ms", "rows", "window", "transport", "clients"
FIGURES = "idle_percent", "scheduler_cpu_us"
TEXT = """# How long a device waits for its scheduler

Written by `python -m tests.bench.link.report`; change that, not this page. It runs `tandem bench link
--full`: a scheduler, and an executor without a model whose steps take a fixed time, as separate
processes joined by gRPC, on one machine: {machine}. Each cell is one second or more of
decode-only steps; {repeated} of the {points} were measured up to {most} times and show the median. `u` is a unix
socket, `t` TCP, and the number after it the window: how many steps are sent before a result is back (above
2: running ahead). With clients, every row is streamed to one of up to 256 gRPC clients, whose reader
shares the machine too.

## Percent of its time that the device is idle

{idle}

## Microseconds of scheduler CPU per step

{cpu}

- All processes share {cores} cores: the executor's own threads, the emulated device, the scheduler and, with
  clients, a frontend and the clients' reader. The machine is shared with others: at 0.6 ms a single point
  can be far above its neighbours, as can a whole hour. At 0.6 and 1 ms they need more CPU than there is, which is
  what the idle time with clients shows.
- A window of 1 is what a scheduler costs that waits for each result: {one:.0f} % at 256 rows and 2 ms; a
  window of 2 {two:.1f} %, four ahead {four:.1f} % (unix sockets, no clients).
"""


def measure() -> list[dict]:
    command = [sys.executable, "-m", "tandem_bench", "link", "--full", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def table(points: list[dict], figure: str, digits: int) -> str:
    by_place = {
        (
            point["step_ms"], point["rows"], point["clients"] > 0,
            point["transport"], point["window"],
        ): point[figure]
        for point in points
    }  # fmt: skip
    steps, rows, served, transports, windows = (
        sorted({place[axis] for place in by_place}) for axis in range(5)
    )
    columns = list(product(served, transports[::-1], windows))
    names = [
        f"{transport[0]}{window}{', clients' if is_served else ''}"
        for is_served, transport, window in columns
    ]
    lines = ["| step ms | rows | " + " | ".join(names) + " |", "|" + "---:|" * (len(names) + 2)]
    for step_ms, num_rows in product(steps, rows):
        cells = [by_place.get((step_ms, num_rows, *column)) for column in columns]
        texts = ["" if cell is None else f"{cell:,.{digits}f}" for cell in cells]
        lines.append(f"| {step_ms:g} | {num_rows:,} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def medians(points: list[dict]) -> tuple[list[dict], Counter]:
    """Return one point for each place measured, and the number of its measurements."""
    by_place: dict[tuple, list[dict]] = defaultdict(list)
    for point in points:
        by_place[tuple(point[name] for name in PLACE)].append(point)
    middle = [
        same[0] | {name: median(point[name] for point in same) for name in FIGURES}
        for same in by_place.values()
    ]
    return middle, Counter({place: len(same) for place, same in by_place.items()})


def idle_at(points: list[dict], window: int) -> float:
    (point,) = (
        point
        for point in points
        if (point["step_ms"], point["rows"], point["clients"]) == (2.0, 256, 0)
        and (point["transport"], point["window"]) == ("unix", window)
    )
    return point["idle_percent"]


def main(argv: list[str]) -> int:
    read = [json.loads(Path(name).read_text(encoding="utf-8")) for name in argv]
    points, times = medians([*chain(*read)] if argv else measure())
    page = TEXT.format(
        machine=machine(),
        cores=machine().split(" ", 1)[0],
        points=len(points),
        repeated=sum(count > 1 for count in times.values()),
        most=max(times.values()),
        idle=table(points, "idle_percent", 1),
        cpu=table(points, "scheduler_cpu_us", 0),
        one=idle_at(points, 1),
        two=idle_at(points, 2),
        four=idle_at(points, 4),
    )
    (HERE / "README.md").write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
