"""Long dense histories of the link's world from a seed; faults are rare, so that work piles up."""

from __future__ import annotations

import random

from tandem.link.commands import KvMode
from tests.link.model.link_machine import DISASTERS, EVENTS, REPEATS, LinkMachine

WEIGHTS = {
    "traffic": 40,
    "pump": 4,
    "submit": 8,
    "fork": 10,
    "preempt": 6,
    "abort": 1,
    "cut": 4,
    "connect": 3,
    "wait": 3,
    "suspend_or_resume": 3,
    "disaster": 3,
}


def walk(machine: LinkMachine, seed: int, num_rules: int) -> None:
    """Apply rules in a random order, then let everything settle."""
    draw = random.Random(seed)
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    machine.begin(prompts=[_prompt(draw) for _ in range(3)], rounds=draw.randrange(4))
    for _ in range(num_rules):
        name = draw.choices(names, weights)[0]
        getattr(machine, name)(**_arguments(name, draw))
        machine.holds()
    machine.teardown()


def _prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(4) for _ in range(draw.randint(1, 6))]


def _arguments(name: str, draw: random.Random) -> dict[str, object]:
    which = draw.randrange(8)
    who = draw.choices([0, 1, 2], [80, 10, 10])[0]
    kinds = EVENTS + REPEATS
    events = [(draw.choice(kinds), draw.randrange(8)) for _ in range(draw.randint(2, 16))]
    by_name: dict[str, dict[str, object]] = {
        "traffic": {"who": who, "events": events, "which": draw.choice([0, 0, which])},
        "pump": {"who": who, "chunk": draw.randint(1, 5), "rounds": draw.randint(1, 3)},
        "submit": {"who": who, "prompt": _prompt(draw), "max_outputs": draw.randint(2, 10)},
        "fork": {"who": who, "which": which, "tail": _prompt(draw)[:2], "chunk": 2},
        "preempt": {"who": who, "which": which},
        "abort": {"who": who, "which": which},
        "cut": {
            "who": who,
            "executor_notices": draw.random() < 0.5,
            "scheduler_notices": draw.random() < 0.5,
        },
        "connect": {"who": who, "which": which, "detach": draw.random() < 0.5},
        "wait": {"seconds": draw.choice([0.2, 1.0, 4.0, 11.0]), "beat": draw.random() < 0.5},
        "suspend_or_resume": {"who": who, "mode": draw.choice(list(KvMode))},
        "disaster": {"what": draw.choice(DISASTERS), "who": who},
    }
    return by_name[name]
