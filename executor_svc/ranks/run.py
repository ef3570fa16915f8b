"""Work of the processes of one model beside serving: to join, to load together, to follow."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Protocol

import structlog
import torch

from executor_svc.config.settings import ExecutorSettings
from executor_svc.device.choice import resolve_device
from executor_svc.model.config import read_model_config
from executor_svc.model.shares import sharding_of
from executor_svc.parallel.process_groups import ProcessGroups
from executor_svc.ranks.children import Children, kill_parent
from executor_svc.ranks.follower import Follower
from executor_svc.ranks.joining import (
    accept_channels,
    connect_channel,
    join_groups,
    open_store,
)
from executor_svc.ranks.leader import FollowingRanks
from executor_svc.ranks.place import RankPlace
from executor_svc.server.loaded import Engine
from tandem.errors import InvalidConfig, TandemError
from tandem.process.exit_codes import EXIT_DONE, EXIT_FAILED
from tandem.process.process_start import refuse

END_S = 5.0
"""Seconds that rank 0 takes to end once its step is finished, at most."""

_UNPROTECTED = (
    "ranks on several machines meet, and exchange steps and sums, without encryption or a "
    "credential: let nobody else reach the ports of their network"
)

_log = structlog.get_logger(__name__)


class Load(Protocol):
    """Loads this rank's share of the model, together with the other ranks."""

    def __call__(self, groups: ProcessGroups, device: str, boot_id: str = "") -> Engine:
        """Return the engine; `boot_id` is that of rank 0, and of no use elsewhere."""


class Leader:
    """Rank 0: the server's loader joins the other ranks first, and `end` ends them with us."""

    def __init__(
        self, place: RankPlace, settings: ExecutorSettings, children: Children | None, load: Load
    ) -> None:
        """
        Args:
            place: Our place.
            settings: The settings of all ranks.
            children: The ranks that this process started; None if a launcher does that.
            load: Loads our share.
        """
        self._place = place
        self._settings = settings
        self._children = children
        self._load = load
        self._ranks: FollowingRanks | None = None

    def load(self, boot_id: str, on_fatal: Callable[[TandemError], None]) -> Engine:
        """
        Join the other ranks, load with them, and return the engine with its followers.

        Args:
            boot_id: Id of this process.
            on_fatal: Called on another thread when another rank cannot load.

        Raises:
            TandemError: The settings do not allow ranks, a rank is missing, or the engine cannot be
                loaded.
        """
        place = self._place
        if not place.starts_others:
            _log.warning("ranks_unprotected", what=_UNPROTECTED)
        device = device_of(place, self._settings.device)
        _check_sizes(self._settings.model, place)
        store = open_store(place, self._children)
        channels = accept_channels(place, store, self._check_children)
        self._ranks = ranks = FollowingRanks(channels, on_fatal)
        ranks.start()
        engine = self._load(join_groups(place, store, device), device, boot_id)
        ranks.begin()
        return replace(engine, followers=ranks)

    def end(self) -> None:
        """Let the other ranks end in good order."""
        if self._ranks is not None:
            self._ranks.end()

    def _check_children(self) -> None:
        if self._children is not None:
            self._children.check()


def follow(place: RankPlace, settings: ExecutorSettings, load: Load) -> int:
    """
    Run a rank other than 0, and return its exit code once rank 0 has ended in good order.

    Raises:
        TandemError: Rank 0 cannot be reached.
    """
    structlog.contextvars.bind_contextvars(rank=place.rank)
    parent = place.parent
    if parent is None:
        _end_after_rank_0(settings.stop_grace_s)
        # Rank 0 refuses such a size too, and never opens the store.
        _check_sizes(settings.model, place)
    store = open_store(place, None)

    def on_silent(error: TandemError) -> None:
        if parent is not None:
            refuse(error)  # first: the kernel kills this process once its parent is dead
            kill_parent(parent)
            os._exit(EXIT_FAILED)

    def loaded() -> Engine:
        device = device_of(place, settings.device)
        return load(join_groups(place, store, device), device)

    follower = Follower(connect_channel(place, store), on_silent=on_silent)
    follower.start()
    follower.run(loaded)
    return EXIT_DONE


def _check_sizes(model: Path, place: RankPlace) -> None:
    """Raise InvalidConfig if so many ranks cannot hold the model."""
    sharding_of(read_model_config(model), size=place.tp_size, pipeline_size=place.pp_size)


def _end_after_rank_0(grace_s: float) -> None:
    """
    Have SIGTERM and SIGINT, which a launcher sends to all ranks at once, leave this process alive
    while rank 0 finishes its step, for which it needs all ranks; and no longer.
    """

    def on_stop(_number: int, _frame: FrameType | None) -> None:
        late = threading.Timer(grace_s + END_S, os._exit, [EXIT_FAILED])
        late.daemon = True
        late.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_stop)


def device_of(place: RankPlace, device: str) -> str:
    """
    Return the device of one rank: on GPUs each takes one of its own, from the one that is named on.

    Raises:
        InvalidConfig: Ranks cannot compute there.
    """
    if resolve_device(device).type != "cuda":
        return device
    first, num_gpus = resolve_device(device).index or 0, torch.cuda.device_count()
    if place.starts_others and num_gpus < first + place.size:
        raise InvalidConfig(
            f"each of the {place.size} ranks takes a GPU, from cuda:{first} on, but there are "
            f"{num_gpus} CUDA devices: lower tp_size or pp_size, or use --device cpu"
        )
    return f"cuda:{first + place.local_rank}"
