"""Every function for the device says what it does, and every kernel where to check it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[3] / "kernels"
ORACLE = re.compile(r"Oracle: ((?:`[\w.]+`(?:, )?)+)")


def device_functions() -> dict[str, ast.FunctionDef]:
    """Return the functions under `triton.jit` by file and name, such as `silu_mul/triton_kernel.py:_silu_mul_kernel`."""
    return {
        f"{path.relative_to(KERNELS)}:{node.name}": node
        for path in sorted(KERNELS.rglob("triton_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
    }


FUNCTIONS = device_functions()
LAUNCHED = [name for name in FUNCTIONS if name.endswith("_kernel")]


def oracles(name: str, description: str) -> list[tuple[Path, list[str]]]:
    """
    Return file and names of the oracles in a kernel's description.

    A path of names begins at the kernel's folder, or at `kernels/`: its last lower-case module is a
    file, and the rest a function, or a class and its method.
    """
    found = ORACLE.search(description)
    paths = re.findall(r"`([\w.]+)`", found[1]) if found else []
    folder = KERNELS / Path(name.partition(":")[0]).parent
    result = []
    for path in paths:
        before, module, inside = path.rpartition("reference")
        start = KERNELS if before else folder
        parts = [part for part in before.split(".") if part]
        result.append((start.joinpath(*parts, f"{module}.py"), inside.strip(".").split(".")))
    return result


def is_defined(file: Path, names: list[str]) -> bool:
    """Return whether a file defines a function, or a class with a method."""
    body = ast.parse(file.read_text()).body
    for name in names:
        inside = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        ]
        if not inside:
            return False
        body = inside[0].body
    return True


class TestDescriptions:
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_function_of_the_device_has_a_docstring(self, name: str):
        """
        A docstring describes each function, so that comments are left for reasons.
        """
        assert ast.get_docstring(FUNCTIONS[name])

    @pytest.mark.parametrize("name", LAUNCHED)
    def test_kernel_says_its_grid_types_and_masks(self, name: str):
        """
        The grid stands at the start of a sentence, with types of the arrays and what is masked.
        """
        description = ast.get_docstring(FUNCTIONS[name]) or ""
        missing = [
            word
            for word in ("\nGrid (", "int64", "mask")
            if word not in description.replace("\n\n", "\n")
        ]
        assert [] == missing

    @pytest.mark.parametrize("name", LAUNCHED)
    def test_kernel_names_an_oracle_that_exists(self, name: str):
        """
        A kernel names the functions of a definition that give its result.
        """
        named = oracles(name, ast.get_docstring(FUNCTIONS[name]) or "")
        assert named
        assert all(is_defined(file, names) for file, names in named)

    def test_an_oracle_that_is_gone_is_seen(self):
        """
        A function, a method or a class that no file defines is no oracle.
        """
        attention = KERNELS / "paged_attention" / "reference.py"
        assert is_defined(attention, ["ReferencePlan", "attend"])
        assert not is_defined(attention, ["ReferencePlan", "attended"])
        assert not is_defined(attention, ["attend"])
        assert [] == oracles("silu_mul/triton_kernel.py:_silu_mul_kernel", "Gate rows.")
