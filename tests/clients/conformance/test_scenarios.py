"""Scenarios of clients/conformance with real services: all clients play each at the same time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from tests.clients.conformance.player import Command, Player
from tests.clients.conformance.scenarios import (
    SCENARIOS,
    Json,
    check,
    filled_in,
    needs_unbroken,
    num_sequences,
    undisturbed,
)
from tests.clients.conformance.services import Services, filled, start

pytestmark = pytest.mark.slow

NUM_STEPS = 40
"""Steps that suffice for a first delta of every stream, and end none of those that are held."""

RESULT_OF = {"commands": "result", "asked": "asked_result", "later": "later_result"}
"""Key of the wanted results of each part."""

Begun = dict[str, list[Command]]
"""Commands of each program."""


@pytest.fixture(scope="module")
def services_of(tmp_path_factory):
    """Yield a function that returns the services of a kind, which start when they are first asked for."""
    folder = tmp_path_factory.mktemp("services")
    started: dict[str, Services] = {}

    def services(kind: str) -> Services:
        if kind not in started:
            started[kind] = start(kind, folder / kind)
        started[kind].mend()
        return started[kind]

    yield services
    for one in started.values():
        one.close()


class Play:
    """One scenario, played by all programs."""

    def __init__(self, scenario: Json, services: Services, players: dict[str, Player]) -> None:
        self._scenario = scenario
        self._services = services
        self._python = players["python"]
        left_out = scenario.get("without", [])
        self._players = {name: one for name, one in players.items() if name not in left_out}
        self._results: dict[str, dict[str, list[Json]]] = {}
        self._names = {
            name: {**services.names, "$id": f"{name} {scenario['name']}"} for name in self._players
        }

    @property
    def names(self) -> list[str]:
        """Names of the programs that play it."""
        return list(self._players)

    def play(self, part: str) -> None:
        """Let all programs carry out a part of the scenario, and keep the results."""
        self.keep(part, self.begin(part))

    def keep(self, part: str, begun: Begun) -> None:
        """Wait for all results of a part, and keep them."""
        self._results[part] = results_of(begun)

    def begin(self, part: str) -> Begun:
        """Let all programs begin the commands of a part of the scenario."""
        return {
            name: [
                player.begin(targets=self._services.targets, **filled_in(one, self._names[name]))
                for one in self._scenario[part]
            ]
            for name, player in self._players.items()
        }

    def disturb(self, begun: Begun) -> None:
        """Do what the scenario does when all callers have what it waits for."""
        scenario, services = self._scenario, self._services
        if scenario["services"] != "full":
            services.wait_for_requests(
                len(self._players) * sum(map(num_sequences, scenario["commands"]))
            )
        if "hold" in scenario:
            services.allow(scenario["hold"])
        for commands in begun.values():
            for one in commands:
                one.wait_for(scenario["when"])
        match scenario["then"]:
            case "cancel":
                self._cancel(begun)
            case "wait":
                time.sleep(scenario["wait_s"])
            case "ask":
                self.play("asked")
            case strike:
                services.strike(strike)

    def wrong(self) -> dict[str, str]:
        """Compare all results with those of the scenario; returns what is wrong, by program."""
        wrong = {}
        for part, results in self._results.items():
            wanted = self._scenario[RESULT_OF[part]]
            for name, found in results.items():
                names = self._names[name]
                try:
                    check(
                        filled_in(wanted, names), found, self._unbroken(part, wanted, names), part
                    )
                except AssertionError as error:
                    wrong[name] = f"{error}; of {found}"
        return wrong

    def _unbroken(self, part: str, wanted: list[Json], names: Json) -> list[Json | None]:
        """Return what the Python client gets when nothing disturbs it, where that is wanted."""
        targets = self._services.lasting_targets
        return [
            self._python.ask(targets=targets, **undisturbed(filled_in(command, names)))
            if needs_unbroken(result)
            else None
            for command, result in zip(self._scenario[part], wanted, strict=True)
        ]

    def _cancel(self, begun: Begun) -> None:
        for name, commands in begun.items():
            for one in commands:
                self._players[name].ask(do="cancel", command=one.name)
        results_of(begun)
        self._services.wait_for_requests(int(self._scenario["services"] == "full"))


def results_of(begun: Begun) -> dict[str, list[Json]]:
    """Wait for all results."""
    return {name: [one.result() for one in commands] for name, commands in begun.items()}


@contextlib.contextmanager
def holding(scenario: Json, services: Services) -> Iterator[None]:
    """Hold the executors during the block if the scenario asks for it."""
    with contextlib.ExitStack() as stack:
        if scenario["services"] == "full":
            stack.enter_context(filled(services))
        elif "hold" in scenario:
            stack.enter_context(services.held())
        yield


class TestScenarios:
    @pytest.mark.parametrize("scenario", SCENARIOS, ids=[one["name"] for one in SCENARIOS])
    def test_scenario_is_as_promised(self, scenario, players, services_of, record):
        """
        Each client gives its caller the result of the scenario.
        """
        services = services_of(scenario["services"])
        play = Play(scenario, services, players)
        with holding(scenario, services):
            begun = play.begin("commands")
            if "then" in scenario:
                play.disturb(begun)
            elif scenario.get("idle"):  # the request must be gone while its executor is held
                results_of(begun)
                services.wait_idle()
        play.keep("commands", begun)
        if "later" in scenario:
            play.play("later")
        services.mend()
        wrong = play.wrong()
        for name in play.names:
            record.note(name, scenario["name"], passed=name not in wrong)
        assert {} == wrong
