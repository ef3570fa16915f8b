"""Text that `tandem up` prints once it serves; all its facts are reported by the services."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.network.listen_address import unprotected
from tandem.wording import GIB, gib
from tandem_client.channel import DEFAULT_ADDRESS, ChannelOptions
from tandem_client.cli.local_server.services import RunningServer, from_this_machine
from tandem_client.cli.shared.protection import protection_of
from tandem_client.client import Client
from tandem_client.model import Model

BUNDLED_PROMPT = "def read_json(path: str) -> dict:"
CHAT_PROMPT = "What is a prime number?"
PROMPT = "Once upon a time"
IDS_OF_A_PROMPT = "1,2,3"
DEADLINE_S = 10.0
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))


def banner(
    server: RunningServer,
    took_s: float,
    *,
    is_bundled: bool,
    warnings: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> list[str]:
    """
    Return the lines about a server that has just become ready.

    Args:
        server: The server.
        took_s: Seconds from the start of the command to readiness.
        is_bundled: True if it serves the model that comes with the project.
        warnings: Warnings on the scheduler's settings; the executor reports its own.
        settings: The scheduler's settings, of which those of security count here; None = defaults.

    Raises:
        TandemError: One of the services does not answer.
    """
    with Client(server.local_address) as client:
        model = client.get_model(deadline_s=DEADLINE_S)
    about = [describe(address) for address in server.executor_addresses]
    lines = [f"serving at {server.address} (ready after {took_s:.1f} s)"]
    lines += described(model, about, is_bundled=is_bundled)
    settings = settings or {}
    if server.openai_address:
        scheme = "https" if settings.get("tls_cert") else "http"
        lines.append(f"  OpenAI     {scheme}://{server.openai_address}/v1")
    if server.admin_address:
        lines.append(f"  operators  {server.admin_address}")
    if server.metrics_address:
        scheme = "https" if settings.get("metrics_tls_cert") else "http"
        lines.append(f"  metrics    {scheme}://{server.metrics_address}/metrics")
    lines.append(f"  logs       {server.log_folder}")
    listening = {
        "listen": (server.address, server.openai_address),
        "admin_listen": (server.admin_address,),
        "metrics_listen": (server.metrics_address,),
    }
    for setting, addresses in listening.items():
        encrypted, authenticated = protection_of(setting, settings)
        for address in addresses:
            why = address and unprotected(
                address, is_encrypted=encrypted, is_authenticated=authenticated
            )
            lines += [f"  warning    {address}: {why}"] if why else []
    lines += [f"  warning    {text}" for text in _of_all(warnings, about)]
    examples = to_try(server.address, model, is_bundled=is_bundled)
    examples += needed_to_call(settings)
    return [*lines, "try it:", *(f"  {line}" for line in examples), "Ctrl-C stops it"]


def needed_to_call(settings: Mapping[str, Any]) -> list[str]:
    """Return a remark on the options that every command needs to call such a server."""
    needs = {
        "tls_cert": "--ca FILE",
        "tls_client_ca": "--cert FILE --key FILE",
        "tokens_file": "a token in TANDEM_API_KEY",
    }
    found = [what for name, what in needs.items() if settings.get(name)]
    return [f"(calls need {', '.join(found)})"] if found else []


def describe(executor_address: str) -> executor_pb2.DescribeResponse:
    """Return an executor's description of itself."""
    with ChannelOptions().open(executor_address) as channel:
        stub = ExecutorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        answer: executor_pb2.DescribeResponse = stub.Describe(
            executor_pb2.DescribeRequest(), timeout=DEADLINE_S
        )
    return answer


def described(
    model: Model, executors: Sequence[executor_pb2.DescribeResponse], *, is_bundled: bool
) -> list[str]:
    """Return the lines on model, devices and memory."""
    about = executors[0]
    size = f", {_count(about.num_parameters)} parameters" if about.num_parameters else ""
    note = "; a small test model, for trying Tandem out" if is_bundled else ""
    kv_tokens = sum(one.num_blocks * one.block_size for one in executors)
    kv_bytes = sum(one.num_blocks * one.kv_bytes_per_block for one in executors)
    devices = dict.fromkeys(_device(one) for one in executors)
    together = "" if len(executors) == 1 else f"{len(executors)} executors, each on "
    in_all = "" if len(executors) == 1 else f" in {len(executors)} executors"
    if about.num_stages > 1:
        in_all += ", in the first stage of each" if in_all else " in the first stage"
    return [
        f"  model      {model.name} ({model.architecture}{size}, {model.dtype}){note}",
        f"  device     {together}{' or '.join(devices)}",
        f"  context    {model.max_model_len:,} tokens of prompt and output",
        f"  KV cache   {kv_tokens:,} tokens, {_size(kv_bytes)}{in_all}",
    ]


def _device(about: executor_pb2.DescribeResponse) -> str:
    threads = f", {about.num_threads} threads" if about.device == "cpu" else ""
    stages = f", {about.num_stages} stages" if about.num_stages > 1 else ""
    return f"{about.device}{threads}{stages}"


def _of_all(
    warnings: Sequence[str], executors: Sequence[executor_pb2.DescribeResponse]
) -> list[str]:
    return one_line_each([*warnings, *(text for one in executors for text in one.warnings)])


def one_line_each(warnings: Sequence[str]) -> list[str]:
    """Return the warnings without line breaks, each once: several services may give the same."""
    return list(dict.fromkeys(" ".join(text.split()) for text in warnings))


def to_try(address: str, model: Model, *, is_bundled: bool) -> list[str]:
    """Return commands that suit the model; they name the address unless it is the default one."""
    address = from_this_machine(address)
    where = [] if address == DEFAULT_ADDRESS else ["--address", address]
    commands = [["generate", PROMPT]]
    if not model.capabilities.text:
        commands = [["generate", "--token-ids", IDS_OF_A_PROMPT]]
    elif is_bundled:
        commands = [["generate", BUNDLED_PROMPT]]
    elif model.capabilities.chat:
        commands = [["generate", "--chat", CHAT_PROMPT], ["chat"]]
    return [shlex.join(["tandem", *words, *where]) for words in commands]


def _count(number: int) -> str:
    for unit, letter in _UNITS:
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return str(number)


def _size(num_bytes: int) -> str:
    return f"{gib(num_bytes)} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
