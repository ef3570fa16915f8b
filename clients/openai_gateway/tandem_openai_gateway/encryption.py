"""Encryption of the connections to schedulers."""

from __future__ import annotations

from pathlib import Path

import grpc

from tandem_client.channel import ChannelOptions
from tandem_openai_gateway.settings import Settings


def channel_options(settings: Settings) -> ChannelOptions:
    """
    Return the options of connections to schedulers; the files are read once.

    Raises:
        OSError: A file cannot be read.
    """
    if settings.scheduler_ca is None:
        return ChannelOptions()
    return ChannelOptions(
        credentials=grpc.ssl_channel_credentials(
            settings.scheduler_ca.read_bytes(),
            _read(settings.scheduler_key),
            _read(settings.scheduler_cert),
        )
    )


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
