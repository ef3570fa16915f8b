"""Certificates that change while streams run, and callers that must be refused then."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import TandemError, Unauthenticated
from tandem_client import NO_RETRY, Client
from tandem_client.admin.client import is_serving
from tandem_client.channel import ChannelOptions
from tests.certificates import first_certificate, shown_certificate
from tests.deploy.events.event import NUM_EXECUTORS, EventFailed
from tests.deploy.pods.certificates.cert_manager import CertManager, Content
from tests.deploy.pods.certificates.secret_folders import write_secrets
from tests.deploy.pods.cluster import SECOND, Cluster
from tests.deploy.pods.setting import CLIENT
from tests.waiting import TooLate, wait_until

STEP_LIMIT_S = 30.0
"""Longest time until every port has read changed files."""
LINK = "tandem-link-scheduler"
"""Secret of the certificate that the scheduler shows to executors."""


class RotationError(EventFailed):
    """A port that shows an old certificate, or serves a caller that it must refuse."""


def renew(cluster: Cluster) -> None:
    """Renew all certificates; their authorities stay."""
    _certificates(cluster).renew()
    cluster.write_secrets()
    _wait_for(lambda: check_newest(cluster))


def replace_authorities(cluster: Cluster) -> None:
    """
    Move both ports to other authorities: first they are trusted beside the old ones, then they
    issue all certificates, then the old ones are forgotten. Then an executor is replaced, so that
    the scheduler connects to it with the new certificates.
    """
    certificates = _certificates(cluster)
    former = {name: dict(certificates.secrets[name]) for name in (CLIENT, LINK)}
    certificates.replace_authorities()
    cluster.write_secrets()
    _wait_for(lambda: check_trusted(cluster))
    certificates.renew()
    cluster.write_secrets()
    _wait_for(lambda: check_newest(cluster))
    certificates.forget_old_authorities()
    cluster.write_secrets()
    _wait_for(lambda: check_refusals(cluster, former))
    check_newest(cluster)
    cluster.replace(SECOND)
    cluster.wait_for(NUM_EXECUTORS)
    check_newest(cluster)


def _wait_for(check: Callable[[], None]) -> None:
    """
    Repeat a check until it finds nothing wrong.

    Raises:
        RotationError: It still does after `STEP_LIMIT_S`.
    """
    found: list[RotationError] = []

    def is_right() -> bool:
        try:
            check()
        except RotationError as error:
            found.append(error)
            return False
        return True

    try:
        wait_until(is_right, "ports have read their files", STEP_LIMIT_S, 0.5)
    except TooLate as error:
        raise found[-1] from error


def check_trusted(cluster: Cluster) -> None:
    """
    Check that each port serves a caller with a certificate of the present authority.

    Raises:
        RotationError: One of them refuses it.
    """
    for number, port in enumerate(_ports(cluster)):
        folder = cluster.folder / "checks" / f"trusted-{number}"
        _write(folder, _certificates(cluster).issued(port.client))
        if refusal := _refusal(port, folder):
            raise RotationError(f"{port.address} does not trust the new authority: {refusal}")


def check_newest(cluster: Cluster) -> None:
    """
    Check that the public port and those of all executors show their newest certificates.

    Raises:
        RotationError: One of them shows another one.
    """
    for number, port in enumerate(_ports(cluster)):
        folder = cluster.folder / "checks" / f"newest-{number}"
        _write(folder, _certificates(cluster).secrets[port.client])
        context = ssl.create_default_context(cafile=folder / "ca.crt")
        context.check_hostname = False  # it is called by its address
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        context.set_alpn_protocols(["h2"])
        try:
            shown = shown_certificate(port.address, context)
        except ssl.SSLError as error:
            raise RotationError(f"{port.server_name}, {port.address}: {error}") from error
        wanted = cluster.folder / "checks" / f"wanted-{number}"
        _write(wanted, _certificates(cluster).secrets[port.secret])
        if shown != first_certificate(wanted / "tls.crt"):
            raise RotationError(f"{port.address} shows an older certificate of {port.secret}")


def check_refusals(cluster: Cluster, former: dict[str, Content]) -> None:
    """
    Check that each port serves the present certificate and none of a stranger, and that the public
    port serves no caller without a token.

    Args:
        cluster: The cluster.
        former: Content of the clients' Secrets when the former authorities had issued them.

    Raises:
        RotationError: A stranger is served, or the present certificate is not.
    """
    certificates = _certificates(cluster)
    for port in _ports(cluster):
        client = port.client
        present = certificates.secrets[client]
        callers = {
            "the present certificate": present,
            "a certificate of a foreign authority": certificates.foreign(client),
            "an expired certificate": certificates.expired(client),
            "a certificate of the former authority": former[client] | {"ca.crt": present["ca.crt"]},
            "no certificate": {"ca.crt": present["ca.crt"]},
        }
        for number, (caller, content) in enumerate(callers.items()):
            folder = cluster.folder / "checks" / f"{client}-{number}"
            _write(folder, content)
            refusal = _refusal(port, folder)
            if bool(refusal) != (number > 0):
                what = f"a caller with {caller}: {refusal or 'was served'}"
                raise RotationError(f"{port.server_name}, {port.address}: {what}")
    paths = cluster.access.paths()
    try:
        with Client(
            cluster.access.scheduler, retry=NO_RETRY, server_name="tandem-scheduler", **paths
        ) as stranger:
            stranger.get_model()
    except Unauthenticated:
        return
    raise RotationError("the public port serves a caller without a token")


def _certificates(cluster: Cluster) -> CertManager:
    assert cluster.setting.certificates is not None
    return cluster.setting.certificates


@dataclass(frozen=True, slots=True, kw_only=True)
class _Port:
    """A port with TLS: its address and name, its own Secret, and that of its callers."""

    address: str
    server_name: str
    secret: str
    client: str


def _ports(cluster: Cluster) -> list[_Port]:
    public = _Port(
        address=cluster.access.scheduler,
        server_name="tandem-scheduler",
        secret="tandem-scheduler-tls",
        client=CLIENT,
    )
    links = [
        _Port(
            address=f"{cluster.pods.address(pod)}:50061",
            server_name=pod.workload,
            secret="tandem-link-executor",
            client=LINK,
        )
        for pod in cluster.present
        if pod.workload == "tandem-executor"
    ]
    return [public, *links]


def _refusal(port: _Port, folder: Path) -> str:
    """Return why a port does not serve a caller; empty if it does. Health needs no token."""
    has_pair = (folder / "tls.crt").exists()
    options = ChannelOptions(
        ca=folder / "ca.crt",
        cert=folder / "tls.crt" if has_pair else None,
        key=folder / "tls.key" if has_pair else None,
        server_name=port.server_name,
    )
    try:
        is_serving(port.address, "tandem.ready", timeout_s=10, options=options)
    except TandemError as error:
        return str(error)
    return ""


def _write(folder: Path, content: Content) -> None:
    files = {f"{folder.name}/{key}": text for key, text in content.items()}
    write_secrets(files, folder.parent)
