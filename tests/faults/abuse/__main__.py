"""
Abuse of a service by what reaches its ports, with figures: `python -m tests.faults.abuse`.

Each attempt has services of its own, with the bundled model. `--json FILE` keeps the figures;
`--before FILE` prints those of an earlier run, of another commit say, beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.faults.abuse.executor_port import health_names, malformed_batch, stolen_lease, watchers
from tests.faults.abuse.public_port import (
    LARGE,
    amplified,
    burst,
    long_id,
    parsed,
    short_of_memory,
)
from tests.faults.abuse.services import Figures, services
from tests.faults.abuse.starts import hostile_model, interrupted_start, stolen_socket
from tests.faults.abuse.strangers import foreign_names, without_credential

SPARE_MIB = 256


def main(argv: Sequence[str]) -> int:
    """Make the attempts that are asked for, and print a table."""
    options = _options(argv)
    found: dict[str, Figures] = {}
    for name in options.only or ATTEMPTS:
        found[name] = ATTEMPTS[name]()
        sys.stderr.write(f"{name}: {found[name]}\n")
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    before = json.loads(options.before.read_text()) if options.before is not None else {}
    sys.stdout.write(table(found, before) + "\n")
    return 0


def table(found: dict[str, Figures], before: dict[str, Figures]) -> str:
    """Return the figures as Markdown, beside those of an earlier run."""
    rows = ["| attempt | figure | before | now |", "|---|---|---|---|"]
    rows += [
        f"| {name} | {figure} | {before.get(name, {}).get(figure, '')} | {value} |"
        for name, figures in found.items()
        for figure, value in figures.items()
    ]
    return "\n".join(rows)


def _on_services(attempt: Callable[[Cluster], Figures]) -> Callable[[], Figures]:
    """Return an attempt that starts a scheduler and an executor with their defaults."""

    def run() -> Figures:
        with services() as cluster:
            return attempt(cluster)

    return run


def _large(count: int, megabytes: int, kind: str) -> tuple[str, Callable[[], Figures]]:
    num_bytes = megabytes * 1_000_000
    name = f"{count} of {megabytes} MB: {kind}"
    return name, _on_services(lambda cluster: amplified(cluster, kind, count, num_bytes))


ATTEMPTS: dict[str, Callable[[], Figures]] = {
    "5,000 calls, 10 connections": _on_services(lambda cluster: burst(cluster, 5_000, 10)),
    "20,000 calls, 40 connections": _on_services(lambda cluster: burst(cluster, 20_000, 40)),
    "20,000 calls, 200 connections": _on_services(lambda cluster: burst(cluster, 20_000, 200)),
    **dict(_large(10, 15, kind) for kind in LARGE),
    **dict(_large(60, 4, kind) for kind in LARGE),
    **dict((_large(60, 15, "stop"), _large(200, 15, "text"))),
    f"60 of 4 MB: stop, {SPARE_MIB} MiB of address space left": _on_services(
        lambda cluster: short_of_memory(cluster, "stop", 60, 4_000_000, SPARE_MIB)
    ),
    "8 of 4 MB: nested JSON": _on_services(lambda cluster: parsed(cluster, "[" * 50 + "]" * 50, 8)),
    "8 of 4 MB: empty arrays in JSON": _on_services(lambda cluster: parsed(cluster, "[]", 8)),
    "request_id of 15 MB": _on_services(lambda cluster: long_id(cluster, 15_000_000)),
    "request_id of 3.9 MB": _on_services(lambda cluster: long_id(cluster, 3_900_000)),
    "lease of 49 days": _on_services(stolen_lease),
    "40 watchers": _on_services(lambda cluster: watchers(cluster, 40)),
    "10,000 health names": _on_services(health_names),
    "a batch that the link refuses": malformed_batch,
    "a second service on a unix socket": stolen_socket,
    "Ctrl-C during the start": interrupted_start,
    "a model's defaults out of range": hostile_model,
    "another tenant's names": foreign_names,
    "calls without a credential": without_credential,
}


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.abuse", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(ATTEMPTS), help="one attempt")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--before", type=Path, help="figures of an earlier run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
