"""Checks of `tandem up` before it starts anything, and what it says."""

from __future__ import annotations

import dataclasses
import shlex
import socket

import pytest
from typer.testing import CliRunner

from tandem.bundled_model import bundled_model
from tandem.executor.v1.executor_service_pb2 import DescribeResponse
from tandem_client import AdminClient, ModelCapabilities
from tandem_client.cli.app import app
from tandem_client.cli.local_server.services import RunningServer
from tandem_client.cli.up.banner import banner, described, one_line_each, to_try
from tandem_client.cli.up.command import is_drained
from tandem_client.client import Client


@pytest.fixture
def taken():
    """Two addresses that are listened on already."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as two,
    ):
        yield f"127.0.0.1:{one.getsockname()[1]}", f"[::1]:{two.getsockname()[1]}"


@pytest.fixture
def bundled():
    """A model that can be served."""
    return bundled_model()


def refused(*arguments):
    """Run `tandem up` and return the one line that it ends with, and its exit code."""
    result = CliRunner().invoke(app, ["up", *map(str, arguments)])
    assert 1 == result.stderr.count("\n"), result.stderr
    return result.exit_code, result.stderr


class TestConfiguration:
    @pytest.mark.parametrize("name", ["--model", "--model-path"])
    def test_model_is_taken_from_a_flag_too(self, run, tmp_path, name):
        """
        The model may be given as other servers have it given; a directory without one is refused so.
        """
        assert f"{tmp_path}" in run("up", name, str(tmp_path)).stderr

    def test_two_models_are_refused(self, bundled):
        """
        A model as argument and another as flag are refused with both names.
        """
        code, said = refused(bundled, "--model", "other")

        assert (2, f"tandem: give one model: {bundled} and --model other are two\n") == (code, said)

    def test_wrong_limit_is_refused_before_anything_starts(self, run, tmp_path):
        """
        A limit that breaks a rule ends with the rule's exact text and exit code 2.
        """
        result = run("up", str(tmp_path), "--block-size", "0")

        assert 2 == result.exit_code
        assert "block_size must be greater than 0" in result.stderr

    def test_unknown_key_of_the_file_is_named(self, run, tmp_path):
        """
        A configuration file with an unknown key is refused with file and key.
        """
        file = tmp_path / "limits.json"
        file.write_text('{"blocks": 1}')
        result = run("up", str(tmp_path), "--config", str(file))

        assert 2 == result.exit_code
        assert f"{file}: blocks: unknown key 'blocks'" in result.stderr


class TestPassedOn:
    @pytest.mark.parametrize(
        ("flags", "command"),
        [
            (("--executor-arg=--help",), "use python -m executor_svc --help"),
            (("--scheduler-arg=-h",), "use python -m scheduler_svc --help"),
            (("--openai=127.0.0.1:0", "--gateway-arg=--help"), "use tandem gateway --help"),
        ],
        ids=["executor", "scheduler", "gateway"],
    )
    def test_flag_that_prints_and_ends_is_refused(self, flags, command):
        """
        A flag with which a program prints something and serves nothing is refused with the command
        that prints it.
        """
        code, line = refused(*flags)
        assert 2 == code
        assert line.endswith(f"prints and ends, and tandem up serves: {command}\n")

    @pytest.mark.parametrize("service", ["executor", "scheduler"])
    def test_dry_run_is_refused(self, service, bundled):
        """
        A dry run is refused with the service's own command, which has the other flags too.
        """
        code, line = refused(bundled, f"--{service}-arg=--dry-run", "--block-size=8")
        assert 2 == code
        assert f"tandem: --dry-run of the {service} prints and ends" in line
        assert f"use python -m {service}_svc" in line
        assert line.endswith("--block-size=8 --dry-run\n")

    def test_dry_run_of_the_environment_is_refused(self, bundled, monkeypatch):
        """
        It does not matter where a dry run is asked for; the source is named.
        """
        monkeypatch.setenv("TANDEM_EXECUTOR_DRY_RUN", "true")
        code, line = refused(bundled)
        assert (2, True) == (code, "dry_run (from environment) of the executor" in line), line


@pytest.mark.slow
class TestTakenPorts:
    def test_all_are_named_with_a_command_that_serves_elsewhere(self, taken, bundled):
        """
        Every taken port is named at once, and the command to paste has free ones and all else given.
        """
        first, second = taken
        flags = [f"--listen={first}", f"--admin-listen={second}", "--metrics-listen="]
        code, line = refused(bundled, *flags, "--window=3", "--no-enable-prefix-caching")
        command = shlex.split(line.split("or serve elsewhere: ")[1])
        others = dict(word[2:].split("=") for word in command[3:] if "=" in word)

        assert 1 == code
        assert f"listen {first} and admin_listen {second} are in use" in line
        assert ["tandem", "up", str(bundled)] == command[:3]
        assert {"listen", "admin-listen", "metrics-listen", "window"} == set(others)
        assert not {first, second} & set(others.values())
        assert others["admin-listen"].startswith("[::1]:")
        assert "--no-enable-prefix-caching" in command

    def test_wrong_model_goes_before_them(self, taken, tmp_path):
        """
        A model that cannot be served is told first: other ports would not mend it.
        """
        code, line = refused(tmp_path / "nothing", f"--listen={taken[0]}")
        assert (2, True) == (code, "nothing does not exist" in line)

    def test_address_of_the_environment_is_obeyed(self, taken, bundled, monkeypatch):
        """
        An address and a model that variables set are the ones that count, not the defaults.
        """
        monkeypatch.setenv("TANDEM_METRICS_LISTEN", taken[0])
        monkeypatch.setenv("TANDEM_EXECUTOR_MODEL", str(bundled))
        _, line = refused("--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0")
        assert f"ADDRESS_IN_USE: metrics_listen {taken[0]} is in use" in line


class TestBanner:
    ABOUT = DescribeResponse(
        device="cpu",
        num_threads=4,
        num_parameters=494_032_768,
        num_blocks=1024,
        block_size=16,
        kv_bytes_per_block=3 * 2**20,
    )

    def test_model_device_and_memory_are_as_reported(self, server):
        """
        The banner tells model, parameters, type, device, threads, context and KV memory.
        """
        with Client(server.address) as client:
            model = client.get_model()
        assert [
            f"  model      {model.name} (FakeForCausalLM, 494 M parameters, {model.dtype})",
            "  device     cpu, 4 threads",
            f"  context    {model.max_model_len:,} tokens of prompt and output",
            "  KV cache   16,384 tokens, 3.00 GiB",
        ] == described(model, [self.ABOUT], is_bundled=False)

    def test_several_executors_are_counted(self, server):
        """
        With several executors the banner tells their number, their devices, and the memory of all.
        """
        gpus = [
            DescribeResponse(device=f"cuda:{n}", num_blocks=1024, block_size=16) for n in (0, 1)
        ]
        with Client(server.address) as client:
            model = client.get_model()
        _, device, _, kv_cache = described(model, [self.ABOUT] * 3, is_bundled=False)
        assert "  device     3 executors, each on cpu, 4 threads" == device
        assert "  KV cache   49,152 tokens, 9.00 GiB in 3 executors" == kv_cache
        device = described(model, gpus, is_bundled=False)[1]
        assert "  device     2 executors, each on cuda:0 or cuda:1" == device

    def test_stages_are_counted(self, server):
        """
        With pipeline stages the banner tells their number, and that the memory is of the first.
        """
        about = DescribeResponse()
        about.CopyFrom(self.ABOUT)
        about.num_stages = 2
        with Client(server.address) as client:
            model = client.get_model()
        _, device, _, kv_cache = described(model, [about], is_bundled=False)
        assert "  device     cpu, 4 threads, 2 stages" == device
        assert "  KV cache   16,384 tokens, 3.00 GiB in the first stage" == kv_cache
        kv_cache = described(model, [about] * 2, is_bundled=False)[3]
        assert (
            "  KV cache   32,768 tokens, 6.00 GiB in 2 executors, in the first stage of each"
            == (kv_cache)
        )

    def test_bundled_model_is_called_what_it_is(self, server):
        """
        The bundled model is introduced as a small test model.
        """
        with Client(server.address) as client:
            lines = described(client.get_model(), [self.ABOUT], is_bundled=True)
        assert lines[0].endswith("; a small test model, for trying Tandem out")

    @pytest.mark.parametrize(
        ("address", "capabilities", "is_bundled", "commands"),
        [
            (
                "127.0.0.1:50051",
                ModelCapabilities(text=True, chat=True),
                True,
                ["tandem generate 'def read_json(path: str) -> dict:'"],
            ),
            (
                "127.0.0.1:50051",
                ModelCapabilities(text=True),
                False,
                ["tandem generate 'Once upon a time'"],
            ),
            (
                "127.0.0.1:7000",
                ModelCapabilities(),
                True,
                ["tandem generate --token-ids 1,2,3 --address 127.0.0.1:7000"],
            ),
            (
                "0.0.0.0:7000",
                ModelCapabilities(text=True, chat=True),
                False,
                [
                    "tandem generate --chat 'What is a prime number?' --address 127.0.0.1:7000",
                    "tandem chat --address 127.0.0.1:7000",
                ],
            ),
        ],
        ids=["bundled", "base", "no tokenizer", "chat elsewhere"],
    )
    def test_what_to_try_suits_the_model(self, server, address, capabilities, is_bundled, commands):
        """
        The advice is code for the bundled model, a chat where there is a template, ids where there
        is no tokenizer; the default address is not repeated.
        """
        with Client(server.address) as client:
            model = dataclasses.replace(client.get_model(), capabilities=capabilities)
        assert commands == to_try(address, model, is_bundled=is_bundled)

    def test_gateway_is_named_where_there_is_one(self, server, tmp_path, monkeypatch):
        """
        The banner has the URL that OpenAI's clients take, and only with a gateway.
        """
        monkeypatch.setattr("tandem_client.cli.up.banner.describe", lambda _: self.ABOUT)
        running = RunningServer(
            tmp_path,
            address=server.address,
            local_address=server.address,
            executor_addresses=["unix:one"],
        )
        assert not [one for one in banner(running, 1.0, is_bundled=False) if "OpenAI" in one]
        running.openai_address = "127.0.0.1:8000"
        assert "  OpenAI     http://127.0.0.1:8000/v1" in banner(running, 1.0, is_bundled=False)

    def test_warnings_take_a_line_each(self):
        """
        Warnings of both services are said once, and a text of several lines takes one.
        """
        assert ["a b", "c"] == one_line_each(["a b", "c", "a\n  b"])


class TestDrained:
    @pytest.mark.parametrize(
        ("figures", "expected"),
        [
            ({"draining": True, "running_requests": 0, "waiting_requests": 0}, True),
            ({"draining": False, "running_requests": 0, "waiting_requests": 0}, False),
            ({"draining": True, "running_requests": 1, "waiting_requests": 0}, False),
            (
                {
                    "draining": True,
                    "running_requests": 0,
                    "waiting_requests": 0,
                    "executor_attached": True,
                },
                False,
            ),
        ],
        ids=["over", "not asked for", "a request is left", "executor not given back"],
    )
    def test_drain_is_over_when_all_is_given_back(self, server, monkeypatch, figures, expected):
        """
        A server is drained once it takes nothing, has nothing and holds no executor.
        """
        with AdminClient(server.address) as admin:
            now = admin.stats()
            now = type(now)(
                **{name: getattr(now, name) for name in now.__slots__}
                | {"executor_attached": False}
                | figures
            )
            monkeypatch.setattr(admin, "stats", lambda **_: now)
            assert expected is is_drained(admin)
