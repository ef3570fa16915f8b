"""Flags of the gateway of `tandem up` where the scheduler's ports have TLS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.errors import InvalidConfig

FILES = ("tls_cert", "admin_tls_cert", "metrics_tls_cert", "metrics_token_file", "tokens_file")
"""Settings of the scheduler that name files of security, one of each kind."""


def has_files(settings: Mapping[str, Any]) -> bool:
    """Return True if the scheduler reads files that may be wrong."""
    return any(settings.get(name) for name in FILES)


def gateway_arguments(settings: Mapping[str, Any], given: Sequence[str]) -> list[str]:
    """
    Return the gateway's flags: it listens with the public port's certificate, and calls that port,
    which checks its users' tokens.

    Args:
        settings: Values of the scheduler's settings.
        given: Flags that the user gave; they win.

    Raises:
        InvalidConfig: The gateway could not call the scheduler.
    """
    if not settings.get("tls_cert"):
        return list(given)
    asked = {"--scheduler-ca": "the authority of tls_cert"}
    if settings.get("tls_client_ca"):
        asked["--scheduler-cert"] = "a certificate of tls_client_ca"
        asked["--scheduler-key"] = "its key"
    lacking = [flag for flag in asked if not any(one.partition("=")[0] == flag for one in given)]
    if lacking:
        flags = " ".join(f"--gateway-arg={flag}=FILE" for flag in lacking)
        what = ", ".join(asked[flag] for flag in lacking)
        raise InvalidConfig(
            f"the gateway of --openai calls the public port over TLS: give {flags} ({what})"
        )
    own = [f"--tls-cert={settings['tls_cert']}", f"--tls-key={settings['tls_key']}"]
    return [*own, *given]
