"""
Certificates that rendered manifests ask of cert-manager, which is not there: made here, renewed,
and moved to other authorities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import trustme

Document = dict[str, Any]
Content = dict[str, bytes]
"""Content of a Secret by key."""


@dataclass(slots=True)
class _Issuer:
    name: str
    number: int = 1
    authority: trustme.CA = field(init=False)
    trusted: bytes = field(init=False)
    """Certificates of authorities that its callers trust."""

    def __post_init__(self) -> None:
        self.authority = self._next()
        self.trusted = self.authority.cert_pem.bytes()

    def _next(self) -> trustme.CA:
        return trustme.CA(organization_name=f"{self.name} {self.number}")

    def replace(self) -> None:
        """Have another authority, which is trusted beside the one before."""
        self.number += 1
        self.authority = self._next()
        self.trusted += self.authority.cert_pem.bytes()

    def issue(self, names: Sequence[str], common_name: str, *, is_expired: bool = False) -> Content:
        leaf = self.authority.issue_cert(
            *names,
            common_name=common_name,
            not_before=datetime(2020, 1, 1, tzinfo=UTC) if is_expired else None,
            not_after=datetime.now(UTC) - timedelta(days=1) if is_expired else None,
        )
        return {
            "tls.crt": b"".join(one.bytes() for one in leaf.cert_chain_pems),
            "tls.key": leaf.private_key_pem.bytes(),
        }


class CertManager:
    """
    Authorities and certificates of one rendering.

    Attributes:
        secrets: Content of the Secret of each Certificate, by name: ca.crt, tls.crt and tls.key.
    """

    def __init__(
        self, documents: Sequence[Document], clients: Mapping[str, str] | None = None
    ) -> None:
        """
        Make all certificates.

        Args:
            documents: All documents of the rendering.
            clients: Name of the issuer of each further certificate, by the name of its Secret, which
                is that of a client outside the manifests.
        """
        specs = [
            one["spec"]
            for one in documents
            if one["kind"] == "Certificate" and not one["spec"].get("isCA")
        ]
        specs += [
            {"secretName": name, "commonName": name, "issuerRef": {"name": issuer}}
            for name, issuer in (clients or {}).items()
        ]
        self._specs = {spec["secretName"]: spec for spec in specs}
        names = {spec["issuerRef"]["name"] for spec in specs}
        self._issuers = {name: _Issuer(name) for name in sorted(names)}
        self.secrets: dict[str, Content] = {name: {} for name in self._specs}
        self.trust()
        self.renew()

    def renew(self) -> None:
        """Issue all certificates anew, by the present authorities."""
        for name, spec in self._specs.items():
            hosts = spec.get("dnsNames", [])
            common_name = spec.get("commonName", (hosts or [name])[0])
            issuer = self._issuers[spec["issuerRef"]["name"]]
            self.secrets[name] |= issuer.issue(hosts or [common_name], common_name)

    def replace_authorities(self) -> None:
        """Have other authorities, which ca.crt names beside those before; certificates stay."""
        for issuer in self._issuers.values():
            issuer.replace()
        self.trust()

    def forget_old_authorities(self) -> None:
        """Let ca.crt name the present authorities alone."""
        for issuer in self._issuers.values():
            issuer.trusted = issuer.authority.cert_pem.bytes()
        self.trust()

    def trust(self) -> None:
        """Write what is trusted into each Secret."""
        for name, spec in self._specs.items():
            self.secrets[name]["ca.crt"] = self._issuers[spec["issuerRef"]["name"]].trusted

    def issued(self, secret: str) -> Content:
        """Return a certificate like that of a Secret, which the present authority issues now."""
        issuer = self._issuers[self._specs[secret]["issuerRef"]["name"]]
        return {"ca.crt": issuer.trusted} | issuer.issue([secret], secret)

    def expired(self, secret: str) -> Content:
        """Return a certificate like that of a Secret, which was valid until yesterday."""
        issuer = self._issuers[self._specs[secret]["issuerRef"]["name"]]
        return {"ca.crt": issuer.trusted} | issuer.issue([secret], secret, is_expired=True)

    def foreign(self, secret: str) -> Content:
        """Return a certificate like that of a Secret, of an authority that no service knows."""
        issuer = self._issuers[self._specs[secret]["issuerRef"]["name"]]
        return {"ca.crt": issuer.trusted} | _Issuer(issuer.name).issue([secret], secret)
