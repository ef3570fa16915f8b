"""Random bodies for the gateway, drawn from the schemas of its /openapi.json."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import httpx

from tests.faults.fuzz.cases import Case
from tests.faults.fuzz.http_client import Client
from tests.faults.fuzz.judge import HANGS, LIMIT_S, NUM_AT_ONCE, End, Outcome, Verdict, judge

SERVER_BUG = 500
BAD_REQUEST = 400
_NOISE = (None, True, 0, -1, 1.5, 2**64, "", "x", "\ud7ff", [], {}, [[]], {"a": 1}, "user")
NOISE = 0.03
"""Share of values of any type, whatever the schema says."""
_SCALARS: Mapping[str, tuple[Any, ...]] = {
    "string": ("", "hi", "user", "assistant", "tool", "text", "tandem-py", "\x00", "é", "x" * 300),
    "integer": (0, 1, 2, 5, -1, 1000, 2**40),
    "number": (0, 0.5, 1, 2, -1, 1e30),
    "boolean": (False, True),
    "null": (None,),
}


class Bodies:
    """Source of bodies for the paths of one page."""

    def __init__(self, page: Mapping[str, Any]) -> None:
        self._schemas: Mapping[str, Any] = page["components"]["schemas"]
        self._paths = [
            (path, content["post"]["requestBody"]["content"]["application/json"]["schema"])
            for path, content in page["paths"].items()
            if "post" in content
        ]

    def draw(self, draw: random.Random) -> Case:
        """Return a path and a body."""
        path, schema = draw.choice(self._paths)
        body = self._value(schema, draw, 0)
        if isinstance(body, dict):
            body["max_tokens"] = draw.choice((1, 2, 3))
            if draw.random() < 0.8:
                body.pop("model", None)
        raw = json.dumps(body).encode()
        if draw.random() < 0.1:
            raw = raw[: draw.randrange(len(raw) + 1)] + draw.randbytes(draw.randrange(4))
        return Case("http", path, raw, is_stream=False)

    def _value(self, schema: Mapping[str, Any], draw: random.Random, depth: int) -> Any:
        while "$ref" in schema or "anyOf" in schema:
            if "$ref" in schema:
                schema = self._schemas[schema["$ref"].rpartition("/")[2]]
            else:
                schema = draw.choice(schema["anyOf"])
        kind = schema.get("type")
        if kind == "object" and draw.random() > NOISE:
            return self._object(schema, draw, depth)
        if kind == "array" and draw.random() > NOISE:
            items = schema.get("items") or {}
            return [self._value(items, draw, depth + 1) for _ in range(draw.randrange(4))]
        choices = schema.get("enum") or _SCALARS.get(str(kind), _NOISE)
        return draw.choice(_NOISE if draw.random() < NOISE else choices)

    def _object(self, schema: Mapping[str, Any], draw: random.Random, depth: int) -> dict[str, Any]:
        if depth > 5:
            return {}
        share, needed = draw.choice((0.05, 0.2, 0.5)), set(schema.get("required", ()))
        return {
            name: self._value(inner, draw, depth + 1)
            for name, inner in schema.get("properties", {}).items()
            if (name in needed and draw.random() < 0.95) or draw.random() < share
        }


async def run_bodies(address: str, *, count: int, seed: int) -> Outcome:
    """Send random bodies to a gateway and wait for the end of each; see `run_cases`."""
    draw = random.Random(seed)
    async with httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as reader:
        bodies = Bodies((await reader.get(f"http://{address}/openapi.json")).json())
    idle = [Client(address) for _ in range(NUM_AT_ONCE)]

    async def send(case: Case, limit_s: float) -> End:
        client = idle.pop()
        try:
            async with asyncio.timeout(limit_s):
                status, answer = await client.post(case.method, case.raw)
        except TimeoutError:
            return End(HANGS, Verdict.SUSPECT)
        except (OSError, EOFError, ValueError) as error:  # broken: whether by this case?
            return End(type(error).__name__, Verdict.SUSPECT)
        finally:
            idle.append(client)
        return End(
            str(status),
            Verdict.BAD if status == SERVER_BUG else Verdict.GOOD,
            is_decoded=status != BAD_REQUEST or b"invalid_json" not in answer,
        )

    try:
        return await judge((bodies.draw(draw) for _ in range(count)), send)
    finally:
        for client in idle:
            client.close()
