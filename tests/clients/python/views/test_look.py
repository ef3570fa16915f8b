"""Calls of one look."""

from __future__ import annotations

from tandem_client import AdminClient
from tandem_client.admin.aio import AsyncAdminClient
from tandem_client.views.look import SHOWN_STEPS, take_look, take_look_async


async def test_look_asks_for_the_steps_that_are_shown(server):
    """
    A look asks for no more steps than a view shows.
    """
    with AdminClient(server.address) as admin:
        take_look(admin)
    async with AsyncAdminClient(server.address) as aio:
        await take_look_async(aio)
    assert [SHOWN_STEPS, SHOWN_STEPS] == server.seen.num_steps_asked
