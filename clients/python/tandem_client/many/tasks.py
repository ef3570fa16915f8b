"""Many completions at once, for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable

from tandem.errors import TandemError
from tandem_client.many import Item, Outcome, refused
from tandem_client.many.shared_tasks import SharedStream
from tandem_client.streams.aio_stream import AsyncGenerationStream

Start = Callable[[Item], AsyncGenerationStream]
"""Function that makes the stream of one prompt."""


async def in_tasks(
    start: Start,
    prompts: Iterable[Item] | AsyncIterable[Item],
    concurrency: int,
    shared: SharedStream | None = None,
) -> AsyncGenerator[Outcome]:
    """Yield the outcome of each prompt, in order; arguments as in `in_threads`."""
    free = asyncio.Semaphore(concurrency)

    async def outcome(item: Item) -> Outcome:
        async with free:
            try:
                async with start(item) as stream:
                    return await stream.result()
            except TandemError as error:
                return error
            except TypeError as error:
                return refused(error)

    ahead: deque[asyncio.Task[Outcome]] = deque()
    source = _each(prompts)
    has_more = True
    try:
        while True:
            while has_more and len(ahead) < 2 * concurrency:
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    has_more = False
                else:
                    ahead.append(asyncio.create_task(outcome(item)))
            if not ahead:
                return
            await asyncio.wait((ahead[0],))
            yield ahead.popleft().result()
    finally:
        await _end(ahead, shared)


async def _end(ahead: Iterable[asyncio.Task[Outcome]], shared: SharedStream | None) -> None:
    for task in ahead:
        task.cancel()
    await asyncio.gather(*ahead, return_exceptions=True)
    if shared is not None:
        await shared.close()


async def _each(prompts: Iterable[Item] | AsyncIterable[Item]) -> AsyncIterator[Item]:
    if isinstance(prompts, AsyncIterable):
        async for item in prompts:
            yield item
    else:
        for item in prompts:
            yield item
