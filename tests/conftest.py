"""
Settings that all tests share: one thread per operation when a test begins, examples without a
deadline, logs as structlog finds them, kernels as they are when they are imported.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.threads import NUM_THREADS

# The time that an example takes, to draw or to run, says more about the machine than the code.
settings.register_profile("any time", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any time")

# Read by OpenMP when torch is first imported, here and in the processes that tests start. Tiny
# tensors gain nothing from more threads, and cores are few.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Processes that tests start buffer what they print, as users' do.
os.environ.pop("PYTHONUNBUFFERED", None)

LoggerProxy = type(structlog.get_logger())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the table of clients/conformance, which only a root conftest may add."""
    parser.addoption(
        "--conformance-results",
        type=Path,
        help="file to which each test of clients appends how their programs did",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a compiler where there is none; with CI set they fail instead."""
    compilers = ((os.environ.get("CC") or "cc",), (os.environ.get("CXX") or "g++", "c++"))
    if os.environ.get("CI") or all(any(map(shutil.which, names)) for names in compilers):
        return
    for item in items:
        if item.get_closest_marker("compiler"):
            item.add_marker(pytest.mark.skip(reason="NOT TESTED: there is no C or C++ compiler"))


@pytest.fixture(autouse=True)
def default_logs():
    """Undo what a test, or an engine that it made, set up for the whole process's logs."""
    yield
    if not structlog.is_configured():
        return
    structlog.reset_defaults()
    for module in list(sys.modules.values()):
        log = vars(module).get("_log")
        if isinstance(log, LoggerProxy):
            vars(log).pop("bind", None)  # kept from its first use, with what was set up then


@pytest.fixture(autouse=True, scope="module")
def default_kernels_of_module():
    """Undo what the fixtures of a module chose, which are made before those of its tests."""
    yield from default_kernels_after()


@pytest.fixture(autouse=True)
def default_kernels():
    """Undo what a test, or an engine that it made, chose for the whole process to compute with."""
    yield from default_kernels_after()


def default_kernels_after():
    """Yield once, and put back the kernels that were chosen before."""
    before = {name: offers_of(one) for name, one in kernel_operations().items()}
    yield
    for name, operation in kernel_operations().items():
        if name not in before:  # imported by the test
            operation.withdraw("cpu", "cpu-extension")
        elif before[name] != offers_of(operation):
            operation._faster = before[name]
            operation.forget()


@pytest.fixture(autouse=True)
def default_threads():
    """Undo what a test before, or an engine that it made, set for the process's operations."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(NUM_THREADS)


def kernel_operations() -> dict:
    """Return the operations by name; none if no module of operations was imported."""
    dispatch = sys.modules.get("kernels.dispatch")
    return {} if dispatch is None else dispatch._operations


def offers_of(operation) -> dict:
    """Return the implementations that an operation may run, by kind of device."""
    return {kind: dict(offered) for kind, offered in operation._faster.items()}
