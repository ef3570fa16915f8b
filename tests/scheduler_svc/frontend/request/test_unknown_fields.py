"""A field that the server does not know is refused, at any depth, and never left out in silence."""

from __future__ import annotations

import pytest

from scheduler_svc.frontend.request.unknown_fields import refuse_unknown_fields
from tandem.errors import FeatureUnsupported
from tandem.inference.v1.inference_service_pb2 import GenerateRequest

NEWER = b"\xfa\x3f\x01x"  # field 1023, length-delimited
FULL = GenerateRequest(
    chat={
        "messages": [{"role": "user", "content": "x"}, {"role": "a", "tool_calls": [{"name": "f"}]}]
    },
    sampling={"temperature": 0.5, "logit_bias": {3: 1.0}},
    stopping={"stop": ["x"]},
    resume={"choices": [{"choice": 0, "token_ids": [1]}]},
)


def test_known_fields_pass():
    """
    A request with fields at every depth is not refused.
    """
    refuse_unknown_fields(FULL)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("", lambda request: request),
        ("sampling", lambda request: request.sampling),
        ("stopping", lambda request: request.stopping),
        ("chat.messages[1].tool_calls[0]", lambda request: request.chat.messages[1].tool_calls[0]),
        ("resume.choices[0]", lambda request: request.resume.choices[0]),
    ],
)
def test_unknown_field_is_refused_at_any_depth(path, part):
    """
    The error has the path of the message around the field, and the field's number.
    """
    request = GenerateRequest()
    request.CopyFrom(FULL)
    part(request).MergeFromString(NEWER)
    with pytest.raises(FeatureUnsupported, match="a field of number 1023") as caught:
        refuse_unknown_fields(request)
    assert path == caught.value.field
