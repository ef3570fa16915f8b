"""Random histories of a core, fixed by their seeds: cheaper than hypothesis, but not shrunk."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.scheduler_svc.core.properties.core_world import EVERYTHING, CoreWorld, draw_options


def walk(seed: int, num_events: int, *, num_stages: int = 1, **options) -> CoreWorld:
    """
    Make a history of so many events and what follows from it, under drawn options but for those
    given; return the world at its end.
    """
    generator = random.Random(seed)
    drawn = draw_options(generator.choice)
    world = CoreWorld(generator.choice, replace(drawn, **options), num_stages=num_stages)
    names, weights = list(EVERYTHING), list(EVERYTHING.values())
    for name in generator.choices(names, weights, k=num_events):
        getattr(world, name)(generator.choice)
    world.finish()
    return world


def walk_all(seeds, num_events: int, **options) -> None:
    """Make one history per seed."""
    for seed in seeds:
        walk(seed, num_events, **options)
