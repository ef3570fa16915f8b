"""The executor as a process: exact refusals, exit codes, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tests.executor_svc.server.harness import DEADLINE_S, wait_until
from tests.ports import free_port

PROCESS_DEADLINE_S = 240.0


def clean_environment() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")}
    return {**kept, "OMP_NUM_THREADS": "1"}


def start(*flags: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "executor_svc", "--num-threads=1", "--log-format=json"]
    return subprocess.Popen(
        [*command, *map(str, flags)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


MANY_STARTS = """
import json, sys
from executor_svc.server import process
from executor_svc.__main__ import main
process.FAILED_GRACE_S = 60.0  # a start that leaves a thread behind would end this process
for name, argv in json.loads(sys.argv[1]).items():
    print(f"CASE {name}", file=sys.stderr, flush=True)
    print(f"CODE {main(argv)}", file=sys.stderr, flush=True)
"""
"""Program of several starts in one process: importing PyTorch takes longer than all of them."""


ABANDONED_STEP = """
import sys
from executor_svc.server.server import ExecutorServer
from executor_svc.__main__ import main
orderly = ExecutorServer.stop
def stop(self, grace_s):
    print(f"GRACE {grace_s}", file=sys.stderr, flush=True)
    orderly(self, None)
    self.has_abandoned_step = True
    return False
ExecutorServer.stop = stop
sys.exit(main(sys.argv[1:]))
"""
"""Program of a process with a running step that outlasts the grace time."""

STUCK_STOP = """
import sys, threading
from executor_svc.server.server import ExecutorServer
from executor_svc.__main__ import main
def stop(self, grace_s):
    print("STOPPING", file=sys.stderr, flush=True)
    while True:  # a wait without end may miss a signal that comes just before it
        threading.Event().wait(0.05)
ExecutorServer.stop = stop
sys.exit(main(sys.argv[1:]))
"""
"""Program of a process with an orderly stop that never ends, as with a step that hangs."""


FAILED_SERVER = """
import atexit, sys
from executor_svc.server.process import serve
from tandem.errors import InternalError, InvalidConfig
from tandem.process.process_start import run_or_refuse
class Server:
    address, has_abandoned_step = "127.0.0.1:1", False
    def __init__(self, on_fatal):
        self.load = lambda: on_fatal({error})
    def listen(self, address):
        pass
    def stop(self, grace_s):
        return True
atexit.register(print, "TORN DOWN", file=sys.stderr)
sys.exit(run_or_refuse(lambda: serve(Server, listen="", ready_file=None, stop_grace_s=None)))
"""
"""Program of a process with a server that fails once it is loaded, and stops in good order."""


def refused(log: str) -> tuple[int, str]:
    """Return the exit code and the printed lines that are no log events."""
    lines = [line for line in log.splitlines() if not line.startswith("{")]
    return int(lines[-1].removeprefix("CODE ")), "\n".join(lines[:-1])


@pytest.fixture(scope="module")
def refusals(model_dir, tmp_path_factory):
    """Return the outcomes by name of starts that must fail; `port_number` is taken meanwhile."""
    corrupt = shutil.copytree(model_dir, tmp_path_factory.mktemp("corrupt") / "model")
    weights = corrupt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    unknown = shutil.copytree(model_dir, tmp_path_factory.mktemp("unknown") / "model")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    any_port = ["--listen=127.0.0.1:0", "--log-format=json", "--num-threads=1"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            "corrupt": ["--model", str(corrupt), *any_port],
            "unknown": ["--model", str(unknown), *any_port],
            "memory": ["--model", str(model_dir), *any_port, "--max-num-blocks=2000000000"],
            "length": ["--model", str(model_dir), *any_port, "--max-model-len=99999"],
            "port": ["--model", str(model_dir), "--log-format=json", f"--listen=127.0.0.1:{port}"],
            "limit": ["--model", str(model_dir), "--block-size=0"],
        }
        done = subprocess.run(
            [sys.executable, "-c", MANY_STARTS, json.dumps(cases)],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
            timeout=PROCESS_DEADLINE_S,
            check=True,
        )
    parts = (part.split("\n", 1) for part in done.stderr.split("CASE ")[1:])
    return {"port_number": port, **{name: refused(log) for name, log in parts}}


class TestRefusals:
    def test_missing_model_is_one_line(self):
        """
        A model directory that does not exist gives INVALID_MODEL, what to give instead, and exit
        code 2.
        """
        process = start("--model=/nowhere/model", "--listen=127.0.0.1:0")
        output, log = process.communicate(timeout=PROCESS_DEADLINE_S)
        expected = (
            "INVALID_MODEL: model directory /nowhere/model does not exist: give a directory in "
            "Hugging Face format (config.json, *.safetensors, tokenizer.json). Nothing is "
            "downloaded here; the package huggingface_hub gets one: hf download ORG/NAME "
            "--local-dir DIR"
        )
        assert (2, expected) == refused(f"{log}CODE {process.returncode}")
        assert not output

    @pytest.mark.slow
    def test_reason_is_said_by_a_process_that_leaves_a_thread_behind(self, tmp_path):
        """
        A refused model is a line and exit code 2 also where the thread that loaded it is not waited for.
        """
        flags = [f"--model={tmp_path}", "--listen=127.0.0.1:0", "--log-level=error"]
        done = subprocess.run(
            [sys.executable, "-c", ABANDONED_STEP, *flags],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
            timeout=PROCESS_DEADLINE_S,
            check=False,
        )
        grace, refusal = done.stderr.splitlines()
        assert (2, "GRACE 1.0") == (done.returncode, grace)
        assert refusal.startswith(f"INVALID_MODEL: {tmp_path} has no config.json")

    @pytest.mark.parametrize(
        ("name", "code", "reason", "words"),
        [
            ("corrupt", 2, "INVALID_MODEL", "model.safetensors"),
            ("unknown", 2, "INVALID_MODEL", "BertModel"),
            ("memory", 2, "OUT_OF_MEMORY", "lower max_num_blocks"),
            ("length", 2, "INVALID_CONFIG", "the model supports at most 512 tokens"),
        ],
    )
    def test_unusable_model_or_memory_is_one_line_with_its_cause(
        self, refusals, name, code, reason, words
    ):
        """
        An unusable model or memory gives one line with reason and cause, no traceback, and exit
        code 2.
        """
        got_code, text = refusals[name]
        assert code == got_code
        assert text.startswith(f"{reason}: ")
        assert words in text
        assert 1 == len(text.splitlines())

    def test_port_in_use_is_one_line_with_the_address(self, refusals):
        """
        A taken port gives ADDRESS_IN_USE, the address, what to do, and exit code 1.
        """
        expected = (
            f"ADDRESS_IN_USE: listen 127.0.0.1:{refusals['port_number']} is in use by another "
            "process: stop it or choose another --listen"
        )
        assert (1, expected) == refusals["port"]

    def test_bad_limit_is_its_documented_text(self, refusals):
        """
        A limit out of range gives INVALID_CONFIG with the rule's text, and exit code 2.
        """
        assert (2, "INVALID_CONFIG: block_size must be greater than 0") == refusals["limit"]


def address_of(ready_file: Path, process: subprocess.Popen[str]) -> str:
    wait_until(lambda: ready_file.exists() or process.poll() is not None)
    content = json.loads(ready_file.read_text())
    assert process.pid == content["pid"]
    return content["address"]


def wait_ready(channel: grpc.Channel) -> None:
    """Wait until the process is warm, as a probe would."""
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="tandem.ready")
    for answer in stub.Watch(request, timeout=DEADLINE_S, wait_for_ready=True):
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return


def boot_of(channel: grpc.Channel) -> str:
    about = ExecutorServiceStub(channel).Describe(
        executor_pb2.DescribeRequest(), timeout=DEADLINE_S, wait_for_ready=True
    )
    return about.boot_id


class TestSignals:
    @pytest.mark.slow
    def test_killed_process_comes_back_as_another_boot_and_ends_on_sigterm(
        self, model_dir, tmp_path
    ):
        """
        After kill -9 the same port serves a new boot_id at once; SIGTERM ends it with code 0 and a log line.
        """
        ready = tmp_path / "ready.json"
        address = f"127.0.0.1:{free_port()}"
        first = start("--model", model_dir, "--listen", address, "--ready-file", ready)
        assert address == address_of(ready, first)
        with grpc.insecure_channel(address) as channel:
            wait_ready(channel)
            old_boot = boot_of(channel)
        first.kill()
        first.communicate(timeout=PROCESS_DEADLINE_S)
        ready.unlink()
        second = start("--model", model_dir, "--listen", address, "--ready-file", ready)
        assert address == address_of(ready, second)
        with grpc.insecure_channel(address) as channel:
            wait_ready(channel)
            assert old_boot != boot_of(channel)
        second.send_signal(signal.SIGTERM)
        _, log = second.communicate(timeout=PROCESS_DEADLINE_S)
        assert 0 == second.returncode
        events = [json.loads(line) for line in log.splitlines()]
        assert ["listening", "stopped"] == [events[0]["event"], events[-1]["event"]]
        allocated = next(event for event in events if event["event"] == "kv_allocated")
        assert allocated["num_blocks"] * allocated["block_size"] == allocated["tokens"]

    @pytest.mark.slow
    def test_second_signal_ends_a_process_that_does_not_stop(self, model_dir, tmp_path):
        """
        While an orderly stop hangs, another SIGINT or SIGTERM ends the process at once with code 1.
        """
        ready = tmp_path / "ready.json"
        flags = ["--model", str(model_dir), "--listen=127.0.0.1:0", "--ready-file", str(ready)]
        process = subprocess.Popen(
            [sys.executable, "-c", STUCK_STOP, *flags, "--log-level=error"],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        address_of(ready, process)
        process.send_signal(signal.SIGINT)
        assert "STOPPING\n" == process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert 1 == process.wait(timeout=PROCESS_DEADLINE_S)
        process.stderr.close()

    @pytest.mark.slow
    def test_step_that_outlasts_the_grace_fails_the_process(self, model_dir, tmp_path):
        """
        SIGTERM waits for the running step as long as was set, and a process that leaves it behind exits with 1.
        """
        ready = tmp_path / "ready.json"
        flags = ["--model", str(model_dir), "--listen=127.0.0.1:0", "--ready-file", str(ready)]
        process = subprocess.Popen(
            [sys.executable, "-c", ABANDONED_STEP, *flags, "--log-level=error", "--stop-grace-s=3"],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        with grpc.insecure_channel(address_of(ready, process)) as channel:
            wait_ready(channel)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=PROCESS_DEADLINE_S)
        assert (1, "GRACE 3.0\n") == (process.returncode, log)

    @pytest.mark.parametrize(
        ("error", "code", "lines"),
        [
            ("InternalError('lost')", 1, ["INTERNAL: lost"]),
            ("InvalidConfig('too few')", 2, ["INVALID_CONFIG: too few", "TORN DOWN"]),
        ],
    )
    def test_nothing_is_torn_down_after_an_internal_error(self, error, code, lines):
        """
        An internal error, such as a lost device's, ends the process at once with its line and code: what else the interpreter would free on that device could end it with another. Refusals end in good order.
        """
        done = subprocess.run(
            [sys.executable, "-c", FAILED_SERVER.format(error=error)],
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
            timeout=PROCESS_DEADLINE_S,
            check=False,
        )
        assert (code, lines) == (done.returncode, done.stderr.splitlines())
