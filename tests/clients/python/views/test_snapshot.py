"""Calls of one snapshot."""

from __future__ import annotations

from tandem_client import AdminClient
from tandem_client.admin.aio import AsyncAdminClient
from tandem_client.views.snapshot import SHOWN_STEPS, take_snapshot, take_snapshot_async


async def test_snapshot_asks_for_the_steps_that_are_shown(server):
    """
    A snapshot asks for no more steps than a view shows.
    """
    with AdminClient(server.address) as admin:
        take_snapshot(admin)
    async with AsyncAdminClient(server.address) as aio:
        await take_snapshot_async(aio)
    assert [SHOWN_STEPS, SHOWN_STEPS] == server.seen.num_steps_asked
