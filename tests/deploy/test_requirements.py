"""`check_requirements.py`: what cannot be installed somewhere turns it red."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.deploy.fake_wheels import LINUX, write_wheel
from tests.e2e.cluster import ROOT, environment

GPU = "triton>=3.6,<3.8; sys_platform == 'linux'"
PINS = ("numpy==2.3.5", "torch==2.13.0", "triton==3.7.1")
TRITON_OF = {"2.11.0": "3.6.0", "2.12.1": "3.7.1", "2.13.0": "3.7.1"}
"""Triton version that each PyTorch build for CUDA requires."""


@pytest.fixture
def published(tmp_path):
    """A folder with all that the project below needs, PyTorch's builds for CUDA among it."""
    wheels = tmp_path / "wheels"
    write_wheel(wheels, "numpy", "2.3.5")
    for torch, triton in TRITON_OF.items():
        requires = [f"triton=={triton}; sys_platform == 'linux'"]
        write_wheel(wheels, "torch", torch, requires=requires)
        write_wheel(wheels, "triton", triton, tags=LINUX)
    return wheels


def check(folder, *arguments, gpu=GPU, pins=PINS, env=None):
    """Run the check on a project with an extra `gpu`, and wait for its end."""
    (folder / "pyproject.toml").write_text(
        "[project]\nname = 'tandem-serve'\nversion = '1'\nrequires-python = '>=3.11'\n"
        "dependencies = ['numpy>=2']\n[project.optional-dependencies]\n"
        f'executor = ["torch>=2.11,<2.14"]\ngpu = ["{gpu}"]\n'
    )
    (folder / "constraints.txt").write_text("".join(f"{one}\n" for one in pins))
    command = [sys.executable, ROOT / "deploy/local/check_requirements.py", *arguments]
    command += [f"--pyproject={folder / 'pyproject.toml'}"]
    command += [f"--constraints={folder / 'constraints.txt'}"]
    return subprocess.run(
        [*map(str, command)],
        env=environment() | {"UV_CACHE_DIR": str(folder / "cache")} | (env or {}),
        capture_output=True,
        text=True,
        check=False,
    )


class TestRequirements:
    @pytest.mark.parametrize("build", ["cuda", "cpu"])
    def test_consistent_requirements_pass(self, tmp_path, published, build):
        """
        Requirements that fit pass, also where the pinned PyTorch is a build for CPUs.
        """
        if build == "cpu":
            for wheel in published.glob("torch-2.13.0-*"):
                wheel.unlink()
            write_wheel(published, "torch", "2.13.0+cpu")

        outcome = check(tmp_path, f"--wheels={published}")

        assert 0 == outcome.returncode, outcome.stderr
        assert "resolutions without a conflict" in outcome.stdout

    @pytest.mark.parametrize(
        ("gpu", "pins", "says"),
        [
            (GPU.replace("3.8", "3.7"), PINS, ("PyTorch 2.13", "==3.7.1")),
            (GPU.partition(";")[0], PINS, ("aarch64-apple-darwin", "no wheels")),
            (GPU, (*PINS[:2], "triton==3.6.0"), ("with constraints.txt", "==3.6.0")),
            (GPU, PINS[1:], ("constraints.txt does not pin numpy",)),
            (GPU.replace("triton", "tritton"), PINS, ("Python 3.12", "tritton")),
        ],
        ids=["extra", "marker", "pin", "unpinned", "unknown"],
    )
    def test_planted_conflict_turns_it_red(self, tmp_path, published, gpu, pins, says):
        """
        A requirement that contradicts another, or what a platform has, ends it with 1 and is named.
        """
        outcome = check(tmp_path, f"--wheels={published}", gpu=gpu, pins=pins)

        assert 1 == outcome.returncode
        assert "" == outcome.stdout
        for words in says:
            assert words in outcome.stderr

    def test_missing_network_is_told_from_a_conflict(self, tmp_path):
        """
        A check that reaches no package index ends with 75 and says so.
        """
        nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "UV_HTTP_RETRIES": "0"}
        outcome = check(tmp_path, env=nowhere)

        assert 75 == outcome.returncode
        assert outcome.stderr.startswith("no package index could be reached")

    def test_missing_package_is_added_to_the_pins(self, tmp_path, published):
        """
        `--pin` adds what constraints lack, drops what nothing needs and keeps pinned versions.
        """
        pins = ("numpy==2.3.5", "torch==2.12.1", "unused==1")

        outcome = check(tmp_path, f"--wheels={published}", "--pin", pins=pins)

        lines = (tmp_path / "constraints.txt").read_text().splitlines()
        assert 0 == outcome.returncode, outcome.stderr
        assert ["numpy==2.3.5", "torch==2.12.1", "triton==3.7.1"] == [
            line for line in lines if not line.startswith("#")
        ]
