"""The frontend as a process of its own, started the way the core starts it."""

import asyncio
import json
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from scheduler_svc.process.frontend_settings import FrontendSettings, parse_settings
from tandem.inference.v1 import inference_service_pb2 as pb
from tandem.inference.v1 import model_pb2
from tandem.inference.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.scheduler_svc.frontend.calls import error_of
from tests.scheduler_svc.frontend.fake_core import FakeCore, announce, model, within


def settings(directory: Path, **changes: object) -> str:
    values: dict[str, object] = {
        "index": 0,
        "ipc_path": str(directory / "core.sock"),
        "listen": "127.0.0.1:0",
    }
    return json.dumps(values | changes)


PLANTED = """
import sys, time
from scheduler_svc.process import tick_watch
from scheduler_svc.frontend import __main__ as entry, core_client, run as program
{}
sys.exit(entry.main())
"""
PATIENT = "program.STOP_GRACE_S = program.FORCED_EXIT_S = 60.0"
"""Time limits long enough for an orderly stop on a busy machine."""
HANGING = """
tick_watch.LAST_WORD_S = 60.0
async def hang(self):
    program.EXIT_AFTER_S = 1.0
    time.sleep(1000)
core_client.CoreClient._sweep = hang
"""
COLLECTED = """
import gc
async def tell(settings):
    print(gc.get_freeze_count() > len(gc.get_objects()), file=sys.stderr)
    return 0
program._serve = tell
"""


async def start(argument: str, planted: str | None = None) -> Process:
    program = ("-m", "scheduler_svc.frontend")
    if planted is not None:
        program = ("-c", PLANTED.format(planted))
    return await asyncio.create_subprocess_exec(
        sys.executable, *program, "--settings-json", argument, stdin=PIPE, stderr=PIPE
    )


async def until_ready(channel: grpc.aio.Channel) -> None:
    """Return once the frontend knows the model that it serves."""
    watch = HealthStub(channel).Watch(HealthCheckRequest(service="tandem.ready"))
    while (await within(watch.read())).status != HealthCheckResponse.SERVING:
        pass
    watch.cancel()


@asynccontextmanager
async def started(directory: Path):
    """Yield a fake core, a process and its Hello."""
    core = FakeCore(directory / "core.sock")
    process = await start(settings(directory), PATIENT)
    try:
        yield core, process, await within(core.hellos.get())
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await core.close()


class TestProcess:
    async def test_parent_that_dies_ends_it_and_its_calls(self, tmp_path, model_dir):
        """
        A parent that dies closes stdin: live calls become UNAVAILABLE and the process exits, though
        it ignores signals.
        """
        async with started(tmp_path) as (core, process, hello):
            assert (0, process.pid) == (hello.frontend_index, hello.pid)
            await announce(core, model(model_dir))
            async with grpc.aio.insecure_channel(hello.address) as channel:
                await until_ready(channel)
                stub = InferenceServiceStub(channel)
                call = stub.Generate(pb.GenerateRequest(text="hello"))
                await core.accept()
                await within(call.read())
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGTERM)
                assert (
                    "small" == (await within(stub.GetModel(model_pb2.GetModelRequest()))).model.name
                )
                process.stdin.close()
                error = await error_of(call)
            assert ("HANDED_OVER", "UNAVAILABLE") == (error.reason, error.code)
            assert 0 == await within(process.wait())

    async def test_core_of_another_version_ends_it(self, tmp_path):
        """
        A message that cannot be decoded stops the process with an error code.
        """
        async with started(tmp_path) as (core, process, _):
            await core.send_raw(b"\x93\x63\x01\x02")
            assert 1 == await within(process.wait())

    @pytest.mark.slow
    async def test_event_loop_that_hangs_ends_it(self, tmp_path):
        """
        A process with an event loop that no longer turns ends itself with 1 and says where it
        hangs.
        """
        core = FakeCore(tmp_path / "core.sock")
        process = await start(settings(tmp_path), HANGING)
        try:
            _, stderr = await within(process.communicate())
        finally:
            await core.close()
        assert 1 == process.returncode
        assert b"loop_stuck" in stderr
        assert b"in hang" in stderr

    async def test_collector_leaves_out_what_the_process_began_with(self, tmp_path):
        """
        A full collection looks at what calls made, not at all modules, for which calls would wait.
        """
        process = await start(settings(tmp_path), COLLECTED)
        _, stderr = await within(process.communicate())
        assert b"True" in stderr.split()

    async def test_address_in_use_is_one_readable_line(self, tmp_path):
        """
        A port that is taken is reported by reason and address, without a trace.
        """
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            process = await start(settings(tmp_path, listen=address))
            _, stderr = await within(process.communicate())
        (line,) = [text for text in stderr.decode().splitlines() if text.startswith("ADDRESS")]
        assert f"ADDRESS_IN_USE: cannot listen on {address}" in line
        assert b"Traceback" not in stderr
        assert 1 == process.returncode

    async def test_unknown_setting_is_one_readable_line(self, tmp_path):
        """
        Settings of another version are refused by name, exit code 2.
        """
        process = await start(settings(tmp_path, colour="red"))
        _, stderr = await within(process.communicate())
        assert stderr.decode().startswith("INVALID_CONFIG: --settings-json: ")
        assert b"colour" in stderr
        assert 2 == process.returncode


class TestSettings:
    def test_settings_survive_their_encoding(self):
        """
        Settings that are encoded are decoded to the same values, defaults included.
        """
        written = json.dumps({"index": 3, "ipc_path": "/x", "listen": "127.0.0.1:1"})
        assert FrontendSettings(index=3, ipc_path="/x", listen="127.0.0.1:1") == parse_settings(
            written
        )

    def test_missing_setting_is_named(self):
        """
        A missing setting is an error that names it.
        """
        with pytest.raises(ValueError, match="listen"):
            parse_settings('{"index": 0, "ipc_path": "/x"}')
