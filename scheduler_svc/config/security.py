"""Settings of encryption and identity: of the ports to listen on, and of calls to executors."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from scheduler_svc.config.frontend_security import FrontendSecurity
from tandem.network.tls_files import ClientTls, client_tls
from tandem.settings.options import Group
from tandem.settings.schema import INSECURE_LINK, LinkTokenFile, OptionGroup


class PortSecuritySettings(OptionGroup):
    """Certificates to listen with, and the file of credentials that callers must have."""

    group: ClassVar[Group] = Group.SECURITY

    tls_cert: Path | None = Field(
        None,
        description="certificate to listen with, in PEM format, with intermediate ones; a changed "
        "file is used by the next connection",
    )
    tls_key: Path | None = Field(None, description="private key of the certificate, in PEM format")
    tls_client_ca: Path | None = Field(
        None,
        description="certificates that sign clients' certificates; a client without one cannot "
        "connect",
    )
    admin_tls_cert: Path | None = Field(
        None, description="certificate of the operators' port; default: tls_cert"
    )
    admin_tls_key: Path | None = Field(
        None, description="private key of admin_tls_cert; default: tls_key"
    )
    admin_tls_client_ca: Path | None = Field(
        None,
        description="certificates that sign operators' certificates; default: tls_client_ca",
    )
    metrics_tls_cert: Path | None = Field(
        None, description="certificate of the port of /metrics; default: plain HTTP"
    )
    metrics_tls_key: Path | None = Field(None, description="private key of metrics_tls_cert")
    metrics_tls_client_ca: Path | None = Field(
        None, description="certificates that sign those of programs that may read /metrics"
    )
    metrics_token_file: Path | None = Field(
        None,
        description="file of tokens, one a line, of which a reader of /metrics must send one; a "
        "changed file is read again",
    )
    tokens_file: Path | None = Field(
        None,
        description="TOML or JSON file of the credentials that callers must have, tokens as hashes "
        "of `tandem token`; a changed file is read again; default: none is asked for",
    )

    def frontend_security(self) -> FrontendSecurity:
        """Return the settings that frontends need, those of the admin port with their defaults."""
        return FrontendSecurity(
            tls_cert=_text(self.tls_cert),
            tls_key=_text(self.tls_key),
            tls_client_ca=_text(self.tls_client_ca),
            admin_tls_cert=_text(self.admin_tls_cert or self.tls_cert),
            admin_tls_key=_text(self.admin_tls_key or self.tls_key),
            admin_tls_client_ca=_text(self.admin_tls_client_ca or self.tls_client_ca),
            metrics_tls_cert=_text(self.metrics_tls_cert),
            metrics_tls_key=_text(self.metrics_tls_key),
            metrics_tls_client_ca=_text(self.metrics_tls_client_ca),
            metrics_token_file=_text(self.metrics_token_file),
            tokens_file=_text(self.tokens_file),
        )


class ExecutorSecuritySettings(OptionGroup):
    """Encryption of the calls to executors, and proof that they are ours."""

    group: ClassVar[Group] = Group.SECURITY

    executor_ca: Path | None = Field(
        None,
        description="certificates, in PEM format, that sign executors' certificates; executors are "
        "then called over TLS",
    )
    executor_cert: Path | None = Field(
        None, description="certificate to show to executors, in PEM format; needs executor_key"
    )
    executor_key: Path | None = Field(
        None, description="private key of executor_cert, in PEM format"
    )
    link_token_file: LinkTokenFile = Field(
        None, description="file whose first line is the token to send to executors"
    )
    insecure_link: bool = Field(False, description=INSECURE_LINK)

    @property
    def executor_tls(self) -> ClientTls | None:
        """The files to call executors with; None for plain text."""
        return client_tls(
            self.executor_ca, self.executor_cert, self.executor_key, prefix="executor_"
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
