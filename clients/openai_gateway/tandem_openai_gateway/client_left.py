"""HTTP clients that leave before their answer is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientLeft(Exception):
    """The HTTP client closed its connection."""


async def until_left(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """
    Wait for some work, which is cancelled when the client leaves; return its result.

    Args:
        receive: Function that gives ASGI messages; the body was read before.
        work: The work.

    Raises:
        ClientLeft: The client left first.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
