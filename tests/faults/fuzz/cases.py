"""Cases of each kind: a method, and the bytes of a request to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tandem.admin.v1 import admin_service_pb2
from tandem.executor.v1 import executor_service_pb2
from tandem.inference.v1 import inference_service_pb2
from tandem.inference.v1.inference_service_pb2 import GenerateRequest
from tests.faults.fuzz.messages import changed, fill

SPARED = frozenset({"Drain", "Suspend", "Profile"})
"""Methods of operators that end or stop the service, or record for a minute, as they should."""
SHORT_S = 0.02
"""Time limit of requests, seconds: most of what is accepted is not worth computing."""


@dataclass(frozen=True, slots=True)
class Case:
    """Bytes of one request to a method of the port `public`, `admin` or `executor`."""

    port: str
    method: str
    raw: bytes
    is_stream: bool
    """True for a method whose request is a stream: the bytes are its only message."""


_METHODS: Mapping[str, list[MethodDescriptor]] = {
    port: [
        method
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.name not in SPARED
    ]
    for port, module in (
        ("public", inference_service_pb2),
        ("admin", admin_service_pb2),
        ("executor", executor_service_pb2),
    )
}


def _case(port: str, method: MethodDescriptor, raw: bytes) -> Case:
    path = f"/{method.containing_service.full_name}/{method.name}"
    return Case(port, path, raw, method.client_streaming)


def _message(method: MethodDescriptor, draw: random.Random) -> Message:
    message = GetMessageClass(method.input_type)()
    fill(message, draw, share=draw.choice((0.1, 0.3, 0.6)))
    for request in (message, getattr(message, "request", None)):
        if isinstance(request, GenerateRequest):
            _tame(request, draw)
    return message


def _tame(request: GenerateRequest, draw: random.Random) -> None:
    """Have a request that is accepted end soon, and keep out what most of them would fail of."""
    if draw.random() < 0.8:
        for field in ("model", "structured_output", "resume"):
            request.ClearField(field)
        if request.WhichOneof("prompt") is None:
            request.text = "hello"
        request.time_limit_s = SHORT_S
    if draw.random() < 0.5:
        request.ClearField("request_id")
        request.sampling.Clear()
        request.response.Clear()


def fields(draw: random.Random) -> Case:
    """Return a message with random values in random fields, for any method of the scheduler."""
    port = draw.choice(("public", "public", "public", "admin"))
    method = draw.choice(_METHODS[port])
    return _case(port, method, _message(method, draw).SerializeToString())


def raw_bytes(draw: random.Random) -> Case:
    """Return bytes that are no message, or those of one that were changed, for any port."""
    port = draw.choice(("public", "admin", "executor"))
    method = draw.choice(_METHODS[port])
    if draw.random() < 0.1:
        return _case(port, method, draw.randbytes(draw.randrange(200)))
    raw = _message(method, draw).SerializeToString()
    return _case(port, method, raw if draw.random() < 0.3 else changed(raw, draw))


def resumes(draw: random.Random) -> Case:
    """Return a request whose `resume` has random ids, choices and ends."""
    method = next(one for one in _METHODS["public"] if one.name == "Generate")
    request = GenerateRequest(text="hello", time_limit_s=SHORT_S)
    request.stopping.max_tokens = draw.choice((1, 4, 64))
    if draw.random() < 0.8:
        request.sampling.seed = draw.randrange(2**53)
    if draw.random() < 0.3:
        request.stopping.stop.append(draw.choice(("a", " ", "fox")))
    if draw.random() < 0.3:
        request.n = draw.randrange(1, 4)
    request.resume.SetInParent()
    for _ in range(draw.randrange(4)):
        highest = draw.choice((1, 8, 500, 5000))
        request.resume.choices.add(
            choice=draw.choice((0, 0, 1, 2, 7)),
            token_ids=[draw.randrange(highest) for _ in range(draw.choice((0, 1, 3, 64)))],
            finished=draw.random() < 0.3,
        )
    return _case("public", method, request.SerializeToString())


KINDS: Mapping[str, Callable[[random.Random], Case]] = {
    "fields": fields,
    "bytes": raw_bytes,
    "resume": resumes,
}
