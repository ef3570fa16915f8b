"""Effects of importing the embedded engine on a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WATCH_TORCH = """
import os, sys

class Watch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
from tandem_embedded import InferenceEngine
print("imported", flush=True)
InferenceEngine(model_dir="nowhere")
"""
"""Program that ends where PyTorch would be imported, and says how threads would wait then."""


class TestImport:
    @pytest.mark.parametrize(("chosen", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
    def test_pytorch_comes_with_the_first_engine_after_the_wait_policy(self, chosen, expected):
        """
        Importing the package leaves PyTorch alone; an engine's model brings it in, with threads
        that sleep while they wait unless the environment says otherwise.
        """
        environ = {name: os.environ[name] for name in os.environ if name != "OMP_WAIT_POLICY"}
        if chosen is not None:
            environ["OMP_WAIT_POLICY"] = chosen
        for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
            environ.pop(name, None)
        outcome = subprocess.run(
            [sys.executable, "-c", WATCH_TORCH],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ["imported", expected] == outcome.stdout.split(), outcome.stderr
