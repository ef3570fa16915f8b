"""The page of results."""

from __future__ import annotations

from typing import Any

HEAD = """\
# Images

`python -m tests.deploy.images.run` builds the images on Debian's Python, runs each by podman with a read-only root, no
capability and the image's numeric user, and wrote this page ({date}, {machine}). Seconds depend on
what else the machine does.

| image | size, MB | of it Python packages, MB | the largest | built in, s | runs as, capabilities | writes to |
|---|---|---|---|---|---|---|
"""
TAIL = """
| what | figure |
|---|---|
| executor, from `podman run` to ready: first start, which compiles the C++ kernels | {first} s |
| the same with the volume of compiled kernels kept | {next} s |
| scheduler, from `podman run` to ready, executor there | {scheduler} s |
| memory of the idle scheduler (PSS of its {processes} processes) | {idle} MB |
| memory of the executor after it has served, bundled model (PSS) | {executor} MB |
| streamed completion, client to scheduler's to executor's container | {pieces} pieces, equal to the whole answer: {whole} |
| streamed completion over HTTP, through the gateway's container | {http} chunks |
| scheduler stopped (SIGTERM) while it streams | the stream went on for {drained} pieces to its end, exit code {exit} |
| executor stopped | exit code {executor_exit} |

Its text was, after `def read_json(path: str) -> dict:`

```python
{text}
```

PyTorch in the executor's image is that of pip's own index, {torch}.
The variant for GPUs and the default base (an image of a registry) are NOT TESTED here.
"""


def page(seen: dict[str, Any]) -> str:
    """Return the page for what was seen."""
    lines = [row(name, seen) for name in seen["images"]]
    stream = seen["stream"]
    packages = dict(seen["images"]["executor"]["packages"]["largest"])
    tail = TAIL.format(
        first=seen["executor_first_start_s"],
        next=seen["executor_next_start_s"],
        scheduler=seen["scheduler_start_s"],
        processes=seen["scheduler_idle"]["processes"],
        idle=megabytes(seen["scheduler_idle"]["pss"]),
        executor=megabytes(seen["executor_idle"]["pss"]),
        pieces=stream["pieces"],
        whole="yes" if stream["is_whole"] else "NO",
        http=seen["http"],
        drained=seen["drain"]["pieces"],
        exit=seen["drain"]["exit"],
        executor_exit=seen["executor_exit"],
        text=stream["text"],
        torch="with CUDA's libraries" if "nvidia" in packages else "without CUDA's libraries",
    )
    return HEAD.format(**seen) + "".join(lines) + tail


def row(name: str, seen: dict[str, Any]) -> str:
    """Return the line of an image."""
    built, inside = seen["images"][name], seen["inside"][name]
    packages = built["packages"]
    largest = ", ".join(f"{part} {megabytes(size)}" for part, size in packages["largest"][:4])
    written = ", ".join(place for place, can in inside["written"].items() if can)
    cells = (
        name,
        megabytes(built["bytes"]),
        megabytes(packages["all"]),
        largest,
        seen["build_s"][name],
        f"{inside['user']}, {inside['capabilities'] or 'none'}",
        written,
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |\n"


def megabytes(size: int) -> int:
    """Return bytes as MB (10^6)."""
    return round(size / 10**6)
