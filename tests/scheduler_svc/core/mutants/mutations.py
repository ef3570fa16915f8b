"""Small wrong changes of a Python source, one at a time."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//",
    ast.BitOr: "&", ast.BitAnd: "|",
}  # fmt: skip
_TWINS = {"min": "max", "max": "min", "any": "all", "all": "any", "appendleft": "append"}
_DROPPED = (ast.Expr, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Mutant:
    """
    One wrong change.

    Attributes:
        path: The file, relative to the repository.
        function: Qualified name of the function or class it is in; empty at module level.
        line: Its line, counted from 1.
        start: Offset of the first changed character.
        end: Offset past the last one.
        was: The text there.
        becomes: The text instead.
        occurrence: Its number among equal changes in that function, counted from 0.
    """

    path: str
    function: str
    line: int
    start: int
    end: int
    was: str
    becomes: str
    occurrence: int = 0

    @property
    def key(self) -> str:
        """Return the name of the change, which stays the same when its line moves."""
        text = "\0".join([self.path, self.function, self.was, self.becomes, str(self.occurrence)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def apply(self, source: str) -> str:
        """Return the source with this change."""
        return source[: self.start] + self.becomes + source[self.end :]


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return every mutant of a source that still compiles, in order of place."""
    seen: dict[tuple[str, str, str], int] = {}
    found = []
    for function, node in _nodes(ast.parse(source), ""):
        for start, end, becomes in _changes(_Text(source), node):
            was = source[start:end]
            kind = function, was, becomes
            seen[kind] = seen.get(kind, -1) + 1
            line = source.count("\n", 0, start) + 1
            mutant = Mutant(path, function, line, start, end, was, becomes, seen[kind])
            if _compiles(mutant.apply(source)):
                found.append(mutant)
    return sorted(found, key=lambda mutant: (mutant.start, mutant.becomes))


class _Text:
    """A source and the places of its nodes; offsets count characters."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end]


def _nodes(tree: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node that does something, with its function: no docstring, type or message."""
    for field, value in ast.iter_fields(tree):
        if field in {"annotation", "returns", "decorator_list", "type_params", "bases"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _says_nothing(child):
                continue
            inner = name
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
            yield inner, child
            yield from _nodes(child, inner)


def _says_nothing(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        return isinstance(target, ast.Name) and target.id in {"__slots__", "message"}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in {"TypeVar", "InternalError", "SessionLost"}
    return isinstance(node, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom)


def _changes(text: _Text, node: ast.AST) -> Iterator[tuple[int, int, str]]:
    if isinstance(node, ast.stmt):
        yield from _statement_changes(text, node)
    elif isinstance(node, ast.expr):
        start, end = text.span(node)
        yield from ((start, end, becomes) for becomes in _operator_changes(text, node))
        if isinstance(node, ast.Call):
            yield from _call_changes(text, node, start, end)


def _statement_changes(text: _Text, node: ast.stmt) -> Iterator[tuple[int, int, str]]:
    start, end = text.span(node)
    if isinstance(node, ast.If | ast.While):
        yield *text.span(node.test), f"not ({text.of(node.test)})"
    changes_object = isinstance(node, ast.Assign) and isinstance(
        node.targets[0], ast.Attribute | ast.Subscript
    )
    if isinstance(node, _DROPPED) or changes_object:
        yield start, end, "pass"
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        operator = _ARITHMETIC[type(node.op)]
        yield start, end, f"{text.of(node.target)} {operator}= {text.of(node.value)}"


def _operator_changes(text: _Text, node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = _COMPARE[type(node.ops[0])]
        yield f"{text.of(node.left)} {operator} {text.of(node.comparators[0])}"
    elif isinstance(node, ast.BoolOp):
        operator = " or " if isinstance(node.op, ast.And) else " and "
        yield operator.join(f"({text.of(value)})" for value in node.values)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        operator = _ARITHMETIC[type(node.op)]
        yield f"({text.of(node.left)}) {operator} ({text.of(node.right)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert | ast.USub):
        yield f"({text.of(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value + 1)


def _call_changes(
    text: _Text, node: ast.Call, start: int, end: int
) -> Iterator[tuple[int, int, str]]:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if name in _TWINS:
        _, last = text.span(node.func)
        yield last - len(name), last, _TWINS[name]
    if (
        name not in {"min", "max", "minimum", "maximum"}
        and len(node.args) > 1
        and not any(isinstance(arg, ast.Starred) for arg in node.args[:2])
    ):
        (a, b), (c, d) = text.span(node.args[0]), text.span(node.args[1])
        if text.source[a:b] != text.source[c:d]:
            swapped = text.source[c:d] + text.source[b:c] + text.source[a:b]
            yield start, end, text.source[start:a] + swapped + text.source[d:end]


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True
