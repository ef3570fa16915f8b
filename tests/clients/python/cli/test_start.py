"""Start of a command before it runs: loaded modules, and Ctrl-C meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

import tandem_client
from tandem_client.cli import app as root
from tests.clients.python.fake_server import ANSWER, PATIENCE_S

LOADING = """
import sys, time

class Slow:
    def find_spec(self, name, *_):
        if name == "{module}":
            print("loading", flush=True)
            while True:  # A signal just before a sleep is handled after it, so that each is short.
                time.sleep(0.01)

sys.meta_path.insert(0, Slow())
sys.argv = ["tandem", "generate", "hi", "--address", "127.0.0.1:1"]
from tandem_client.cli import main
main()
"""
NOT_LOADED = """
import sys
{run}
heavy = {{"grpc", "numpy", "google.protobuf", "torch", "asyncio"}} & set(sys.modules)
print(*heavy, file=sys.stderr)
"""
RUN_GENERATE = """
from tandem_client.cli import main
sys.argv = ["tandem", "generate", "hi"]
main()
"""
RUN_MAIN = """
from tandem_client.cli import main
sys.argv = ["tandem", {argument!r}]
try:
    main()
except SystemExit as left:
    assert left.code in (None, 0), left.code
"""

STUCK = """
import sys, threading
from tandem_client import cli
from tandem_client.cli import app

class Stuck:
    def __del__(self):
        threading.Event().wait()

def run():
    stuck = Stuck()
    stuck.itself = stuck
    sys.stdout.write("text")
    sys.stdout.flush()
    {end}

app.main = run
cli.main()
"""
FREED = """
import sys
from tandem_client import cli
from tandem_client.cli import app

class Freed:
    def __del__(self):
        sys.stdout.write("freed")

def run():
    freed = Freed()
    sys.exit(3)

app.main = run
cli.main()
"""


class TestLoading:
    @pytest.mark.parametrize(
        "module",
        ["tandem_client.cli.app", "tandem_client.cli.generation.generate", "grpc", "typer"],
    )
    def test_ctrl_c_while_loading_is_silent(self, module):
        """
        Ctrl-C while modules are still being loaded ends the command at once with 130, without a traceback.
        """
        process = subprocess.Popen(
            [sys.executable, "-c", LOADING.format(module=module)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "loading\n" == process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)

        assert (130, "") == (process.returncode, errors)

    @pytest.mark.parametrize(
        "run",
        [
            "import tandem_client",
            RUN_MAIN.format(argument="--help"),
            RUN_MAIN.format(argument="--version"),
        ],
        ids=["import", "help", "version"],
    )
    def test_nothing_heavy_is_loaded_for_a_list(self, run):
        """
        The package, the list of commands and the version need neither gRPC nor numpy.
        """
        outcome = subprocess.run(
            [sys.executable, "-c", NOT_LOADED.format(run=run)],
            capture_output=True,
            text=True,
            check=True,
        )

        assert "" == outcome.stderr.strip()


class TestInterrupted:
    @pytest.mark.parametrize(
        "end", ["sys.exit(130)", "raise KeyboardInterrupt", "sys.stdout = None; sys.exit(130)"]
    )
    def test_object_that_cannot_be_freed_holds_nothing_up(self, end):
        """
        A channel that a second Ctrl-C left half closed waits for ever when Python frees it: an
        interrupted command leaves without that, with all its output and 130.
        """
        outcome = subprocess.run(
            [sys.executable, "-c", STUCK.format(end=end)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

        assert (130, "text", "") == (outcome.returncode, outcome.stdout, outcome.stderr)

    def test_other_ends_are_as_python_has_them(self):
        """
        A command that was not interrupted keeps its own exit code and frees its objects.
        """
        outcome = subprocess.run(
            [sys.executable, "-c", FREED], capture_output=True, text=True, check=False
        )

        assert (3, "freed") == (outcome.returncode, outcome.stdout)


class TestPackage:
    def test_every_public_name_is_there(self):
        """
        Each name of the package is found when it is used, and no other.
        """
        own_name = {"Stats": "GetStatsResponse"}  # the message of the contract itself
        for name in tandem_client.__all__:
            value = getattr(tandem_client, name)
            assert getattr(value, "__name__", name) in {own_name.get(name, name), "Union"}
        with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
            _ = tandem_client.Cleint
        assert set(tandem_client.__all__) <= set(dir(tandem_client))


class TestListOfCommands:
    @pytest.mark.parametrize("name", root.COMMANDS)
    def test_each_command_can_be_loaded(self, name):
        """
        Each line of the list names a command that has help of its own, and the same summary.
        """
        entry = root.COMMANDS[name]
        found = getattr(import_module(f"tandem_client.cli.{entry.module}"), entry.name or name)
        about = found.info.help if isinstance(found, typer.Typer) else found.__doc__

        assert about.strip().startswith(entry.summary.removesuffix("."))
        assert name == root.load(name).name

    def test_misspelt_command_is_told_the_right_one(self):
        """
        An unknown command is refused with the one that was meant.
        """
        result = CliRunner().invoke(root.app, ["genrate"])

        assert 2 == result.exit_code
        assert "Did you mean 'generate'?" in result.stderr

    @pytest.mark.parametrize("name", [*root.COMMANDS, "bench serve", "cache flush", "config show"])
    def test_help_shows_switches_without_a_type(self, name):
        """
        No command's help gives a type to an option that takes no value, --help among them.
        """
        shown = CliRunner().invoke(root.app, [*name.split(), "--help"]).stdout

        assert "<bool>" not in shown


class TestWorkingFolder:
    @pytest.mark.slow
    def test_folder_named_like_a_service_is_not_what_is_started(self, tmp_path):
        """
        A command that starts a service starts the installed one, wherever it is called from.
        """
        (tmp_path / "scheduler_svc").mkdir()
        (tmp_path / "scheduler_svc" / "__init__.py").write_text("raise SystemExit('not this one')")

        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                "from tandem_client.cli import main; main()",
                "simulate",
                "--help",
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

        assert (0, "") == (ended.returncode, ended.stderr)


class TestLibraries:
    @pytest.mark.parametrize(("given", "expected"), [(None, "ERROR"), ("INFO", "INFO")])
    def test_grpc_says_nothing_of_its_own_unless_it_is_asked_to(
        self, given, expected, tmp_path, monkeypatch
    ):
        """
        Before gRPC is loaded its native log is set to errors, where the user has not set it.
        """
        monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
        if given:
            monkeypatch.setenv("GRPC_VERBOSITY", given)
        (tmp_path / "grpc.py").write_text(
            "import os; print(os.environ['GRPC_VERBOSITY'])\nraise SystemExit"
        )

        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + RUN_GENERATE,
            ],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

        assert expected == ended.stdout.strip()


class TestRoot:
    def test_version_is_printed(self, run):
        """
        --version prints the distribution's version.
        """
        assert f"{version('tandem-serve')}\n" == run("--version").stdout

    def test_address_can_come_from_the_environment(self, run, server, monkeypatch):
        """
        TANDEM_CLIENT_ADDRESS stands for --address.
        """
        monkeypatch.setitem(os.environ, "TANDEM_CLIENT_ADDRESS", server.address)

        assert ANSWER + "\n" == run("generate", "hi").stdout
