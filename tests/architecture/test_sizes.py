"""Files and functions stay short enough to read in one sitting."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
MAX_SOURCE_LINES = 400
MAX_TEST_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PROTO_LINES = 350
MAX_FOLDER_FILES = 15


def tracked(*patterns: str) -> list[Path]:
    """Return the files that belong to the project, whether committed yet or not."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def python_files() -> list[Path]:
    return [path for path in tracked("*.py") if not path.name.endswith(GENERATED)]


def is_test(path: Path) -> bool:
    return path.relative_to(ROOT).parts[0] == "tests"


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


class TestSizes:
    def test_python_file_is_within_its_limit(self):
        """
        A source file has at most 400 lines, a test file at most 500.
        """
        too_long = {
            str(path.relative_to(ROOT)): lines
            for path in python_files()
            if (lines := len(path.read_text().splitlines()))
            > (MAX_TEST_LINES if is_test(path) else MAX_SOURCE_LINES)
        }
        assert {} == too_long

    def test_source_function_is_within_its_limit(self):
        """
        A function has at most 60 lines, docstring included.
        """
        too_long = {
            f"{path.relative_to(ROOT)}:{function.lineno} {function.name}": lines
            for path in python_files()
            if not is_test(path)
            for function in functions(path)
            if (lines := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
        }
        assert {} == too_long

    def test_proto_file_is_within_its_limit(self):
        """
        A proto file has at most 350 lines.
        """
        too_long = [
            path.name
            for path in tracked("*.proto")
            if len(path.read_text().splitlines()) > MAX_PROTO_LINES
        ]
        assert [] == too_long

    def test_folder_is_within_its_limit(self):
        """
        A folder holds at most 15 Python files, of products and of tests; generated ones do not count.
        """
        sizes = Counter(str(path.parent.relative_to(ROOT)) for path in python_files())
        too_full = {folder: size for folder, size in sizes.items() if size > MAX_FOLDER_FILES}
        assert {} == too_full


class TestSpecification:
    def test_every_test_says_what_it_specifies(self):
        """
        Each test has a docstring, so that read in order they form a specification.
        """
        silent = [
            f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
            for path in python_files()
            if is_test(path) and path.name.startswith("test_")
            for function in functions(path)
            if function.name.startswith("test_") and not ast.get_docstring(function)
        ]
        assert [] == silent


class TestTopLevel:
    def test_holds_exactly_what_the_layout_says(self):
        """
        The project's root holds the agreed entries and dotfiles and nothing else.
        """
        found = {path.relative_to(ROOT).parts[0] for path in tracked()}
        assert {
            *("pyproject.toml", "protos", "scheduler_svc", "executor_svc", "kernels", "clients"),
            *("deploy", "tests", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
        } == {name for name in found if not name.startswith(".")}


@pytest.mark.parametrize("folder", ["tests"])
class TestLayoutOfTests:
    def test_no_package_file_shadows_a_source_package(self, folder):
        """
        No folder of tests is a package, so that `import kernels` never means tests/kernels.
        """
        assert [] == list((ROOT / folder).rglob("__init__.py"))
