"""Commands that print results, and are stopped or cannot print them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

SIMULATE = [sys.executable, "-m", "tandem_simulator", "--requests=3", "--json"]
MEASURE = [sys.executable, "-m", "tandem_bench", "scheduler", "--turns=1000000", "--running=1"]

TWO_AT_ONCE = """
import os, signal
from tandem.process.printing_commands import run_printing

def command():
    both = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        os.kill(os.getpid(), number)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
    finally:
        os.kill(os.getpid(), 0)  # what ends a process of its own does; Python looks for signals then

run_printing("both", command)
"""

STARTING = """
import os, signal, subprocess, sys
from tandem.process.printing_commands import run_printing, started_process

ASK = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"

def start():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    print(process.pid, flush=True)
    return process

def command():
    started_process(lambda: subprocess.Popen([sys.executable, "-c", ASK])).wait()
    started_process(start)
    print("went on")

run_printing("starting", command)
"""

SWALLOWED = """
import os, signal, sys, time
from tandem.process.printing_commands import run_printing

def command():
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    except:
        pass
    try:
        time.sleep(60)
    finally:
        time.sleep(1)  # longer than a lost end takes to begin again
        print("closed", flush=True)
    print("went on")

run_printing("swallowed", command)
"""

CAUGHT = """
import signal, time
from tandem.process.printing_commands import run_printing

handler = signal.getsignal(signal.SIGINT)
try:
    run_printing("caught", lambda: signal.raise_signal(signal.SIGINT))
except SystemExit:
    signal.signal(signal.SIGINT, handler)
time.sleep(1)  # several times what a lost end takes to begin again
print("went on")
"""

LINK = [sys.executable, "-m", "tandem_client", "bench", "link"]


@pytest.fixture
def short_path():
    """Yield a folder with a path short enough for those of sockets, which end at 107 characters."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        yield Path(folder)


class TestEndings:
    def test_full_disk_is_one_line(self):
        """
        A command that cannot write its output says so in one line and exits with 1.
        """
        with Path("/dev/full").open("w") as full:
            ran = subprocess.run(
                SIMULATE, stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert 1 == ran.returncode
        said = "simulate: cannot write the output: No space left on device"
        assert said == ran.stderr.splitlines()[-1]
        assert "Traceback" not in ran.stderr

    def test_reader_that_left_ends_it_quietly(self):
        """
        A command with an output that has no reader any more exits with 1 and says nothing about it.
        """
        reader, writer = os.pipe()
        os.close(reader)
        try:
            ran = subprocess.run(
                SIMULATE, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
            )
        finally:
            os.close(writer)
        assert 1 == ran.returncode
        said = ran.stderr.splitlines()
        assert [line for line in said if not line.startswith("simulated ")] == []

    def test_ctrl_c_ends_a_measurement_quietly(self):
        """
        A benchmark that Ctrl-C interrupts exits with 130 and prints no traceback.
        """
        with subprocess.Popen(
            MEASURE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
        assert (130, "") == (process.returncode, said)

    def test_sigterm_ends_a_measurement_quietly(self):
        """
        A benchmark that is told to stop exits with 143 and prints no traceback.
        """
        with subprocess.Popen(
            MEASURE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            said = process.stderr.read()
        assert (143, "") == (process.returncode, said)

    def test_two_signals_at_once_end_it_quietly(self):
        """
        The first of two signals that come at once decides the exit code, and the second prints
        nothing.
        """
        ran = subprocess.run(
            [sys.executable, "-c", TWO_AT_ONCE], capture_output=True, text=True, check=False
        )
        assert (130, "") == (ran.returncode, ran.stderr)

    @pytest.mark.slow
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_end_that_a_library_swallowed_begins_again(self, number, code):
        """
        A signal whose exception is caught by code that catches everything ends the process all the
        same, once: what the end closes is closed without another interruption.
        """
        ran = subprocess.run(
            [sys.executable, "-c", SWALLOWED, str(int(number))],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (code, "closed\n", "") == (ran.returncode, ran.stdout, ran.stderr)

    @pytest.mark.slow
    def test_end_that_a_caller_caught_does_not_begin_again(self):
        """
        A caller that catches the end of a command, and puts its own handlers back, is not
        interrupted later: not by what looks after ends that were lost.
        """
        ran = subprocess.run(
            [sys.executable, "-c", CAUGHT], capture_output=True, text=True, check=False
        )
        assert (0, "went on\n", "") == (ran.returncode, ran.stdout, ran.stderr)

    def test_process_that_is_being_started_is_not_left_behind(self):
        """
        SIGTERM ends a command and the process that it is starting, which ignores Ctrl-C by default.
        """
        ran = subprocess.run(
            [sys.executable, "-c", STARTING], capture_output=True, text=True, check=False
        )
        deaf, pid = ran.stdout.split()
        assert (143, "True", "") == (ran.returncode, deaf, ran.stderr)
        assert not Path(f"/proc/{pid}").exists()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("number", "whom", "code"),
        [
            (signal.SIGINT, os.killpg, 130),
            (signal.SIGTERM, os.killpg, 143),
            (signal.SIGINT, os.kill, 130),
            (signal.SIGTERM, os.kill, 143),
        ],
    )
    def test_interrupted_benchmark_leaves_nothing(self, short_path, number, whom, code):
        """
        A signal to `tandem bench link`, or to it and all its processes, ends them and removes their
        files, without a traceback.
        """
        with subprocess.Popen(
            [*LINK, "--step-ms=2", "--rows=2", "--seconds=60"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(short_path)},
            start_new_session=True,
        ) as process:
            while not list(short_path.glob("*/models")):  # all processes run
                assert process.poll() is None
                time.sleep(0.05)
            whom(process.pid, number)
            said = process.stderr.read()  # ends when all of them have
        assert (code, "", []) == (process.returncode, said.strip(), list(short_path.iterdir()))
