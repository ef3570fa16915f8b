"""Effects of importing the embedded engine on a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.model_zoo import FAMILIES

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


SERVE = """
import sys
from tandem_embedded import EngineConfig, GenerationParams, InferenceEngine

asked = GenerationParams(
    max_tokens=4, temperature=1.0, top_k=5, seed=0, frequency_penalty=0.5, logprobs=2
)
for model_dir in sys.argv[1:]:
    with InferenceEngine(EngineConfig(), model_dir, num_threads=1) as engine:
        assert engine.complete([5, 6, 7], asked).success
print(sorted({"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""
"""Program that serves a request with each model, and says what of a compiler it imported."""


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

    def test_serving_on_a_cpu_brings_in_no_compiler(self, tmp_path):
        """
        Loading a model of any family and serving it on a CPU imports neither PyTorch's compiler nor
        sympy, which take as long as the rest of a start.
        """
        model_dirs = [build(tmp_path / name) for name, build in FAMILIES.items()]
        outcome = subprocess.run(
            [sys.executable, "-c", SERVE, *model_dirs], capture_output=True, text=True, check=False
        )
        assert outcome.stdout.strip() == "[]", outcome.stderr
