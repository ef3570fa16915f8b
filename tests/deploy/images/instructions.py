"""Instructions of a Containerfile, without comments and with continued lines joined."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from deploy.images.build import HERE, IMAGES

CONTAINERFILES = {image: HERE / f"Containerfile.{image}" for image in IMAGES}


@dataclass(frozen=True, slots=True)
class Instruction:
    """
    One instruction.

    Attributes:
        name: Its name in capitals.
        text: The rest of it.
        stage: Number of the stage it stands in, from 0; -1 before the first.
    """

    name: str
    text: str
    stage: int


def instructions(path: Path) -> list[Instruction]:
    """Return the instructions of a file in their order."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    found: list[Instruction] = []
    stage = -1
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, text = line.partition(" ")
        if not name:
            continue
        stage += name == "FROM"
        found.append(Instruction(name, text.strip(), stage))
    return found


def last_stage(image: str, name: str) -> list[str]:
    """Return the texts of an image's instructions of one name in the last stage."""
    every = instructions(CONTAINERFILES[image])
    return [one.text for one in every if one.name == name and one.stage == every[-1].stage]


def variables(image: str) -> dict[str, str]:
    """Return the environment that an image sets."""
    pairs = " ".join(last_stage(image, "ENV")).split()
    return dict(pair.split("=", 1) for pair in pairs)
