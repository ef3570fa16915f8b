"""The import rules hold, and would be noticed if they did not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "tandem": "protos/python/tandem",
    "scheduler_svc": "scheduler_svc",
    "executor_svc": "executor_svc",
    "kernels": "kernels",
    "tandem_client": "clients/python/tandem_client",
    "tandem_embedded": "clients/embedded/tandem_embedded",
    "tandem_bench": "clients/bench/tandem_bench",
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages in a folder, with the project's contracts."""
    command = (
        "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command"
    )
    return subprocess.run(
        [sys.executable, "-P", "-c", f"{command}; lint_imports_command()", "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def copied_packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imports")
    for name, source in PACKAGES.items():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / source, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


class TestImportRules:
    def test_packages_as_they_are_keep_every_rule(self, copied_packages):
        """
        The services share only the tandem package, and none reaches what it must not.
        """
        outcome = lint(copied_packages)
        assert 0 == outcome.returncode, outcome.stdout

    @pytest.mark.parametrize(
        ("module", "line"),
        [
            ("scheduler_svc/core/request/request.py", "import torch"),
            ("scheduler_svc/core/request/request.py", "import kernels"),
            ("scheduler_svc/core/request/request.py", "import threading"),
            ("tandem/errors.py", "import triton"),
            ("executor_svc/__init__.py", "import scheduler_svc"),
            ("executor_svc/device/choice.py", "import executor_svc.model.loader"),
            ("executor_svc/memory/host_blocks.py", "import executor_svc.step.runner"),
            ("kernels/__init__.py", "import grpc"),
            ("scheduler_svc/core/request/request.py", "import tandem.settings.schema"),
            ("tandem_client/__init__.py", "import tandem.settings.schema"),
            ("tandem_client/__init__.py", "import executor_svc"),
            ("tandem_client/__init__.py", "import tandem.http_server.process"),
            ("tandem/errors.py", "import tandem.http_server.settings"),
            ("tandem_bench/__init__.py", "import tandem.http_server.process"),
        ],
        ids=lambda value: value.removeprefix("import ").replace("/", "."),
    )
    def test_planted_import_breaks_a_rule(self, copied_packages, module, line):
        """
        A forbidden import anywhere below a package is found, also when another module hides it.
        """
        path = copied_packages / module
        before = path.read_text()
        try:
            path.write_text(f"{before}\n{line}\n")
            outcome = lint(copied_packages)
        finally:
            path.write_text(before)
        assert 1 == outcome.returncode, outcome.stdout
        assert "BROKEN" in outcome.stdout
