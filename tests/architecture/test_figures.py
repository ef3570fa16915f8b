"""Each figure of the code's structure counts what it says."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.counting import Figure, Tree, counted, foreign_writes, writes_elsewhere
from tests.architecture.figures import ROOT, line, traced
from tests.architecture.traced_request import summary

STATE = '''
@dataclass(slots=True)
class State:
    """Whose values change."""
    limit: int
    _hidden: int
    kinds: ClassVar[int] = 3

    @property
    def room(self): return 1

@dataclass(frozen=True)
class Option:
    first: int
    second: int
    third: int

class Table:
    size: int
    def __init__(self):
        self.rows, self.columns = 1, 2
        self._free: int = 3
        other.field = 4
    def grow(self):
        self.later = 1
'''
FILES = {
    "scheduler_svc/core/state.py": STATE,
    "scheduler_svc/core/__init__.py": "",
    "scheduler_svc/core/draft.py": "import scheduler_svc.core.state\n",
    "scheduler_svc/core/plans.py": (
        "import numpy\n"
        "from scheduler_svc.core import draft\n"
        "from tandem.errors import BadRequest\n"
        "from tandem import request_pb2\n"
        "def plan(): ...\n"
    ),
    "scheduler_svc/bench/deep/run.py": "a = 1\nb = 2\n",
    "executor_svc/fixed_step/model.py": "a = 1\n",
    "executor_svc/benchmark.py": "repetition_penalty = repetition_penalty + 1\n",
    "clients/python/tandem_client/cli/bench_child.py": "a = 1\n",
    "clients/bench/tandem_bench/run.py": "a = 1\n",
    "kernels/penalties.cpp": "// repetition_penalty\n",
    "kernels/README.md": "repetition_penalty\n",
    "scheduler_svc/README.md": (
        "| step | code |\n| 1 | [a](a.py), [b](core/b.py) |\n| 5, 6 | [a](a.py): `f` |\n"
        "| 7 | [c](c.py) |\n| 9 | [d](../executor_svc/step/d.py) |\n"
    ),
    "executor_svc/README.md": (
        "participant X as other.py\n## The way of one batch\n"
        "participant D as step/d.py\nparticipant E as e.py\n"
    ),
    "protos/python/tandem/request_pb2.py": "repetition_penalty = 1\n",
    "protos/python/tandem/errors.py": '"""Whole numbers."""\n\n\ndef f():\n    """\n    Nobody is asked.\n    """\n',
} | {f"tests/many/test_{number}.py": "repetition_penalty = 1\n" for number in range(16)}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def figures(tree):
    return {figure.name: figure for figure in counted(Tree(tree))}


class TestCounts:
    def test_files_per_folder_are_python_files_directly_in_it(self, figures):
        """
        Product and tests are counted apart, and a folder of more than 15 Python files is named.
        """
        assert 4 == figures["Python files in the largest product folder"].value
        assert {} == figures["product folders of more than 15 Python files"].parts
        assert {"tests/many": 16} == figures["test folders of more than 15 Python files"].parts

    def test_lines_to_read_are_those_of_the_module_and_its_direct_imports(self, figures):
        """
        Modules of the core and of the shared package count; libraries, generated modules and
        modules that are imported further down do not.
        """
        core = {"plans": 5, "draft": 1, "__init__": 0}
        assert {f"scheduler_svc/core/{name}.py": lines for name, lines in core.items()} | {
            "protos/python/tandem/errors.py": 7
        } == figures["lines of plan and what it imports"].parts

    def test_files_to_follow_are_those_that_the_pages_name(self, figures):
        """
        Each file that a step of the way names counts once, whichever page names it.
        """
        way = "files that the pages name "
        assert ["a.py", "core/b.py"] == list(figures[f"{way}until a request is accepted"].parts)
        trip = figures[f"{way}of a decode step's round trip"]
        assert ["c.py", "e.py", "step/d.py"] == list(trip.parts)

    def test_attributes_are_public_fields_properties_and_what_init_sets(self, figures):
        """
        Private names, class variables, other objects and what other methods set are left out;
        frozen values are counted apart.
        """
        figure = figures["public attributes of the core's largest class"]
        sizes = {name.rpartition(":")[2]: size for name, size in figure.parts.items()}
        assert (2, {"State": 2, "Table": 2}) == (figure.value, sizes)
        assert 3 == figures["public fields of the core's largest frozen value"].value

    def test_writes_elsewhere_are_stores_and_changed_containers(self, figures):
        """
        Fields of the module's own classes and counters may be written, those of other modules not,
        be it by a store, a deletion or a method that changes a container.
        """
        figure = figures["places in the core that write fields of other modules"]
        assert ["scheduler_svc/core/state.py:23 other.field"] == list(figure.parts)
        text = (
            "class Own:\n"
            "    size: int\n"
            "    def fill(self, other):\n"
            "        self.rows[0] = other.size = other.counters.steps = 1\n"
            "        other.seats[0], other.name = 1, 2\n"
            "        other.seats.append(3)\n"
            "        del other.row\n"
            "        other.rows.append(other.take(4))\n"
            "        return other.legs.count(5)\n"
        )
        assert [
            (5, "other.name"),
            (5, "other.seats"),
            (6, "other.seats"),
            (7, "other.row"),
            (8, "other.rows"),
        ] == (sorted(foreign_writes(ast.parse(text))))

    def test_no_module_of_the_core_writes_fields_of_another(self):
        """
        Each part of the core's state has an owner, and other modules call its methods.
        """
        assert {} == writes_elsewhere(Tree(ROOT)).parts

    def test_files_that_name_a_parameter_are_sources_of_the_product(self, figures):
        """
        Generated files, tests and documents are left out, and a file counts once.
        """
        figure = figures["product files that name repetition_penalty"]
        assert (2, {"executor_svc/benchmark.py": 2, "kernels/penalties.cpp": 1}) == (
            figure.value,
            figure.parts,
        )

    def test_measuring_lines_are_those_of_services_and_client(self, figures):
        """
        The packages of the benchmarks may measure, services and the client may not.
        """
        figure = figures["measuring lines in services and the client"]
        assert 4 == figure.value
        assert {
            "scheduler_svc/bench/deep": 2,
            "executor_svc/fixed_step": 1,
            "clients/python/tandem_client/cli": 1,
        } == figure.parts

    def test_docstrings_are_found_by_their_whole_first_word(self, figures):
        """
        A docstring that opens with a word that asks is counted, one that opens with Whole is not.
        """
        figure = figures["docstrings that open with Who, What, Nobody and the like"]
        assert [
            "protos/python/tandem/errors.py:5 Nobody",
            "scheduler_svc/core/state.py:4 Whose",
        ] == list(figure.parts)

    def test_tree_without_a_core_has_no_value(self, tmp_path):
        """
        A figure that a tree lacks is a dash in the output, with the reason.
        """
        figures = {figure.name: figure for figure in counted(Tree(tmp_path))}
        assert "lines of plan and what it imports: - [<= 1,500]  (no such function)" == line(
            figures["lines of plan and what it imports"]
        )
        assert [None, None] == [figure.value for figure in traced(tmp_path, wanted=True)]


class TestTrace:
    def test_request_is_accepted_until_its_step_is_planned(self, tmp_path):
        """
        Of the scheduler's files those entered before the plan count, and while the request decodes
        those of both services.
        """

        def record(role: str, planned: dict, *files: tuple[int, str, float]) -> dict:
            entered = [[number, str(tmp_path / name), at] for number, name, at in files]
            return {"role": role, "planned": planned, "files": [*entered, [2, "/lib/a.py", 3.0]]}

        records = [
            record("scheduler_svc", {"1": 5.0}, (1, "in.py", 4.0), (1, "plan.py", 5.0), (2, "plan.py", 9.0)),
            record("executor_svc", {}, (1, "idle.py", 4.0), (2, "step.py", 9.0)),
        ]  # fmt: skip
        assert {"accepted": ["in.py"], "decoded": ["plan.py", "step.py"]} == summary(
            records, tmp_path
        )

    def test_tracer_records_files_entered_and_plans_that_hold_something(self, tmp_path):
        """
        Files are recorded in the open window, on all threads, and modules are not calls.
        """
        (tmp_path / "window").write_bytes(b"\1")
        shutil.copy(Path(__file__).with_name("tracer.py"), tmp_path / "sitecustomize.py")
        (tmp_path / "idle.py").write_text("value = 1\n")
        (tmp_path / "work.py").write_text("def plan(batch): return batch\n")
        program = (
            "import idle, pathlib, threading, time, work\n"
            "thread = threading.Thread(target=work.plan, args=[7]); thread.start(); thread.join()\n"
            "open('window', 'r+b').write(bytes([255]))\n"
            "while not list(pathlib.Path().glob('*.json')): time.sleep(0.01)\n"
        )
        trace = {"PYTHONPATH": str(tmp_path), "TRACE_FOLDER": str(tmp_path), "TRACE_ROLE": "both"}
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=os.environ | trace,
            check=True,
            timeout=60,
        )
        (path,) = tmp_path.glob("*.json")
        record = json.loads(path.read_text())
        files = {Path(name).name: number for number, name, _ in record["files"]}
        assert ("both", ["1"], 1) == (record["role"], list(record["planned"]), files["work.py"])
        assert "idle.py" not in files


def test_line_shows_value_aim_and_largest_parts():
    """
    A figure is one line: the value with its aim in brackets, then the five largest parts.
    """
    parts = dict.fromkeys("abcdef", 1000)
    figure = Figure(name="lines", aim="<= 8", value=6000, parts=parts)
    assert "lines: 6,000 [<= 8]  (a 1,000, b 1,000, c 1,000, d 1,000, e 1,000)" == line(figure)
