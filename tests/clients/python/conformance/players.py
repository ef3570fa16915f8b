"""Clients that play the caller's part of a case, and the result that each of them got."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from tandem.errors import TandemError
from tandem.inference.v1 import inference_service_pb2 as inference
from tandem.inference.v1 import inference_service_pb2_grpc as inference_grpc
from tandem_client import (
    AsyncClient,
    Client,
    Completion,
    Delta,
    Done,
    Event,
    Finished,
    RetryPolicy,
)

SOON = RetryPolicy(max_attempts=9, initial_delay_s=0.001, max_delay_s=0.001)
PROTOS_README = Path(__file__).resolve().parents[4] / "protos/README.md"

Case = dict[str, Any]


@dataclass
class Outcome:
    """Result that a caller got, in the form of the `result` of a case."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    output_tokens: int | None = None
    error: TandemError | None = None
    num_deltas: int = 0

    def take(self, event: Event) -> None:
        """Add an event of a stream."""
        match event:
            case Delta():
                choice = self._choice(event.choice)
                choice["token_ids"] += event.token_ids
                choice["text"] += event.text
                self.num_deltas += 1
            case Finished():
                self._choice(event.choice).update(
                    reason=event.reason.name, **matched(event.matched)
                )
            case Done():
                self.output_tokens = event.usage.output_tokens

    def take_whole(self, completion: Completion) -> None:
        """Add all of a completion."""
        for one in completion.choices:
            self.choices[one.choice] = {
                "choice": one.choice,
                "token_ids": list(one.token_ids),
                "text": one.text,
                "reason": one.reason.name,
                **matched(one.matched),
            }
        self.output_tokens = completion.usage.output_tokens

    def _choice(self, number: int) -> dict[str, Any]:
        empty = {"choice": number, "token_ids": [], "text": "", "reason": None}
        return self.choices.setdefault(number, empty)


def matched(value: str | int | None) -> dict[str, str | int]:
    """Return the stop string or token id of an end under its name in the contract."""
    if value is None:
        return {}
    return {"stop_string" if isinstance(value, str) else "token_id": value}


def options_of(case: Case) -> dict[str, Any]:
    """Return the case's request as arguments of the client's methods."""
    request = dict(case["request"])
    options = {"prompt": request.pop("text", None)}
    if "token_ids" in request:
        options["token_ids"] = request.pop("token_ids")["ids"]
    if "chat" in request:
        options |= chat_options(request.pop("chat"))
    if "deadline_ms" in case.get("client", {}):
        options["deadline_s"] = case["client"]["deadline_ms"] / 1000
    for part in ("sampling", "stopping", "response"):
        options |= request.pop(part, {})
    return {**options, **request}


def chat_options(chat: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation of a case as options of the client's methods."""
    options: dict[str, Any] = {
        name: chat[name]
        for name in ("add_generation_prompt", "continue_final_message")
        if name in chat
    }
    options["messages"] = [openai_message(one) for one in chat["messages"]]
    if "tools" in chat:
        options["tools"] = [json.loads(tool["definition_json"]) for tool in chat["tools"]]
    if "template_args_json" in chat:
        options["template_args"] = json.loads(chat["template_args_json"])
    return options


def openai_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a case as callers of the client write it."""
    found = dict(message)
    if "parts" in found:
        found["content"] = [{"type": "text", **part} for part in found.pop("parts")]
    if "tool_calls" in found:
        found["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": json.loads(call["arguments_json"]),
                },
            }
            for call in found["tool_calls"]
        ]
    return found


def stream_in_thread(address: str, case: Case) -> Outcome:
    """Play a case of Generate with `Client`."""
    outcome = Outcome()
    last = case.get("client", {}).get("cancel_after_deltas")
    with Client(address, retry=SOON) as client, client.generate(**options_of(case)) as stream:
        try:
            for event in stream:
                outcome.take(event)
                if outcome.num_deltas == last:
                    break
        except TandemError as error:
            outcome.error = error
    return outcome


def stream_in_loop(address: str, case: Case) -> Outcome:
    """Play a case of Generate with `AsyncClient`."""
    outcome = Outcome()
    last = case.get("client", {}).get("cancel_after_deltas")

    async def play() -> None:
        async with (
            AsyncClient(address, retry=SOON) as client,
            client.generate(**options_of(case)) as stream,
        ):
            async for event in stream:
                outcome.take(event)
                if outcome.num_deltas == last:
                    return

    try:
        asyncio.run(play())
    except TandemError as error:
        outcome.error = error
    return outcome


def complete_in_thread(address: str, case: Case) -> Outcome:
    """Play a case of Complete with `Client`."""
    outcome = Outcome()
    with Client(address, retry=SOON) as client:
        try:
            outcome.take_whole(client.complete(**options_of(case)))
        except TandemError as error:
            outcome.error = error
    return outcome


def complete_in_loop(address: str, case: Case) -> Outcome:
    """Play a case of Complete with `AsyncClient`."""
    outcome = Outcome()

    async def play() -> None:
        async with AsyncClient(address, retry=SOON) as client:
            outcome.take_whole(await client.complete(**options_of(case)))

    try:
        asyncio.run(play())
    except TandemError as error:
        outcome.error = error
    return outcome


@dataclass
class Printed:
    """Result of the program of protos/README: text by choice, and the words of its error."""

    texts: dict[int, str] = field(default_factory=dict)
    output_tokens: int | None = None
    error: str | None = None


def readme_program(address: str, case: Case) -> Printed:
    """Play a case of Generate with the program of protos/README, which then never sleeps."""
    (source,) = re.findall(r"```python\n(.*?)```", PROTOS_README.read_text(), re.DOTALL)
    program: dict[str, Any] = {"__name__": "client"}
    exec(compile(source, "protos/README.md", "exec"), program)
    program["time"] = SimpleNamespace(sleep=lambda _seconds: None)
    printed, num_deltas = Printed(), 0
    last = case.get("client", {}).get("cancel_after_deltas")
    with grpc.insecure_channel(address) as channel:
        stub = inference_grpc.InferenceServiceStub(channel)
        request = ParseDict(case["request"], inference.GenerateRequest())
        pieces = program["generate"](stub, request)
        try:
            while num_deltas != last:
                choice, text = next(pieces)
                printed.texts[choice] = printed.texts.get(choice, "") + text
                num_deltas += 1
        except StopIteration as end:
            printed.output_tokens = end.value.usage.output_tokens
        except (RuntimeError, AssertionError) as error:
            printed.error = str(error)
        pieces.close()
    return printed
