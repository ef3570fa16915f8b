"""Protection of each port of a scheduler, by its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def protection_of(setting: str, settings: Mapping[str, Any]) -> tuple[bool, bool]:
    """
    Return whether a port is encrypted, and whether it serves only callers with a credential.

    Args:
        setting: Setting of the port's address: listen, admin_listen or metrics_listen.
        settings: Values of all settings of the scheduler, by name.
    """
    own = setting.removesuffix("listen")
    is_metrics = setting == "metrics_listen"

    def has(file: str) -> bool:
        # The port of /metrics has files of its own; the admin port has those of the public one.
        return bool(settings.get(f"{own}{file}") or (settings.get(file) and not is_metrics))

    tokens = settings.get("metrics_token_file" if is_metrics else "tokens_file")
    return has("tls_cert"), has("tls_client_ca") or bool(tokens)
