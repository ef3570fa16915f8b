import asyncio

from scheduler_svc.frontend.stream.turns import Bell, StreamTurns
from tests.scheduler_svc.frontend.fake_core import until, within

FOREVER_S = 3600.0


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Listeners:
    """Streams that note when they get a turn, and then send until the test lets them come back."""

    def __init__(self, turns: StreamTurns, count: int) -> None:
        self.went: list[int] = []
        self.bells = [Bell(turns) for _ in range(count)]
        self.sent = [asyncio.Event() for _ in range(count)]
        self.tasks = [asyncio.create_task(self._listen(number)) for number in range(count)]

    async def _listen(self, number: int) -> None:
        while True:
            await self.bells[number].wait()
            self.went.append(number)
            await self.sent[number].wait()
            self.sent[number].clear()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class TestTurns:
    async def test_some_go_on_at_once_in_order(self):
        """
        As many streams as allowed go on at once, oldest first; one that comes back lets the next go
        on.
        """
        streams = Listeners(StreamTurns(2, FOREVER_S), 5)
        await settle()
        for number in (3, 1, 0, 4, 2):
            streams.bells[number].ring()
        await settle()
        assert [3, 1] == streams.went
        streams.sent[1].set()
        await settle()
        assert [3, 1, 0] == streams.went
        streams.bells[1].ring()
        for number in (3, 0, 4, 2):
            streams.sent[number].set()
        await settle()
        assert [3, 1, 0, 4, 2, 1] == streams.went
        await streams.close()

    async def test_who_does_not_come_back_holds_up_nobody_for_long(self):
        """
        Streams that wait for their clients soon do not count, and harm no other stream when they
        return.
        """
        streams = Listeners(StreamTurns(2, 0.001), 4)
        await settle()
        for bell in streams.bells:
            bell.ring()
        await until(lambda: len(streams.went) == 4)
        assert [0, 1, 2, 3] == streams.went
        for sent in streams.sent:
            sent.set()
        await settle()
        for bell in streams.bells:
            bell.ring()
        await until(lambda: len(streams.went) == 8)
        await streams.close()

    async def test_who_is_cancelled_is_passed_over(self):
        """
        A stream that was cancelled takes no turn from another and raises nothing.
        """
        turns = StreamTurns(1, FOREVER_S)
        gone, other = Bell(turns), Bell(turns)
        busy = Listeners(turns, 1)
        tasks = [asyncio.create_task(bell.wait()) for bell in (gone, other)]
        await settle()
        busy.bells[0].ring()
        gone.ring()
        other.ring()
        tasks[0].cancel()
        await settle()
        assert not tasks[1].done()
        busy.sent[0].set()
        await within(tasks[1])
        assert tasks[0].cancelled()
        await busy.close()


class TestBell:
    async def test_rings_while_nobody_listens_are_one(self):
        """
        A bell that rings several times before a listener comes wakes it once.
        """
        bell = Bell(StreamTurns())
        bell.ring()
        bell.ring()
        await within(bell.wait())
        again = asyncio.create_task(bell.wait())
        await settle()
        assert not again.done()
        assert not bell._is_rung
        bell.ring()
        await within(again)
