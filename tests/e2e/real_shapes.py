"""
`python -m tests.e2e.real_shapes [flags]`: half a billion random weights in the shapes of three
families, served by `tandem up` with nothing but defaults.

Of each it says what the start-up line promises (context, KV memory, weights) and what is so: the
length that the server tells, the executor's resident memory before and after a prompt of 20,000
tokens, and that this prompt is answered where the model allows it and refused with a reason where
it does not. A table goes to stdout and, with --out, to a file; 1 if something is not as promised.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from tandem.errors import PromptTooLong, TandemError
from tandem_bench.offline.checkpoints import random_model
from tandem_client import NO_RETRY, AdminClient, Client
from tests.bench.machine import machine
from tests.bench.shapes import HALF_A_BILLION
from tests.model_zoo import write_tokenizer
from tests.ports import free_port
from tests.waiting import wait_until

GIB = 2**30
LIBRARIES_BYTES = GIB
"""Memory of interpreter, PyTorch and gRPC, which the memory plan leaves out."""
START_S = 300.0
_HEADINGS = (
    "| shape | type | supports | max_model_len | KV tokens | KV | weights | start | after | prompt "
    "| as promised |"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Promises of one shape's start-up line, and the values that were measured."""

    shape: str
    dtype: str
    supported_len: int
    max_model_len: int
    kv_tokens: int
    kv_gib: float
    fixed_gib: float
    rss_start_gib: float
    rss_after_gib: float
    outcome: str
    wrong: tuple[str, ...]


def main(arguments: list[str]) -> int:
    """Try every shape; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.real_shapes", description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=HALF_A_BILLION, default=list(HALF_A_BILLION))
    parser.add_argument("--prompt-len", type=int, default=20_000)
    parser.add_argument("--out", type=Path, help="file for the table")
    given = parser.parse_args(arguments)
    rows = []
    for shape in given.shape:
        with TemporaryDirectory() as folder:
            rows.append(_try(shape, given.prompt_len, Path(folder)))
        sys.stderr.write(f"{rows[-1]}\n")
    page = _page(rows, given.prompt_len)
    sys.stdout.write(page)
    if given.out is not None:
        given.out.write_text(page)
    return 1 if any(row.wrong for row in rows) else 0


def _try(shape: str, prompt_len: int, folder: Path) -> Found:
    sizes = HALF_A_BILLION[shape]
    directory = folder / shape
    shutil.copytree(random_model(shape, sizes), directory)
    write_tokenizer(directory)
    with _server(directory, folder / "logs") as (address, admin_address, process):
        plan = _plan(folder / "logs")
        executor = next(
            child
            for child in process.children(recursive=True)
            if "executor_svc" in child.cmdline() and "-m" in child.cmdline()
        )
        with AdminClient(admin_address, retry=NO_RETRY) as admin:
            told = {entry.name: entry.value for entry in admin.config()}
        before = executor.memory_info().rss
        outcome = _ask(address, prompt_len, sizes.vocab_size)
        after = executor.memory_info().rss
    fixed = int(plan["weight_bytes"]) + int(plan["activation_bytes"])
    longest, kv_bytes = int(plan["max_model_len"]), int(plan["kv_bytes"])
    expected = "answered" if prompt_len < longest else "PROMPT_TOO_LONG"
    wrong = {
        "the server tells another length": told["max_model_len"] != longest,
        "more memory at the start than planned": before > fixed + LIBRARIES_BYTES,
        "more memory after the prompt than planned": after > fixed + kv_bytes + LIBRARIES_BYTES,
        f"expected {expected}": not outcome.startswith(expected),
    }
    return Found(
        shape=shape,
        dtype=plan["dtype"],
        supported_len=sizes.max_positions,
        max_model_len=longest,
        kv_tokens=int(plan["tokens"]),
        kv_gib=kv_bytes / GIB,
        fixed_gib=fixed / GIB,
        rss_start_gib=before / GIB,
        rss_after_gib=after / GIB,
        outcome=outcome,
        wrong=tuple(what for what, is_so in wrong.items() if is_so),
    )


def _ask(address: str, prompt_len: int, vocab_size: int) -> str:
    """Send one prompt; return "answered after ... s", or the reason of the refusal."""
    ids = np.random.default_rng(0).integers(0, vocab_size, prompt_len).tolist()
    started_s = time.monotonic()
    try:
        with Client(address, retry=NO_RETRY) as client:
            answer = client.complete(token_ids=ids, max_tokens=2, ignore_eos=True)
    except PromptTooLong as refusal:
        return refusal.reason
    except TandemError as error:
        return f"{error.reason}: {error.message}"
    assert len(answer.token_ids) == 2
    return f"answered after {time.monotonic() - started_s:.0f} s"


@contextlib.contextmanager
def _server(model: Path, logs: Path) -> Iterator[tuple[str, str, psutil.Process]]:
    """Start `tandem up MODEL` with defaults for all else; yield its addresses and its process."""
    listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [sys.executable, "-m", "tandem_client", "up", str(model)]
    flags = [f"--listen={listen}", f"--admin-listen={admin}", "--metrics-listen=", "--log-dir"]
    with subprocess.Popen(
        [*command, *flags, str(logs)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            said = ""

            def is_serving() -> bool:
                nonlocal said
                line = process.stdout.readline()
                assert line, "tandem up ended"
                said += line
                return "serving at" in line

            wait_until(is_serving, "the server", START_S)
            yield listen, admin, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def _plan(logs: Path) -> dict[str, str]:
    """Return keys and values of the executor's start-up lines."""
    text = "".join(path.read_text() for path in sorted(logs.glob("*executor*")))
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    found: dict[str, str] = {}
    for event in ("model_loaded", "memory_planned"):
        line = next(line for line in text.splitlines() if event in line)
        found |= dict(re.findall(r"(\w+)=('[^']*'|\S+)", line))
    return found


def _page(rows: list[Found], prompt_len: int) -> str:
    memory_gib = psutil.virtual_memory().total / GIB
    lines = [
        f"`python -m tests.e2e.real_shapes` on {machine()}, {memory_gib:.0f} GiB:",
        f"0.5B random weights, only defaults, and a prompt of {prompt_len:,} tokens.",
        "Memory in GiB: KV, and weights (with activations), as planned; resident at the start and",
        "after the prompt.",
        "",
        _HEADINGS,
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    lines += [
        f"| {row.shape} | {row.dtype} | {row.supported_len} | {row.max_model_len} | "
        f"{row.kv_tokens} | {row.kv_gib:.2f} | {row.fixed_gib:.2f} | {row.rss_start_gib:.2f} | "
        f"{row.rss_after_gib:.2f} | {row.outcome} | {'; '.join(row.wrong) or 'yes'} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
