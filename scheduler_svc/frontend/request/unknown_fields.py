"""Fields that a newer client sends and this server does not know: refused, never ignored."""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from tandem.errors import FeatureUnsupported


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """
    Refuse a message that has a field, at any depth, which this version of the contract lacks: what
    it asks for would be left out of the answer in silence.

    Raises:
        FeatureUnsupported: There is such a field; the error has the path of the message around it.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        where = path or message.DESCRIPTOR.name
        raise FeatureUnsupported(
            f"{where} has a field of number {unknown[0].field_number}, which this server does not "
            "know: it is of a newer version of the contract; see GetModel for what is supported.",
            field=path,
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        inside = f"{path}.{field.name}" if path else field.name
        if field.is_repeated:
            for at, one in enumerate(value):
                refuse_unknown_fields(one, f"{inside}[{at}]")
        else:
            refuse_unknown_fields(value, inside)
