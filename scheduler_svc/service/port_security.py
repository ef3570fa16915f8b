"""Checks of the files of encryption and identity before a frontend is started with them."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from scheduler_svc.config.frontend_security import FrontendSecurity
from scheduler_svc.frontend.identity.credentials_file import read_credentials
from scheduler_svc.frontend.operators.metrics_http import METRICS_TOKENS
from tandem.errors import InvalidConfig
from tandem.network.tls_files import ServerTls
from tandem.network.tls_pairs import expiry
from tandem.network.token_file import TokenFile
from tandem.process.telemetry import warn_where_unprotected


def check_files(security: FrontendSecurity) -> None:
    """
    Check every file, so that a wrong one ends the start with one error instead of one per frontend.

    Raises:
        InvalidConfig: One of them cannot be used.
    """
    for tls in (security.public_tls(), security.admin_tls(), security.metrics_tls()):
        if tls is not None:
            _check_tls(tls)
    if security.metrics_token_file is not None:
        TokenFile(Path(security.metrics_token_file), METRICS_TOKENS)
    if security.tokens_file is not None:
        read_credentials(Path(security.tokens_file))


def warn_where_open(addresses: Mapping[str, str], security: FrontendSecurity) -> None:
    """Log a warning for each address, by setting, that other machines can use or read."""
    ports = {
        "listen": (security.public_tls(), security.tokens_file),
        "admin_listen": (security.admin_tls(), security.tokens_file),
        "metrics_listen": (security.metrics_tls(), security.metrics_token_file),
    }
    for setting, address in addresses.items():
        tls, tokens_file = ports.get(setting, (None, None))
        has_tokens = tokens_file is not None
        is_authenticated = has_tokens or (tls is not None and tls.requires_client_certificate)
        warn_where_unprotected(
            {setting: address}, is_encrypted=tls is not None, is_authenticated=is_authenticated
        )


def _check_tls(tls: ServerTls) -> None:
    expiry(tls.certificate, tls.key, ssl.Purpose.SERVER_AUTH)
    if tls.client_ca is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(tls.client_ca)
    except OSError as error:  # of which ssl.SSLError is a kind
        raise InvalidConfig(
            f"the TLS file {tls.client_ca} holds no certificate to trust: {error.strerror}"
        ) from error
