"""Programs of all clients, which tests share since starting some takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.clients.conformance.player import Player
from tests.clients.conformance.programs import PROGRAMS, Program, why_not
from tests.clients.conformance.table import Record


@pytest.fixture(scope="session")
def players(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Player]]:
    """
    Yield the programs that can run here, by name; with CI set all of them can.

    At the end each must exit with 0.
    """
    folder = tmp_path_factory.mktemp("programs")
    players = {one.name: Player(one, folder) for one in PROGRAMS if can_run(one)}
    yield players
    assert dict.fromkeys(players, 0) == {name: one.close() for name, one in players.items()}


def can_run(program: Program) -> bool:
    """Return if a program is built; where CI is set one that is not is a failure."""
    why = why_not(program)
    if why and os.environ.get("CI"):
        pytest.fail(f"{program.name}: {why}")
    return not why


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Record:
    """Return what notes, if `--conformance-results` asks, how each program did."""
    return Record(request.config.getoption("conformance_results"))
