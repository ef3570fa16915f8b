"""
Screenshots of `tandem top` and of the console, and their numbers beside GetStats and /metrics.

`python -m tests.clients.console.screenshots` starts a small system under load, holds its executor so
that no number moves, and writes into clients/console/screenshots. It ends with 1 where a number
differs. It needs chromium and chromedriver.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tandem.admin.v1.stats_pb2 import GetStatsResponse
from tandem.common.v1 import metric_pb2
from tandem.errors import TandemError
from tandem_client.cli.top.table import table
from tandem_client.views.history import SnapshotHistory
from tandem_client.views.model import as_plain, view_of
from tandem_client.views.snapshot import take_snapshot
from tests.clients.console.browser import Browser, browser
from tests.e2e.cluster import BUNDLED_MODEL, ROOT, Cluster, Process
from tests.waiting import wait_until

FOLDER = ROOT / "clients/console/screenshots"
NUM_CLIENTS = 12
LOAD_S = 25.0
HEAD = f"""# Numbers of the views

Written by `python -m tests.clients.console.screenshots`: a small system with {NUM_CLIENTS} clients, its executor held so
that no number moves while it is read in four ways. The page is in a real Chromium.

| field | GetStats | page | `tandem top` | /metrics |
|---|---|---|---|---|"""
FIELDS = """
    return [...document.querySelectorAll("[data-field]")].map(
      (one) => [one.dataset.field, one.dataset.value, one.textContent]);
"""
SNAPSHOT_NUMBER = (
    "return document.body.dataset.snapshot ? Number(document.body.dataset.snapshot) : 0;"
)


def metric_names() -> dict[str, str]:
    """Return the sample of /metrics for each field of the statistics that is one."""
    names = {}
    for field in GetStatsResponse.DESCRIPTOR.fields:
        options = field.GetOptions()
        for mark, suffix in ((metric_pb2.counter, "_total"), (metric_pb2.gauge, "")):
            if options.HasExtension(mark):
                name = options.Extensions[mark].name or field.name
                names[field.name] = f"tandem_{name}{suffix}"
    return names


@contextlib.contextmanager
def load(cluster: Cluster) -> Iterator[None]:
    """Keep clients of three tenants asking, with prompts of several lengths."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        with cluster.client() as client:
            while not is_over.is_set():
                prompt = "def read(path):\n" * (1 + 7 * (number % 5))
                options = {"max_tokens": 40 + 20 * number, "tenant": f"team-{number % 3}"}
                with contextlib.suppress(TandemError):  # the system ends before its clients
                    for _ in client.generate(prompt, ignore_eos=True, **options):
                        if is_over.is_set():
                            break

    threads = [threading.Thread(target=ask, args=(at,), daemon=True) for at in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()


def poll_for(cluster: Cluster, seconds: float) -> SnapshotHistory:
    """Take a snapshot each second."""
    with cluster.admin() as admin:
        history = SnapshotHistory(take_snapshot(admin))
        for _ in range(round(seconds)):
            time.sleep(1.0)
            history.add(take_snapshot(admin))
    return history


def next_snapshot(page: Browser) -> None:
    """Wait until the page shows a snapshot that began after now."""
    seen = page.run(SNAPSHOT_NUMBER)
    wait_until(lambda: page.run(SNAPSHOT_NUMBER) > seen + 1, "two more snapshots on the page")


def save_top(history: SnapshotHistory) -> None:
    """Write the screen of `tandem top` as SVG."""
    screen = Console(record=True, file=io.StringIO(), width=110, height=45, force_terminal=True)
    screen.print(table(view_of(history), 110, height=45))
    drawn = screen.export_svg(title="tandem top")
    # The picture must load nothing: without its fonts it has those of its reader.
    drawn = re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", drawn, flags=re.DOTALL)
    (FOLDER / "top.svg").write_text(drawn, encoding="utf-8")


def compare(
    page: Browser, cluster: Cluster, history: SnapshotHistory
) -> tuple[list[str], list[str]]:
    """Return lines of a table of all numbers, and the names of those that differ."""
    metrics_address = cluster.scheduler.addresses()["metrics_address"]
    text = httpx.get(f"http://{metrics_address}/metrics", trust_env=False).text
    samples = {
        one.name: one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if not one.labels
    }
    stats, names = cluster.stats(), metric_names()
    with cluster.admin() as admin:
        history.add(take_snapshot(admin))
    told = as_plain(view_of(history))["stats"]
    lines, differing = [], []
    for name, raw, shown in page.run(FIELDS):
        expected = getattr(stats, name)
        on_page = [float(raw), float(shown.replace(",", ""))]
        metric = samples[names[name]] if name in names else None
        others = [told[name], *on_page, *([] if metric is None else [metric])]
        lines.append(
            f"| {name} | {expected:,} | {shown} | {told[name]:,} | "
            f"{'-' if metric is None else f'{metric:,.0f}'} |"
        )
        if any(value != expected for value in others):
            differing.append(name)
    return lines, differing


def main() -> int:
    """Save both views and the table; return 1 where a number differs."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        limits = ["--max-num-blocks=160", "--max-batch-size=8", "--max-total-tokens=256"]
        cluster = Cluster(BUNDLED_MODEL, folder, limits, [])
        stack.callback(cluster.close)
        cluster.start_executor()
        flags = ["--listen=127.0.0.1:0", f"--admin-address={cluster.admin_address}"]
        console = Process("tandem_console", flags, folder, "console")
        stack.callback(console.end)
        page = stack.enter_context(browser())
        page.open(f"http://{console.addresses()['address']}/")
        stack.enter_context(load(cluster))
        history = poll_for(cluster, LOAD_S)
        save_top(history)
        (FOLDER / "console.png").write_bytes(page.screenshot())
        with cluster.held():
            wait_until(lambda: cluster.stats().steps == steps_later(cluster), "no step")
            next_snapshot(page)
            lines, differing = compare(page, cluster, history)
    page_of_numbers = "\n".join([HEAD, *lines, ""])
    (FOLDER / "numbers.md").write_text(page_of_numbers, encoding="utf-8")
    sys.stdout.write(json.dumps({"fields": len(lines), "differing": differing}) + "\n")
    return 1 if differing or not lines else 0


def steps_later(cluster: Cluster) -> int:
    """Return the number of steps that were computed half a second later."""
    time.sleep(0.5)
    return cluster.stats().steps


if __name__ == "__main__":
    sys.exit(main())
