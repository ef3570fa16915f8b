"""
Rule of the step link: beyond this machine it needs client certificates or a token.

Prompts and outputs cross the link, and a caller that opens a session there decides what the device
computes and shuts the scheduler out. Both services check their own end before they start.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from tandem.errors import InvalidConfig
from tandem.network.address import is_unix, names_this_machine
from tandem.network.listen_address import reaches_beyond_this_machine

_UNLESS = "or, where every machine of the network is trusted, insecure_link"


def check_listener(address: str, *, is_authenticated: bool, insecure_link: bool) -> None:
    """
    Check that an executor may listen on an address.

    Args:
        address: HOST:PORT or unix:PATH.
        is_authenticated: True if it serves only callers with a client certificate or a token.
        insecure_link: True if the operator has said that neither is needed.

    Raises:
        InvalidConfig: Other machines can reach the address, and the executor would serve them all.
    """
    if is_authenticated or insecure_link or not reaches_beyond_this_machine(address):
        return
    raise InvalidConfig(
        f"listen: other machines can reach {address}, and nothing on it is authenticated: whoever "
        "connects decides what this executor computes, reads prompts and shuts its scheduler out; "
        "set link_token_file, or tls_client_ca with tls_cert and tls_key, or listen on 127.0.0.1 "
        f"or unix:PATH, {_UNLESS}",
        field="listen",
    )


def check_executors(
    addresses: Sequence[str], *, is_authenticated: bool, insecure_link: bool
) -> None:
    """
    Check that a scheduler may call executors. No name but localhost is taken for this machine's:
    names are not looked up, as what one means may change while the service runs.

    Args:
        addresses: Addresses of executors, those that stand by included.
        is_authenticated: True if calls carry a client certificate or a token.
        insecure_link: True if the operator has said that neither is needed.

    Raises:
        InvalidConfig: One of them is not of this machine, and nothing would prove to it who calls.
    """
    if is_authenticated or insecure_link:
        return
    away = [address for address in addresses if not names_this_machine(address)]
    if away:
        raise InvalidConfig(
            f"executor: {', '.join(away)} cannot be told to be this machine, and nothing proves to "
            "an executor that calls come from this scheduler, so it would have to serve every "
            "caller; set link_token_file, or executor_cert and executor_key with executor_ca, here "
            f"and their counterparts at the executor, {_UNLESS}",
            field="executor",
        )


@contextlib.contextmanager
def socket_of_this_user(address: str, *, is_open: bool) -> Iterator[None]:
    """
    Have a unix socket that is bound in the block be one that this process's user alone can open.

    Args:
        address: Address that is bound; one that is no unix socket is left alone.
        is_open: True to leave it to the process's umask, as other users may open the socket.
    """
    if is_open or not is_unix(address):
        yield
        return
    # Processes of other users could connect before a chmod that follows the bind.
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
