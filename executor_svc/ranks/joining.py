"""How the ranks of a model find each other: a store, a channel to rank 0, and process groups."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # no public name is typed

from executor_svc.parallel.agreement import check_agreement
from executor_svc.parallel.collectives import AllRanks
from executor_svc.parallel.process_groups import ProcessGroups
from executor_svc.ranks.channel import (
    HEADER_BYTES,
    Channel,
    ChannelClosed,
    Frame,
    FrameReader,
    Kind,
)
from executor_svc.ranks.children import Children
from executor_svc.ranks.place import LOOPBACK, RankPlace
from tandem.errors import InternalError
from tandem.network.address import host_and_port

JOIN_S = 300.0
"""Seconds within which all ranks must have started."""
COLLECTIVE_S = 3600.0
"""
Seconds that a collective waits for a rank. It is longer than the slowest load, and no measure of
death: the channels notice that.
"""
_HELLO_S = 1.0
"""Seconds within which a new connection names its rank; the others wait meanwhile."""
_LOOK_S = 0.1
_TOKEN_BYTES = 16
_KEY = "channel"


def open_store(place: RankPlace, children: Children | None) -> Store:
    """
    Open the store in which the ranks meet; rank 0 serves it unless a launcher does.

    Raises:
        InternalError: It cannot be reached.
    """
    serves = place.rank == 0 and not place.has_store
    port = place.port if children is None else children.port
    listening = None if children is None else children.meeting.detach()
    try:
        store = TCPStore(
            place.host,
            port,
            place.size,
            serves,
            timeout=timedelta(seconds=JOIN_S),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except (distributed.DistError, RuntimeError) as error:
        raise InternalError(
            f"rank {place.rank} cannot meet the others at {place.host}:{port}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return PrefixStore(f"tandem/{place.attempt}", store)


def accept_channels(place: RankPlace, store: Store, check: Callable[[], None]) -> list[Channel]:
    """
    Let the other ranks connect to this one, rank 0, and return their channels in order.

    Args:
        place: Our place.
        store: The store in which they find our address.
        check: Called now and then; raises if they cannot come any more.

    Raises:
        InternalError: One did not come in time.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    host = LOOPBACK if place.starts_others else ""
    channels: dict[int, Channel] = {}
    with socket.create_server((host, 0), backlog=place.size) as listener:
        listener.settimeout(_LOOK_S)
        port = listener.getsockname()[1]
        store.set(_KEY, f"{place.host}:{port} {token.hex()}")
        end_s = time.monotonic() + JOIN_S
        while len(channels) < place.size - 1:
            check()
            if time.monotonic() > end_s:
                missing = [rank for rank in range(1, place.size) if rank not in channels]
                raise InternalError(f"ranks {missing} of the model did not come in {JOIN_S:g} s")
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            rank = _rank_of(connection, token)
            if rank is None or not 0 < rank < place.size or rank in channels:
                connection.close()
            else:
                channels[rank] = Channel(connection, rank)
    return [channels[rank] for rank in sorted(channels)]


def connect_channel(place: RankPlace, store: Store) -> Channel:
    """
    Connect to rank 0.

    Raises:
        InternalError: It cannot be reached.
    """
    try:
        address, token = store.get(_KEY).decode().split()
        connection = socket.create_connection(host_and_port(address), JOIN_S)
        connection.settimeout(None)
        channel = Channel(connection, 0)
        channel.send(Frame(Kind.HELLO, seq=place.rank, payload=bytes.fromhex(token)))
    except (distributed.DistError, RuntimeError, OSError, ChannelClosed) as error:
        raise InternalError(f"rank {place.rank} cannot reach rank 0: {error}") from error
    return channel


def join_groups(place: RankPlace, store: Store, device: str) -> ProcessGroups:
    """
    Make the process groups of this model, which all ranks do together.

    Raises:
        InvalidConfig: The ranks are set to different numbers of stages.
    """
    if place.parent is not None or place.starts_others:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing leaves this machine
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo",
        store=PrefixStore("groups", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    group = distributed.group.WORLD
    if group is None:
        raise InternalError("PyTorch made no group of the ranks")
    groups = ProcessGroups.of_tensor(group)
    check_agreement(AllRanks(groups).all_of({"pp_size": str(place.pp_size)}))
    if place.pp_size == 1:
        return groups
    timeout = timedelta(seconds=COLLECTIVE_S)
    return ProcessGroups.of_stages(place.tp_size, place.pp_size, timeout)


def _rank_of(connection: socket.socket, token: bytes) -> int | None:
    """Return the rank that connects; None for a stranger."""
    end_s = time.monotonic() + _HELLO_S
    received = b""
    length = HEADER_BYTES + len(token)  # and no more: signs of life may follow
    try:
        while len(received) < length:
            connection.settimeout(max(end_s - time.monotonic(), 0.001))
            if not (piece := connection.recv(length - len(received))):
                break
            received += piece
        hello = next(iter(FrameReader().feed(received)), None)
    except (OSError, InternalError):
        return None
    if hello is None or hello.kind is not Kind.HELLO:
        return None
    return hello.seq if secrets.compare_digest(hello.payload, token) else None
