"""Commands carried out with `Client`, each in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tandem_client import Client, Delta, GenerationStream, TandemError
from tandem_conformance.command import Command, connection_options, deadline_s, generate_options
from tandem_conformance.outcome import Outcome, failed, kind_of, model_as_json

Say = Callable[[dict[str, Any]], None]
"""Function that prints one line."""


class ThreadCaller:
    """A caller that reads streams in threads."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._shared: dict[str, Client] = {}
        self._streams: dict[str, GenerationStream] = {}
        self._left: set[str] = set()

    def begin(self, command: Command) -> None:
        """Begin a command; its result is said when it is there."""
        if command["do"] == "cancel":
            self._leave(command)
        else:
            threading.Thread(target=self._carry_out, args=(command,), daemon=True).start()

    def close(self) -> None:
        """End all streams that still run."""
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.close()

    def _carry_out(self, command: Command) -> None:
        carry_out = {"generate": self._generate, "batch": self._batch}.get(command["do"], self._ask)
        try:
            with self._client(command) as client:
                result = carry_out(client, command)
        except TandemError as error:
            result = failed(error)
        self._say({"id": command["id"], "result": result})

    def _leave(self, command: Command) -> None:
        with self._lock:
            self._left.add(command["command"])
            stream = self._streams.get(command["command"])
        if stream is not None:
            stream.close()
        self._say({"id": command["id"], "result": {}})

    def _generate(self, client: Client, command: Command) -> dict[str, Any]:
        options = generate_options(command["request"])
        outcome = Outcome()
        with client.generate(deadline_s=deadline_s(command), **options) as stream:
            with self._lock:
                self._streams[command["id"]] = stream
            try:
                self._read(stream, command, outcome)
            except TandemError as error:
                outcome.error = error
            finally:
                with self._lock:
                    del self._streams[command["id"]]
        return outcome.as_json()

    def _read(self, stream: GenerationStream, command: Command, outcome: Outcome) -> None:
        if command["id"] in self._left:
            return
        for event in stream:
            outcome.take(event)
            if command.get("tell"):
                self._say({"id": command["id"], "event": kind_of(event)})
            if outcome.num_deltas == command.get("cancel_after_deltas"):
                return
            if isinstance(event, Delta) and outcome.num_deltas == 1:
                time.sleep(command.get("pause_ms", 0) / 1000)

    def _batch(self, client: Client, command: Command) -> dict[str, Any]:
        items = [generate_options(one) for one in command["items"]]
        outcomes = client.generate_many(
            items, concurrency=len(items), deadline_s=deadline_s(command)
        )
        return {"items": [told(one) for one in outcomes]}

    def _ask(self, client: Client, command: Command) -> dict[str, Any]:
        request, limit_s = command.get("request", {}), deadline_s(command)
        match command["do"]:
            case "complete":
                options = generate_options(request)
                try:
                    return told(client.complete(deadline_s=limit_s, **options))
                except TandemError as error:
                    return told(error)
            case "tokenize":
                options = generate_options(request)
                tokens = client.tokenize(deadline_s=limit_s, **options)
                return {"token_ids": list(tokens.token_ids)}
            case "model":
                return {
                    "model": model_as_json(
                        client.get_model(request.get("model"), deadline_s=limit_s)
                    )
                }
            case _:
                client.abort(**request, deadline_s=limit_s)
                return {}

    @contextmanager
    def _client(self, command: Command) -> Iterator[Client]:
        """Yield the connection that a command names, or one of its own until the block ends."""
        name = command.get("connection")
        if name is None:
            with Client(**connection_options(command)) as client:
                yield client
            return
        with self._lock:
            if name not in self._shared:
                self._shared[name] = Client(**connection_options(command))
        yield self._shared[name]


def told(one: Any) -> dict[str, Any]:
    """Return what a whole completion, or the error in its place, says."""
    outcome = Outcome()
    if isinstance(one, TandemError):
        outcome.error = one
    else:
        outcome.take_whole(one)
    return outcome.as_json()
