"""Engines that are compared, each loaded in a process of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from tandem.installation import install_command
from tandem_bench.offline.workload import Contestant, Task

OURS = "tandem"
FLOOR = "linear-floor"

_PACKAGE = "tandem_bench.offline.engines"


@dataclass(frozen=True, slots=True)
class Entry:
    """
    One engine of the comparison.

    Attributes:
        module: Name of the module in this package; it has `load(task)`.
        needs: Modules that it imports and that may not be installed.
        install: Command that installs them.
    """

    module: str
    needs: tuple[str, ...] = ()
    install: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of needed modules that are not installed."""
        return tuple(name for name in self.needs if find_spec(name) is None)

    def load(self, task: Task) -> Contestant:
        """Import the engine and load the task's model."""
        module = importlib.import_module(f"{_PACKAGE}.{self.module}")
        load: Callable[[Task], Contestant] = module.load
        return load(task)


ENGINES: dict[str, Entry] = {
    OURS: Entry("embedded"),
    "transformers": Entry("transformers_batch", ("transformers",), "pip install transformers"),
    "transformers-generate": Entry(
        "transformers_generate", ("transformers",), "pip install transformers"
    ),
    "llama.cpp": Entry("llama", ("llama_cpp", "gguf"), install_command("bench")),
    FLOOR: Entry("linear_floor"),
}
"""Engines by their names in results, in the order in which a round runs them."""
