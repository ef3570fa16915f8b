"""Callers of all clients, which take turns among the streams of a load."""

from __future__ import annotations

from tests.deploy.events.streams.callers import (
    HTTP,
    PYTHON,
    Access,
    Caller,
    HttpCaller,
    PythonCaller,
)
from tests.deploy.events.streams.programs import ProgramCaller, Programs


def callers_of_all(
    access: Access, programs: Programs, num_streams: int, *, resumes: bool, fails_over: bool = False
) -> list[Caller]:
    """
    Return one caller for each stream: of Python, of each program, and over HTTP in turn.

    Args:
        access: Addresses and credentials; at least one gateway is among them.
        programs: Programs of clients in other languages.
        num_streams: Number of callers.
        resumes: True for clients that resume their streams, as by default; False for such that do
            not, so that each stream must run to its end by itself. The gateway resumes always.
        fails_over: True for clients over HTTP that ask another gateway where theirs accepts nothing.
    """
    names = (PYTHON, *programs.players, HTTP)
    callers: list[Caller] = []
    for number in range(num_streams):
        name, turn = names[number % len(names)], number // len(names)
        if name == PYTHON:
            callers.append(PythonCaller(access, resumes=resumes))
        elif name == HTTP:
            first = turn % len(access.gateways)
            in_turn = access.gateways[first:] + access.gateways[:first]
            callers.append(HttpCaller(access, in_turn if fails_over else in_turn[:1]))
        else:
            callers.append(ProgramCaller(name, programs.players[name], access, resumes=resumes))
    return callers
