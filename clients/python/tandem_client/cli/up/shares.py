"""Shares of this machine's processors, devices and memory for executors that serve together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.kv_memory.default_size import CPU_SHARE
from tandem_client.cli.local_server.service_config import memory_plan
from tandem_client.cli.shared.failures import fail

PROBE = """
import json, torch
from executor_svc.device.threads import default_num_threads
print(json.dumps({"num_threads": default_num_threads(), "num_gpus": torch.cuda.device_count()}))
"""
"""Program that tells what one executor alone would take."""
_OWN_SIZE = "default"
"""Begin of a plan's `sized_by_place` where no setting sizes the KV memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Things that executors share: threads of the processor, and GPUs."""

    num_threads: int
    num_gpus: int


def shares_of(
    num_executors: int, arguments: Sequence[str], settings: Mapping[str, Mapping[str, Any]]
) -> list[list[str]]:
    """
    Return the arguments that give each executor its share of what is not set; one alone takes all.

    Args:
        num_executors: Number of executors, at least 1.
        arguments: Arguments that all of them get.
        settings: Settings of an executor with these arguments, by name, each with its `value`.

    Raises:
        typer.Exit: An executor cannot serve that model here; the reason was printed.
    """
    if num_executors == 1:
        return [[]]
    plan = memory_plan(arguments)
    values = {name: one["value"] for name, one in settings.items()}
    return shares(num_executors, values, plan, _machine())


def shares(
    num_executors: int, settings: Mapping[str, Any], plan: Mapping[str, Any], machine: Machine
) -> list[list[str]]:
    """
    Return the arguments of each executor that `settings` leave open.

    On a CPU, threads are shared out, at least one each, and so is the memory that one alone would
    give to KV. GPUs are taken in turn, as many for each as it has ranks; those on one GPU share its
    memory. A setting that was given
    holds for each executor as it stands.

    Args:
        num_executors: Number of executors.
        settings: Settings that all of them have.
        plan: Memory plan of one executor alone, as its dry run prints it.
        machine: What they share.
    """
    if plan["device"] == "cpu":
        threads, size = [], []
        if settings["num_threads"] is None:
            num_processes = num_executors * settings["tp_size"] * settings["pp_size"]
            threads = [f"--num-threads={max(1, machine.num_threads // num_processes)}"]
        if plan["sized_by_place"].startswith(_OWN_SIZE):
            size = [f"--max-num-blocks={_blocks_each(num_executors, plan)}"]
        return [[*threads, *size]] * num_executors
    gpus: list[int | None] = [None] * num_executors  # all on the device that was named
    if ":" not in settings["device"]:
        # An executor of several ranks is told the first of its GPUs.
        num_each = settings["tp_size"] * settings["pp_size"]
        num_places = max(1, machine.num_gpus // num_each)
        gpus = [number % num_places * num_each for number in range(num_executors)]
    return [
        [
            *([] if gpu is None else [f"--device=cuda:{gpu}"]),
            *_gpu_memory(gpus.count(gpu), plan),
        ]
        for gpu in gpus
    ]


def _blocks_each(num_executors: int, plan: Mapping[str, Any]) -> int:
    """Return the KV blocks of each: as many as one alone has, if there is memory for all."""
    own = plan["weight_bytes"] + plan["activation_bytes"]
    left = max(0, plan["free_bytes"] - num_executors * own)
    most = int(CPU_SHARE * left / num_executors) // int(plan["kv_bytes_per_block"]) - 1
    return max(1, min(int(plan["num_blocks"]), most))


def _gpu_memory(num_sharing: int, plan: Mapping[str, Any]) -> list[str]:
    if num_sharing == 1 or not plan["sized_by_place"].startswith(_OWN_SIZE):
        return []
    return [f"--gpu-memory-utilization={plan['sized_by_value'] / num_sharing:.4f}"]


def _machine() -> Machine:
    """Ask a process of its own, since clients import no service."""
    ran = subprocess.run(  # noqa: S603  # our own interpreter
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=False
    )
    if ran.returncode != 0:
        why = (ran.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise fail(f"what this machine has could not be found out: {why}")
    return Machine(**json.loads(ran.stdout))
