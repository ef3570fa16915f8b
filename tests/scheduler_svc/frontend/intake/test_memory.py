"""The C library's heaps in a process that strangers connect to."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

from scheduler_svc.frontend.intake.memory import NUM_HEAPS

THREADS = """
import ctypes, sys, threading
from scheduler_svc.frontend.intake.memory import bound_heaps

if sys.argv[1] == "bounded":
    bound_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
everyone = threading.Barrier(12)

def use():
    block = ctypes.c_void_p(libc.malloc(5000))
    everyone.wait()
    libc.free(block)

threads = [threading.Thread(target=use) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(b"/dev/stdout", b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


def num_heaps(kind: str) -> int:
    """Return how many heaps a process with a dozen threads has."""
    said = subprocess.run(
        [sys.executable, "-c", THREADS, kind], check=True, capture_output=True, text=True
    )
    return len(re.findall("<heap nr=", said.stdout))


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries have no such heaps"
)
def test_many_threads_share_a_few_heaps():
    """
    Threads that allocate at the same time get no heap each, as they do without the bound.
    """
    assert num_heaps("free") > NUM_HEAPS >= num_heaps("bounded")
