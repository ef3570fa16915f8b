"""Programs of all clients, which tests share since starting some takes seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.clients.conformance.player import Player
from tests.clients.conformance.programs import PROGRAMS, why_not
from tests.clients.conformance.table import Record
from tests.programs import is_missing


@pytest.fixture(scope="session")
def players(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Player]]:
    """
    Yield the programs that can run here, by name; with CI set all of them can.

    At the end each must exit with 0.
    """
    folder = tmp_path_factory.mktemp("programs")
    absent = {one.name: why for one in PROGRAMS if (why := why_not(one))}
    if absent and os.environ.get("CI"):
        pytest.fail("; ".join(absent.values()))
    players = {one.name: Player(one, folder) for one in PROGRAMS if one.name not in absent}
    yield players
    assert dict.fromkeys(players, 0) == {name: one.close() for name, one in players.items()}


@pytest.fixture(params=PROGRAMS, ids=[one.name for one in PROGRAMS])
def player(request: pytest.FixtureRequest, players: dict[str, Player]) -> Player:
    """Return the program of one client."""
    if why := why_not(request.param):
        is_missing(why)
    return players[request.param.name]


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Record:
    """Return what notes, if `--conformance-results` asks, how each program did."""
    return Record(request.config.getoption("conformance_results"))
