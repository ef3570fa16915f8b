"""Rules of access: which role a call needs, and what of a request its credential decides."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from scheduler_svc.frontend.identity.identity import Identity
from tandem.error_codes import Unauthenticated

HEALTH = "/grpc.health.v1.Health/"
"""Calls that need no credential: probes of orchestrators and balancers have none."""
AUTHORIZATION = "authorization"
_SCHEME = "bearer "


def is_open(method: str) -> bool:
    """Return True if a call of the method needs no credential."""
    return method.startswith(HEALTH)


def token_of(metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
    """
    Return the bearer token of a call's metadata; None if it has no `authorization`.

    Raises:
        Unauthenticated: The metadata has something else, or several.
    """
    found = [value for key, value in metadata if key == AUTHORIZATION]
    if not found:
        return None
    value = found[0].decode("latin-1") if isinstance(found[0], bytes) else found[0]
    if len(found) > 1 or not value.lower().startswith(_SCHEME):
        raise Unauthenticated("the metadata `authorization` must be one `Bearer TOKEN`")
    return value[len(_SCHEME) :].strip()


def certificate_names(auth_context: Mapping[str, Iterable[bytes]]) -> list[str]:
    """
    Return the names of a client certificate that gRPC has verified: alternative names, then the
    common name; empty if the client showed none.
    """
    keys = ("x509_subject_alternative_name", "x509_common_name")
    return [name.decode(errors="replace") for key in keys for name in auth_context.get(key) or ()]


def claim(request: Message, identity: Identity, path: str = "") -> None:
    """
    Fill tenant and priority of a request, at any depth, from a credential.

    Args:
        request: The message of an rpc; it is changed in place.
        identity: What the caller's credential stands for.
        path: Path of the message in the caller's request, ending with a dot; empty for all of it.

    Raises:
        PermissionDenied: The request names another tenant, or a higher priority, than it may.
    """
    fields = request.DESCRIPTOR.fields_by_name
    values: Any = request
    if "tenant" in fields:
        tenant = identity.tenant_for(values.tenant, f"{path}tenant")
        if tenant != values.tenant:
            values.tenant = tenant
    if "priority" in fields:
        asked = values.priority if values.HasField("priority") else None
        priority = identity.priority_for(asked, f"{path}priority")
        if priority != values.priority:
            values.priority = priority
    for name in _leading_to_tenants(request.DESCRIPTOR):
        for inner, where in _parts(request, name, path):
            claim(inner, identity, where)


def _parts(request: Message, name: str, path: str) -> Iterator[tuple[Message, str]]:
    field, value = request.DESCRIPTOR.fields_by_name[name], getattr(request, name)
    if field.is_repeated:
        for at, one in enumerate(value):
            yield one, f"{path}{name}[{at}]."
    elif field.containing_oneof is None or request.HasField(name):
        yield value, f"{path}{name}."


@functools.cache
def _leading_to_tenants(message: Descriptor) -> tuple[str, ...]:
    """Return the fields of a message whose own messages, at some depth, have a tenant."""
    return tuple(
        field.name
        for field in message.fields
        if field.message_type is not None and _has_tenant(field.message_type, frozenset())
    )


def _has_tenant(message: Descriptor, above: frozenset[str]) -> bool:
    if "tenant" in message.fields_by_name:
        return True
    above |= {message.full_name}
    return any(
        field.message_type is not None
        and field.message_type.full_name not in above
        and _has_tenant(field.message_type, above)
        for field in message.fields
    )
