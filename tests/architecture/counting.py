"""Figures of the code's structure that are counted from its text, at any of its commits."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PRODUCT = ("scheduler_svc", "executor_svc", "kernels", "clients", "protos/python")
SOURCES = {".py", ".cpp", ".cc", ".cu", ".h", ".hpp", ".go", ".ts", ".java", ".rs"}
MEASURING = re.compile(
    r"(scheduler_svc|executor_svc)/(.*/)?(bench|simulator|fixed_step)/"
    r"|clients/python/tandem_client/(load/|cli/bench)"
)
PEOPLE = re.compile(r"\s*(Who(m|ever|se)?|What(ever)?|Whether|Nobody|Nothing|Somebody|Someone)\b")
FULL_FOLDER = 15
CORE = "scheduler_svc/core"
SHARED = "protos/python"
CHANGING = {
    "append",
    "appendleft",
    "clear",
    "extend",
    "frombytes",
    "insert",
    "pop",
    "popitem",
    "popleft",
}
"""Methods of containers that change them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """
    One number, what is aimed at, and what it is made of.

    Attributes:
        name: What is counted.
        aim: The value to reach; empty if there is none.
        value: The number; None where the tree lacks what is counted.
        parts: Files, folders, modules or classes with their shares, the largest first.
        why: The reason why there is no value.
    """

    name: str
    aim: str
    value: int | None
    parts: Mapping[str, int]
    why: str = ""


class Tree:
    """Files of the project in a folder, whatever its folders are called."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.product = sorted(name for folder in PRODUCT for name in self._sources(folder))
        self.tests = sorted(self._sources("tests"))

    def text(self, name: str) -> str:
        return (self._root / name).read_text(encoding="utf-8")

    def text_if_any(self, name: str) -> str:
        """Return a file's text, or none where the tree lacks the file."""
        return self.text(name) if (self._root / name).is_file() else ""

    def num_lines(self, name: str) -> int:
        return len(self.text(name).splitlines())

    def syntax(self, name: str) -> ast.Module:
        return ast.parse(self.text(name))

    def python(self, folder: str = "") -> list[str]:
        """Return the product's Python files below a folder."""
        return [name for name in self.product if name.startswith(folder) and name.endswith(".py")]

    def _sources(self, folder: str) -> Iterator[str]:
        for path in (self._root / folder).rglob("*"):
            if path.suffix in SOURCES and "_pb2" not in path.name and path.is_file():
                yield path.relative_to(self._root).as_posix()


def counted(tree: Tree) -> list[Figure]:
    """Return all figures that are counted from a tree."""
    return [
        *files_per_folder(tree.product, "product"),
        *files_per_folder(tree.tests, "test"),
        lines_to_read(tree, "plan"),
        lines_to_read(tree, "process_output", "apply_result"),
        *attributes_per_class(tree),
        writes_elsewhere(tree),
        files_that_name(tree, "repetition_penalty", "<= 8"),
        files_that_name(tree, "min_p", ""),
        measuring_lines(tree),
        docstrings_about_people(tree),
        *files_to_follow(tree),
    ]


def files_per_folder(names: list[str], kind: str) -> list[Figure]:
    """Count the Python files directly in each folder: the largest, and how many are too large."""
    sizes = Counter(name.rpartition("/")[0] for name in names if name.endswith(".py"))
    full = {folder: size for folder, size in sizes.items() if size > FULL_FOLDER}
    return [
        figure(
            f"Python files in the largest {kind} folder",
            f"<= {FULL_FOLDER}",
            max(sizes.values(), default=None),
            dict(sizes.most_common(10)),
        ),
        figure(f"{kind} folders of more than {FULL_FOLDER} Python files", "0", len(full), full),
    ]


def lines_to_read(tree: Tree, *functions: str) -> Figure:
    """
    Count the lines of the core's module that defines a function and of those it imports, be they of
    the core or of the package tandem.

    Generated modules and libraries are not counted.
    """
    homes = [name for name in tree.python(f"{CORE}/") if _defines(tree.syntax(name), functions)]
    what = f"lines of {' or '.join(functions)} and what it imports"
    if not homes:
        return Figure(name=what, aim="<= 1,500", value=None, parts={}, why="no such function")
    read = {homes[0], *_imported(tree, homes[0])}
    return _sum(what, "<= 1,500", {name: tree.num_lines(name) for name in read})


def attributes_per_class(tree: Tree) -> list[Figure]:
    """Count public fields and properties in the core: of classes with state, and of values."""
    owners, values = Counter[str](), Counter[str]()
    for name in tree.python(f"{CORE}/"):
        for node in ast.walk(tree.syntax(name)):
            if isinstance(node, ast.ClassDef):
                sizes = values if _is_frozen(node) else owners
                sizes[f"{name}:{node.name}"] = len(public_attributes(node))
    return [
        figure(what, aim, max(sizes.values(), default=None), dict(sizes.most_common(10)))
        for what, aim, sizes in (
            ("public attributes of the core's largest class", "<= 12", owners),
            ("public fields of the core's largest frozen value", "", values),
        )
    ]


def _is_frozen(node: ast.ClassDef) -> bool:
    """Return True for a dataclass whose fields never change."""
    return any("frozen=True" in ast.unparse(line) for line in node.decorator_list)


def public_attributes(node: ast.ClassDef) -> set[str]:
    """Return the dataclass fields, properties and attributes that `__init__` sets, if public."""
    found = set()
    is_dataclass = any("dataclass" in ast.unparse(line) for line in node.decorator_list)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and is_dataclass:
            if "ClassVar" not in ast.unparse(item.annotation):
                found.add(item.target.id)
        elif isinstance(item, ast.FunctionDef):
            if any("property" in ast.unparse(line) for line in item.decorator_list):
                found.add(item.name)
            if item.name == "__init__":
                found |= {
                    target.attr
                    for target in ast.walk(item)
                    if isinstance(target, ast.Attribute)
                    and isinstance(target.ctx, ast.Store)
                    and ast.unparse(target.value) == "self"
                }
    return {name for name in found if not name.startswith("_")}


def writes_elsewhere(tree: Tree) -> Figure:
    """
    Count the places in the core that change a field of a class of another module.

    The counters are left out: they are plain numbers that are counted where the thing happens. A
    field that has the name of one of the module's own is not noticed.
    """
    found = {
        f"{name}:{line} {field}": 1
        for name in tree.python(f"{CORE}/")
        for line, field in foreign_writes(tree.syntax(name))
    }
    return _sum("places in the core that write fields of other modules", "0", found)


def foreign_writes(module: ast.Module) -> list[tuple[int, str]]:
    """Return the line and the name of each field that is changed and is of no class of a module."""
    own = {"writeable"}  # of numpy's flags
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            own |= {item.target.id for item in node.body if _is_field(item)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            own |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return [
        (field.lineno, ast.unparse(field))
        for node in ast.walk(module)
        for field in _changed(node)
        if field.attr not in own
        and ast.unparse(field.value) != "self"
        and "counters" not in ast.unparse(field)
    ]


def _is_field(item: ast.stmt) -> bool:
    return isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)


def _changed(node: ast.AST) -> list[ast.Attribute]:
    """Return the field that a store, or a call of a container's method, changes; none for others."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        field: ast.AST | None = node.func.value if node.func.attr in CHANGING else None
    elif isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(
        node.ctx, ast.Store | ast.Del
    ):
        field = node
    else:
        field = None
    while isinstance(field, ast.Subscript):
        field = field.value
    return [field] if isinstance(field, ast.Attribute) else []


def files_that_name(tree: Tree, word: str, aim: str) -> Figure:
    """
    Count the product's files, generated ones aside, in which a word stands.

    Kernels write `repetition` for `repetition_penalty` and so do not count for it; `min_p` has the
    same name everywhere.
    """
    found = {name: count for name in tree.product if (count := tree.text(name).count(word))}
    return figure(f"product files that name {word}", aim, len(found), found)


def measuring_lines(tree: Tree) -> Figure:
    """Count the lines of benchmarks, simulators and test doubles in services and the client."""
    found = {name: tree.num_lines(name) for name in tree.product if MEASURING.match(name)}
    folders: Counter[str] = Counter()
    for name, lines in found.items():
        folders[name.rpartition("/")[0]] += lines
    return _sum("measuring lines in services and the client", "0", folders)


def files_to_follow(tree: Tree) -> list[Figure]:
    """
    Count the files that the pages name on a request's way: those to open in order to follow it.

    The scheduler's page has a table of steps, of which the first six end with the acceptance; the
    executor's page tells the way of a batch. What a request passes besides is traced, not counted.
    """
    steps = [
        (int(number), re.findall(r"\]\((?:\.\./)?([^)#]+\.py)\)", code))
        for number, code in re.findall(
            r"^\| (\d+)[\d, ]* \| (.*) \|$",
            tree.text_if_any("scheduler_svc/README.md"),
            re.MULTILINE,
        )
    ]
    batch = tree.text_if_any("executor_svc/README.md").partition("## The way of one batch")[2]
    named = re.findall(r"participant \w+ as ([\w/]+\.py)", batch)
    ways = {
        "until a request is accepted": {
            path for number, paths in steps if number <= 6 for path in paths
        },
        "of a decode step's round trip": {
            *(path.removeprefix("executor_svc/") for n, paths in steps if n > 6 for path in paths),
            *named,
        },
    }
    aims = ("<= 17", "<= 36")
    return [
        Figure(
            name=f"files that the pages name {what}",
            aim=aim,
            value=len(paths) if steps else None,
            parts=dict.fromkeys(sorted(paths), 1),
            why="" if steps else "no page tells it",
        )
        for (what, paths), aim in zip(ways.items(), aims, strict=True)
    ]


def docstrings_about_people(tree: Tree) -> Figure:
    """Count the docstrings that open with a pronoun for persons where a thing is meant."""
    found = {
        f"{name}:{node.lineno} {str(node.value.value).split()[0]}": 1
        for name in [*tree.product, *tree.tests]
        if name.endswith(".py")
        for node in ast.walk(tree.syntax(name))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and PEOPLE.match(node.value.value)
    }
    return _sum("docstrings that open with Who, What, Nobody and the like", "0", found)


def _defines(module: ast.Module, functions: tuple[str, ...]) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name in functions for node in module.body)


def _imported(tree: Tree, name: str) -> set[str]:
    """Return the files of core and shared package that a module imports, types included."""
    modules: set[str] = set()
    for node in ast.walk(tree.syntax(name)):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    paths = {module.replace(".", "/") for module in modules}
    paths |= {f"{SHARED}/{path}" for path in paths}
    files = {f"{path}{end}" for path in paths for end in (".py", "/__init__.py")}
    return files & {*tree.python(f"{CORE}/"), *tree.python(f"{SHARED}/")}


def _sum(name: str, aim: str, parts: Mapping[str, int]) -> Figure:
    return figure(name, aim, sum(parts.values()), parts)


def figure(name: str, aim: str, value: int | None, parts: Mapping[str, int]) -> Figure:
    """Return a figure with its parts in order."""
    ordered = dict(sorted(parts.items(), key=lambda part: (-part[1], part[0])))
    return Figure(name=name, aim=aim, value=value, parts=ordered)
