"""Random histories of a core, fixed by their seeds: cheaper than hypothesis, but not shrunk."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.scheduler_svc.core.properties.core_world import (
    COMING_AND_GOING,
    EVERYTHING,
    CoreWorld,
    draw_options,
)


def walk(
    seed: int, num_events: int, *, num_stages: int = 1, room: int = 1, events=EVERYTHING, **options
) -> CoreWorld:
    """
    Make a history of so many events and what follows from it, under drawn options but for those
    given; return the world at its end.
    """
    generator = random.Random(seed)
    drawn = draw_options(generator.choice)
    chosen = replace(drawn, **options)
    world = CoreWorld(generator.choice, chosen, num_stages=num_stages, room=room)
    for name in generator.choices(list(events), list(events.values()), k=num_events):
        getattr(world, name)(generator.choice)
    world.finish()
    return world


def walk_all(seeds, num_events: int, **options) -> None:
    """Make one history per seed."""
    for seed in seeds:
        walk(seed, num_events, **options)


def walk_full_lanes(seeds, num_events: int, *, num_stages: int, **options) -> None:
    """Make one history per seed in which all lanes have several decodes, which come and go."""
    for seed in seeds:
        own = {"num_stages": num_stages, "room": num_stages, "events": COMING_AND_GOING}
        walk(seed, num_events, **own, **options)
