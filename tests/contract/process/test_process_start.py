"""The start of service processes, and their output when they cannot start."""

from __future__ import annotations

import errno
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.errors import InvalidConfig, OutOfMemory
from tandem.process.process_start import as_refusal, check_address_space_left, run_or_refuse
from tests.waiting import LIMIT_S

GIB = 2**30
LOADING = """
import sys

class Slow:
    def find_spec(self, name, *_):
        if name == "{package}.run":
            print("loading", flush=True)
            sys.stdin.read()
            print("went on", flush=True)
            raise SystemExit(7)

sys.meta_path.insert(0, Slow())
from {package}.__main__ import main
main()
"""
"""Program of a service that loads its modules until its stdin ends."""


STARTING = """
import runpy, sys

class Slow:
    def find_spec(self, name, *_):
        if name == "{module}":
            print("loading", flush=True)
            sys.stdin.read()

sys.meta_path.insert(0, Slow())
runpy.run_module("{package}", run_name="__main__")
"""
"""Program like `python -m` of a package, which imports one module until its stdin ends."""


def interrupted(package, number):
    """Return exit code and output of a service that gets a signal while it loads its modules."""
    return interrupted_program(LOADING.format(package=package), number)


def interrupted_program(program, number):
    """Return exit code and output of a program that gets a signal once it says that it loads."""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert "loading\n" == process.stdout.readline()
        process.send_signal(number)
        output, errors = process.communicate(timeout=LIMIT_S)
    assert not errors
    return process.returncode, output


class TestSignals:
    @pytest.mark.parametrize("package", ["executor_svc", "scheduler_svc"])
    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
    )
    def test_signal_while_loading_ends_a_service_in_silence(self, package, number, code):
        """
        A signal while modules are still being loaded ends the process at once, without a traceback.
        """
        assert (code, "") == interrupted(package, number)

    @pytest.mark.parametrize(
        ("package", "module"),
        [
            ("executor_svc", "tandem.process"),
            ("scheduler_svc", "tandem.process"),
            ("tandem_client", "tandem_client.cli"),
        ],
    )
    def test_ctrl_c_before_anything_is_loaded_ends_a_program_in_silence(self, package, module):
        """
        Ctrl-C during the first imports ends the process, without a traceback.
        """
        program = STARTING.format(package=package, module=module)
        assert (-signal.SIGINT, "") == interrupted_program(program, signal.SIGINT)

    def test_frontend_leaves_signals_to_its_parent(self):
        """
        A frontend that is still loading ignores Ctrl-C, since its parent decides when it stops.
        """
        assert (7, "went on\n") == interrupted("scheduler_svc.frontend", signal.SIGINT)


class TestLimits:
    @pytest.mark.parametrize(
        "service",
        [("scheduler_svc",), ("executor_svc", "--model=/nowhere")],
        ids=["scheduler", "executor"],
    )
    @pytest.mark.parametrize(
        ("limit", "sentence"),
        [
            ("-n 16", "this process may have 16 open files and needs at least 64"),
            ("-v 200000", "this process may have 0.19 GiB of address space and needs at least"),
        ],
        ids=["files", "memory"],
    )
    def test_limit_that_is_too_low_is_one_line_at_once(self, service, limit, sentence):
        """
        A limit of too few files or too little address space is INVALID_CONFIG with what is needed,
        exit code 2.
        """
        flags = ["--listen=127.0.0.1:0"]
        done = subprocess.run(
            [
                "sh",
                "-c",
                f'ulimit {limit}; exec "$@"',
                "sh",
                sys.executable,
                "-m",
                *service,
                *flags,
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert (2, 1) == (done.returncode, done.stderr.count("\n"))
        assert done.stderr.startswith(f"INVALID_CONFIG: {sentence}")

    def test_space_that_libraries_have_taken_is_one_sentence(self, monkeypatch):
        """
        An error about too little address space says how much the libraries take.
        """
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + 2 * GIB
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        check_address_space_left(GIB)
        with pytest.raises(InvalidConfig, match=r"its libraries take .* it needs at least 3 more"):
            check_address_space_left(3 * GIB)


class TestRefusals:
    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (OSError(errno.EMFILE, "Too many open files"), "INVALID_CONFIG: all "),
            (
                OSError(errno.ENOSPC, "No space left", "/t"),
                "INVALID_CONFIG: the start failed: /t: No",
            ),
            (MemoryError(), "OUT_OF_MEMORY: memory ran out at the start"),
            (ImportError("no room"), "INTERNAL: a library cannot be loaded: no room"),
            (
                RuntimeError("can't start new thread"),
                "INVALID_CONFIG: can't start new thread: allow",
            ),
        ],
        ids=["files", "disk", "memory", "library", "threads"],
    )
    def test_what_the_machine_lacks_is_one_line(self, error, line, capsys):
        """
        A resource that a service cannot get at its start is reported as a reason and a sentence,
        without a traceback.
        """

        def fail():
            raise error

        code = run_or_refuse(fail)
        said = capsys.readouterr().err

        assert said.startswith(line)
        assert 1 == said.count("\n")
        assert (1 if line.startswith("INTERNAL") else 2) == code

    @pytest.mark.parametrize(
        "mistake",
        [
            RuntimeError("a bug"),
            OSError(errno.EBADF, "Bad file descriptor"),
            ImportError("cannot import name 'plan'", name="scheduler_svc.core"),
        ],
        ids=["runtime", "descriptor", "import"],
    )
    def test_own_mistake_keeps_its_traceback(self, mistake):
        """
        A bug in the program is not turned into a refusal: its error passes unchanged.
        """

        def fail():
            raise mistake

        with pytest.raises(type(mistake)) as raised:
            run_or_refuse(fail)
        assert mistake is raised.value

    def test_memory_is_refused_for_good(self):
        """
        A MemoryError is refused as OutOfMemory, which a restart does not cure.
        """
        assert isinstance(as_refusal(MemoryError()), OutOfMemory)
