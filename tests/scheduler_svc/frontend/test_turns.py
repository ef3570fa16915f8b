import asyncio

from scheduler_svc.frontend.turns import Bell, Turns


class TestTurns:
    async def test_a_few_go_on_per_round_in_order(self):
        """
        Of many that wait, as many as allowed go on in each round of the loop, oldest first.
        """
        turns, went = Turns(per_round=2), []
        bells = [Bell(turns) for _ in range(5)]

        async def listen(number: int) -> None:
            await bells[number].wait()
            went.append(number)

        tasks = [asyncio.create_task(listen(number)) for number in range(5)]
        await asyncio.sleep(0)
        for number in (3, 1, 0, 4, 2):
            bells[number].ring()
        seen = []
        while len(went) < 5:
            await asyncio.sleep(0)
            seen.append(len(went))
        assert [3, 1, 0, 4, 2] == went
        assert {0, 2, 4, 5} == set(seen)
        await asyncio.gather(*tasks)

    async def test_who_is_cancelled_is_passed_over(self):
        """
        A waiter that was cancelled costs nobody a turn and raises nothing.
        """
        turns = Turns(per_round=1)
        gone, other = Bell(turns), Bell(turns)
        tasks = [asyncio.create_task(bell.wait()) for bell in (gone, other)]
        await asyncio.sleep(0)
        gone.ring()
        other.ring()
        tasks[0].cancel()
        await asyncio.wait_for(tasks[1], 5.0)
        assert tasks[0].cancelled()

    async def test_new_work_is_seen_between_rounds(self):
        """
        However many streams always have more to send, what else the loop has to do is done.
        """
        turns = Turns(per_round=4)
        num_turns = 0

        async def greedy(bell: Bell) -> None:
            nonlocal num_turns
            while True:
                bell.ring()
                await bell.wait()
                num_turns += 1

        tasks = [asyncio.create_task(greedy(Bell(turns))) for _ in range(100)]
        await asyncio.sleep(0)
        before = num_turns
        for _ in range(10):
            await asyncio.sleep(0)
        assert 0 < num_turns - before <= 4 * 11
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class TestBell:
    async def test_rings_while_nobody_listens_are_one(self):
        """
        Rung several times before anybody listens, it wakes the listener once.
        """
        bell = Bell(Turns())
        bell.ring()
        bell.ring()
        await asyncio.wait_for(bell.wait(), 5.0)
        again = asyncio.create_task(bell.wait())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not again.done()
        bell.ring()
        await asyncio.wait_for(again, 5.0)
