"""Clients in other languages: their programs of clients/conformance, each of which plays many callers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.clients.conformance.player import Command, Player
from tests.clients.conformance.programs import PROGRAMS, why_not
from tests.deploy.events.streams.callers import Access, Received
from tests.deploy.events.streams.prompts import Request

LOOK_S = 0.01
"""Seconds between looks for what a program has printed, the resolution of a pause."""
LIMIT_S = 600.0
"""Longest time of a stream."""


class ProgramMissing(Exception):
    """The program of a language is not built; the message names the command that builds it."""


class Programs:
    """One running program for each language. Owned by the harness, which calls `close`."""

    def __init__(self, languages: Sequence[str], folder: Path, address: str) -> None:
        """
        Start the programs.

        Args:
            languages: Names of the languages.
            folder: Folder for what they print for people.
            address: Host of the scheduler, for which no proxy is asked.

        Raises:
            ProgramMissing: One of them is not built.
        """
        known = {one.name: one for one in PROGRAMS if one.language is not None}
        if unknown := set(languages) - known.keys():
            raise ProgramMissing(f"no client is called {', '.join(sorted(unknown))}")
        for language in languages:
            if problem := why_not(known[language]):
                raise ProgramMissing(problem)
        self.players: dict[str, Player] = {}
        try:
            for language in languages:
                self.players[language] = Player(known[language], folder, {"no_proxy": address})
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all programs."""
        for player in self.players.values():
            player.close()


class ProgramCaller:
    """One caller of a program; over TLS each stream has a connection of its own."""

    _names = itertools.count(1)

    def __init__(self, name: str, player: Player, access: Access, *, resumes: bool) -> None:
        """
        Args:
            name: Name of the language.
            player: The program.
            access: Address and credentials.
            resumes: True for a client that resumes its streams, as by default.
        """
        self.name = name
        self._player = player
        self._access = access
        given = {"server_name": access.server_name, "token": access.token}
        self._options: dict[str, Any] = {key: one for key, one in given.items() if one is not None}
        self._options |= {"targets": [access.scheduler], "do": "generate", "tell": True}
        if not resumes:
            self._options["retry"] = "none"
        if access.files is None:
            self._options["connection"] = f"caller {next(self._names)}"

    def stream(self, request: Request, heard: Callable[[], None]) -> Received:
        """Read a stream to its end, and call `heard` for each message with tokens."""
        try:
            options = self._options | self._access.paths()
            command = self._player.begin(request=request.message(), **options)
        except AssertionError as error:
            return Received(error=str(error))
        if not self._follow(command, heard):
            return Received(error=f"the program ended, or was silent: {self._player.errors()}")
        result = command.result()
        received = Received(request_id=result.get("started", {}).get("request_id"))
        for choice in result.get("choices", ()):
            received.token_ids += choice["token_ids"]
        if error := result.get("error"):
            received.error = f"{error.get('code')}: {error['message']}"
            received.code = error.get("code", "")
        return received

    def _follow(self, command: Command, heard: Callable[[], None]) -> bool:
        """Tell of messages as they come; return whether there is a result."""
        until = time.monotonic() + LIMIT_S
        num_heard = 0
        while not command.is_done:
            if self._player.has_ended or time.monotonic() > until:
                return False
            num_deltas = command.events.count("delta")
            if num_deltas > num_heard:
                num_heard = num_deltas
                heard()
            time.sleep(LOOK_S)
        return True

    def close(self) -> None:
        """Leave the connection to the program, which closes it with all others."""
