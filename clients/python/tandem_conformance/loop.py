"""Commands carried out with `AsyncClient`, as tasks of one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from tandem_client import AsyncClient, AsyncGenerationStream, Delta, TandemError
from tandem_conformance.command import Command, connection_options, deadline_s, generate_options
from tandem_conformance.outcome import Outcome, failed, kind_of, model_as_json
from tandem_conformance.threads import Say, told


class LoopCaller:
    """A caller that reads streams in tasks; the loop runs in a thread of its own."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._shared: dict[str, AsyncClient] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._left: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def begin(self, command: Command) -> None:
        """Begin a command; its result is said when it is there."""
        self._loop.call_soon_threadsafe(self._begin, command)

    def close(self) -> None:
        """End all streams that still run, and the loop."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._shared.values():
            await client.close()

    def _begin(self, command: Command) -> None:
        name = command["id"]
        if command["do"] == "cancel":
            self._left.add(command["command"])
            task = self._tasks.get(command["command"])
            if task is not None:
                task.cancel()
            self._say({"id": name, "result": {}})
            return
        self._tasks[name] = self._loop.create_task(self._carry_out(command))
        self._tasks[name].add_done_callback(lambda _: self._tasks.pop(name))

    async def _carry_out(self, command: Command) -> None:
        try:
            async with self._client(command) as client:
                result = await self._result(client, command)
        except TandemError as error:
            result = failed(error)
        self._say({"id": command["id"], "result": result})

    def _result(self, client: AsyncClient, command: Command) -> Coroutine[Any, Any, dict[str, Any]]:
        if command["do"] == "generate":
            return self._generate(client, command)
        return _batch(client, command) if command["do"] == "batch" else _ask(client, command)

    async def _generate(self, client: AsyncClient, command: Command) -> dict[str, Any]:
        options = generate_options(command["request"])
        outcome = Outcome()
        async with client.generate(deadline_s=deadline_s(command), **options) as stream:
            try:
                await self._read(stream, command, outcome)
            except TandemError as error:
                outcome.error = error
            except asyncio.CancelledError:
                if command["id"] not in self._left:
                    raise
        return outcome.as_json()

    async def _read(
        self, stream: AsyncGenerationStream, command: Command, outcome: Outcome
    ) -> None:
        async for event in stream:
            outcome.take(event)
            if command.get("tell"):
                self._say({"id": command["id"], "event": kind_of(event)})
            if outcome.num_deltas == command.get("cancel_after_deltas"):
                return
            if isinstance(event, Delta) and outcome.num_deltas == 1:
                await asyncio.sleep(command.get("pause_ms", 0) / 1000)

    @asynccontextmanager
    async def _client(self, command: Command) -> AsyncIterator[AsyncClient]:
        """Yield the connection that a command names, or one of its own until the block ends."""
        name = command.get("connection")
        if name is None:
            async with AsyncClient(**connection_options(command)) as client:
                yield client
            return
        if name not in self._shared:
            self._shared[name] = AsyncClient(**connection_options(command))
        yield self._shared[name]


async def _batch(client: AsyncClient, command: Command) -> dict[str, Any]:
    items = [generate_options(one) for one in command["items"]]
    outcomes = client.generate_many(items, concurrency=len(items), deadline_s=deadline_s(command))
    return {"items": [told(one) async for one in outcomes]}


async def _ask(client: AsyncClient, command: Command) -> dict[str, Any]:
    request, limit_s = command.get("request", {}), deadline_s(command)
    match command["do"]:
        case "complete":
            options = generate_options(request)
            try:
                return told(await client.complete(deadline_s=limit_s, **options))
            except TandemError as error:
                return told(error)
        case "tokenize":
            options = generate_options(request)
            tokens = await client.tokenize(deadline_s=limit_s, **options)
            return {"token_ids": list(tokens.token_ids)}
        case "model":
            return {
                "model": model_as_json(
                    await client.get_model(request.get("model"), deadline_s=limit_s)
                )
            }
        case _:
            await client.abort(**request, deadline_s=limit_s)
            return {}
