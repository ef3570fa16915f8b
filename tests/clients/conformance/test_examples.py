"""The first example of each client's page, built and run as it is printed but for the port."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conformance.programs import PROGRAMS, ROOT, why_not
from tests.e2e.cluster import BUNDLED_MODEL, Cluster
from tests.programs import is_missing

pytestmark = pytest.mark.slow

CLIENTS = ROOT / "clients"
PRINTED_ADDRESS = "127.0.0.1:50051"
BLOCKS = {
    "go": "```go\npackage main\n",
    "typescript": "```ts\nimport ",
    "java": "```java\nimport ",
    "cpp": "```cpp\n#include ",
    "rust": "```rust,no_run\nuse ",
}
"""First words of the example in each page, whose fence names the language."""
LANGUAGES = [one for one in PROGRAMS if one.language is not None]


def example_of(language: str, address: str) -> str:
    """Return the first example of a client's page, with another address."""
    page = (CLIENTS / language / "README.md").read_text()
    after = page[page.index(BLOCKS[language]) :]
    code = re.fullmatch(r"```[^\n]*\n(.*?)```.*", after, re.DOTALL)
    assert code is not None
    assert 1 == code[1].count(PRINTED_ADDRESS)
    return code[1].replace(PRINTED_ADDRESS, address)


@contextlib.contextmanager
def written(path: Path, text: str) -> Iterator[Path]:
    """Write a file for the block."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    try:
        yield path
    finally:
        path.unlink()


def output_of(command: list[str], folder: Path, **variables: str) -> str:
    """Run a command that must end with 0, and return what it printed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def run_go(code: str, folder: Path) -> str:
    with written(folder / "first.go", code) as file:
        return output_of(["go", "run", str(file)], CLIENTS / "go")


def run_typescript(code: str, _folder: Path) -> str:
    with written(CLIENTS / "typescript/dist/first.mjs", code) as file:
        return output_of(["node", str(file)], CLIENTS / "typescript")


def run_java(code: str, folder: Path) -> str:
    java = CLIENTS / "java"
    classes = f"{java}/client/target/classes:{java}/conformance/target/lib/*"
    with written(folder / "Example.java", code) as file:
        return output_of(["java", "-cp", classes, str(file)], folder)


def run_cpp(code: str, folder: Path) -> str:
    install = ["cmake", "--install", str(CLIENTS / "cpp/build"), "--prefix", str(folder)]
    output_of(install, folder)
    (packages,) = folder.glob("lib*/**/pkgconfig")
    find = ["pkg-config", "--cflags", "--libs", "tandem-client"]
    flags = output_of(find, folder, PKG_CONFIG_PATH=str(packages)).split()
    with written(folder / "first.cpp", code) as file:
        output_of(["g++", "-std=c++17", str(file), "-o", "first", *flags], folder)
    return output_of([str(folder / "first")], folder)


def run_rust(code: str, _folder: Path) -> str:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    command = ["cargo", "run", "--quiet", "--example", "first"]
    with written(CLIENTS / "rust/examples/first.rs", code):
        return output_of(
            command, CLIENTS / "rust", CARGO_TARGET_DIR=str(cache / "tandem/clients/rust")
        )


RUN = {
    "go": run_go,
    "typescript": run_typescript,
    "java": run_java,
    "cpp": run_cpp,
    "rust": run_rust,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Yield services of the bundled model."""
    cluster = Cluster(BUNDLED_MODEL, tmp_path_factory.mktemp("examples"), [], [])
    try:
        cluster.start_executor()
        yield cluster
    finally:
        cluster.close()


class TestExamples:
    @pytest.mark.parametrize("program", LANGUAGES, ids=[one.name for one in LANGUAGES])
    def test_first_example_prints_what_the_model_says(self, program, cluster, tmp_path):
        """
        The example builds against the client as it was built, streams a completion and ends with 0.
        """
        if why := why_not(program):
            is_missing(why)
        before = cluster.stats().finished_requests
        printed = RUN[program.name](example_of(program.name, cluster.address), tmp_path)
        assert printed.strip()
        assert before + 1 == cluster.stats().finished_requests
