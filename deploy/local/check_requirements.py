"""
Check that every extra of pyproject.toml can be installed on each platform that we support.

Each extra is resolved together with all others, as a user's pip would: from the public index
alone, without the settings of pip and uv on this machine. That is done for each platform and Python
below, with and without constraints.txt, and with each minor version of PyTorch that we allow.
Only metadata is fetched. `--pin` adds missing packages to constraints.txt and drops packages that
are not needed; versions that it has stay, unless their lines are deleted first.

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
"""Oldest release of macOS that PyTorch has wheels for."""
TORCHES = ("2.11", "2.12", "2.13")
NO_WHEELS = ("llama-cpp-python",)
"""Packages that are published only as source; the metadata of their source is resolved."""
UNREACHABLE = re.compile(
    r"Failed to fetch|error sending request|dns error|timed out|client error \(Connect\)",
    re.IGNORECASE,
)
ABOUT_THE_NETWORK = ("UV_CACHE_DIR", "UV_HTTP_", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS")
"""Prefixes of uv's environment variables that have no effect on the choice of packages."""
EXIT_CONFLICT = 1
EXIT_UNREACHABLE = 75
HEADER = """\
# Exact versions for deploy/local/demo and test, so that every machine runs what was tested.
# pip reads it with -c; what a platform, a Python or a build of PyTorch does not need stays away.
# After a change of pyproject.toml's dependencies, in this order:
# `.venv/bin/python deploy/local/check_requirements.py --pin`, install, run the checks.
"""


class CannotInstallError(Exception):
    """Error of requirements that contradict each other or the index; the text says how."""


class UnreachableError(Exception):
    """Error of a resolution in which no package index answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kind of machine to install on."""

    platform: str
    python: str
    torch: str | None = None

    def __str__(self) -> str:
        """Return its name for a report."""
        torch = f", PyTorch {self.torch}" if self.torch else ""
        return f"{self.platform}, Python {self.python}{torch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolver:
    """Resolver of the packages that would be installed, by uv."""

    pyproject: Path
    wheels: Path | None
    """Folder of wheels to use instead of the public index; None = the index."""
    folder: Path
    """Folder for temporary files, which must exist as long as the resolver."""

    def resolve(self, target: Target, constraints: Path | None) -> dict[str, str]:
        """
        Return the version of each package that all extras together need on a target.

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
        # With all versions pinned, metadata fetched for other targets usually suffices.
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
    """Run uv without the variables of this environment that affect the choice of packages."""
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
    """Return the targets to resolve, each with its constraints."""
    targets = [Target(platform=at, python=python) for at in PLATFORMS for python in PYTHONS]
    torches = [Target(platform=PLATFORMS[0], python="3.12", torch=torch) for torch in TORCHES]
    return [(at, pins) for pins in (None, constraints) for at in targets] + [
        (at, None) for at in torches
    ]


def check(resolver: Resolver, constraints: Path) -> list[str]:
    """
    Return a sentence for each problem.

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

    # The first job runs alone: without a network the others are pointless.
    problems = [problem(jobs[0])]
    with ThreadPoolExecutor(max_workers=8) as pool:
        problems += pool.map(problem, jobs[1:])
    return [one for one in problems if one]


def pin(resolver: Resolver, constraints: Path) -> None:
    """
    Write constraints for every target.

    A package that they lack gets the version that fits the oldest Python.

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
    """Check, after writing constraints.txt with --pin; return the exit status."""
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
