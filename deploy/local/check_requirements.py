"""
Proves that every extra of pyproject.toml can be installed wherever we say that it can be.

Each extra is resolved together with all others, as a user's pip would: from the public index
alone, whatever pip or uv were told on this machine. That is done for each platform and Python
below, with and without constraints.txt, and with each minor version of PyTorch that we allow.
Metadata is all that is fetched. `--pin` adds to constraints.txt what it lacks and drops what
nothing needs; versions that it has stay, unless their lines are deleted first.

Exit status: 0 if all is well, 1 if something cannot be installed, 75 if no package index could be
reached.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin")
OLDEST_MACOS = "14.0"
"""PyTorch has no wheels for older ones."""
TORCHES = ("2.11", "2.12", "2.13")
NO_WHEELS = ("llama-cpp-python",)
"""Packages that are published as source alone: with these, metadata of source is good enough."""
UNREACHABLE = re.compile(
    r"Failed to fetch|error sending request|dns error|timed out|client error \(Connect\)",
    re.IGNORECASE,
)
ABOUT_THE_NETWORK = ("UV_CACHE_DIR", "UV_HTTP_", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS")
"""Of uv's variables, those that choose no package."""
EXIT_CONFLICT = 1
EXIT_UNREACHABLE = 75
HEADER = """\
# Exact versions for deploy/local/demo and test, so that every machine runs what was tested.
# pip reads it with -c; what a platform, a Python or a build of PyTorch does not need stays away.
# After a change of pyproject.toml's dependencies, in this order:
# `.venv/bin/python deploy/local/check_requirements.py --pin`, install, run the checks.
"""


class CannotInstallError(Exception):
    """The requirements contradict each other or what is published; the text says how."""


class UnreachableError(Exception):
    """No package index answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One machine to install on."""

    platform: str
    python: str
    torch: str | None = None

    def __str__(self) -> str:
        """Name it for a report."""
        torch = f", PyTorch {self.torch}" if self.torch else ""
        return f"{self.platform}, Python {self.python}{torch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """Answers what would be installed."""

    pyproject: Path
    wheels: Path | None
    """A folder to use instead of the public index."""
    folder: Path
    """For files that live as long as this."""

    def resolve(self, target: Target, constraints: Path | None) -> dict[str, str]:
        """
        Give the version of each package that all extras together need on a target.

        Raises:
            CannotInstallError: There is no set of versions that fits.
            UnreachableError: No package index answered.
        """
        command = [find_uv_bin(), "pip", "compile", str(self.pyproject), "--all-extras", "--quiet"]
        command += ["--no-config", "--no-header", "--no-annotate", "--color=never"]
        command += ["--no-python-downloads", f"--python={sys.executable}"]
        command += [f"--python-platform={target.platform}", f"--python-version={target.python}"]
        command += ["--only-binary=:all:", *(f"--no-binary={name}" for name in NO_WHEELS)]
        if self.wheels is not None:
            command += ["--no-index", f"--find-links={self.wheels}"]
        if constraints is not None:
            command += [f"--constraints={constraints}"]
        if target.torch is not None:
            torch = self.folder / f"torch-{target.torch}.txt"
            torch.write_text(f"torch=={target.torch}.*\n")
            command += [f"--constraints={torch}"]
        # Where each version is prescribed, what was just fetched for other targets is good enough.
        if constraints is not None:
            outcome = _run([*command, "--offline"])
        if constraints is None or outcome.returncode:
            outcome = _run(command)
        if outcome.returncode == 0:
            return dict(_pins(outcome.stdout.splitlines()))
        if UNREACHABLE.search(outcome.stderr):
            raise UnreachableError(outcome.stderr.strip())
        raise CannotInstallError(outcome.stderr.strip())


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run uv without what this process's environment says about packages."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(ABOUT_THE_NETWORK) or not name.startswith(("UV_", "PIP_"))
    }
    environment["MACOSX_DEPLOYMENT_TARGET"] = OLDEST_MACOS
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _pins(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield name and version of each `name==version`."""
    for line in lines:
        name, exact, version = line.partition("==")
        if exact and not line.startswith("#"):
            yield name.strip(), version.strip()


def _jobs(constraints: Path) -> list[tuple[Target, Path | None]]:
    """List what is to be resolved, and with which constraints."""
    targets = [Target(platform=at, python=python) for at in PLATFORMS for python in PYTHONS]
    torches = [Target(platform=PLATFORMS[0], python="3.12", torch=torch) for torch in TORCHES]
    return [(at, pins) for pins in (None, constraints) for at in targets] + [
        (at, None) for at in torches
    ]


def check(resolver: Resolver, constraints: Path) -> list[str]:
    """
    Give a sentence for each thing that is wrong.

    Raises:
        UnreachableError: No package index answered.
    """
    jobs = _jobs(constraints)
    pinned = dict(_pins(constraints.read_text().splitlines()))

    def problem(job: tuple[Target, Path | None]) -> str | None:
        target, pins = job
        how = f"with {constraints.name}" if pins else "without constraints"
        try:
            found = resolver.resolve(target, pins)
        except CannotInstallError as error:
            return f"{target}, {how}: {error}"
        missing = sorted(set(found) - set(pinned)) if pins else []
        return (
            f"{target}: {constraints.name} does not pin {', '.join(missing)}" if missing else None
        )

    # The first by itself: without a network it is not worth asking for the others.
    problems = [problem(jobs[0])]
    with ThreadPoolExecutor(max_workers=8) as pool:
        problems += pool.map(problem, jobs[1:])
    return [one for one in problems if one]


def pin(resolver: Resolver, constraints: Path) -> None:
    """
    Write constraints for every target.

    Of a package that they lack they take the version that suits the oldest Python.

    Raises:
        CannotInstallError: There is no set of versions that fits.
        UnreachableError: No package index answered.
    """
    pins: dict[str, str] = {}
    for python in PYTHONS:
        for platform in PLATFORMS:
            target = Target(platform=platform, python=python)
            pins = resolver.resolve(target, constraints) | pins
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    constraints.write_text(HEADER + "".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, or write constraints.txt; gives the exit status."""
    parser = argparse.ArgumentParser(description="Proves that every extra can be installed.")
    parser.add_argument("--pyproject", type=Path, default=ROOT / "pyproject.toml")
    parser.add_argument("--constraints", type=Path, default=ROOT / "deploy/local/constraints.txt")
    parser.add_argument("--wheels", type=Path, help="use this folder and no index (for tests)")
    parser.add_argument("--pin", action="store_true", help="write the constraints anew")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        resolver = Resolver(pyproject=options.pyproject, wheels=options.wheels, folder=Path(folder))
        try:
            if options.pin:
                pin(resolver, options.constraints)
            problems = check(resolver, options.constraints)
        except UnreachableError as error:
            print(f"no package index could be reached: {error}", file=sys.stderr)
            return EXIT_UNREACHABLE
        except CannotInstallError as error:
            problems = [str(error)]
    for problem in problems:
        print(f"cannot be installed: {problem}", file=sys.stderr)
    if problems:
        return EXIT_CONFLICT
    print(f"{len(_jobs(options.constraints))} resolutions without a conflict")
    return 0


if __name__ == "__main__":
    sys.exit(main())
