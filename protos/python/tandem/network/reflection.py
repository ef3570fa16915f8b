"""
Server reflection under both of its names. Newer tools ask for `grpc.reflection.v1` first, which
gRPC's Python library does not have; its messages are those of `v1alpha`, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer as AsyncReflectionServicer

SERVICE_NAME: str = reflection.SERVICE_NAME
NEWER_SERVICE_NAME = "grpc.reflection.v1.ServerReflection"
METHOD = "ServerReflectionInfo"


def serve_reflection(server: Any, services: Sequence[str]) -> None:
    """
    Add reflection to a server.

    Args:
        server: A `grpc.Server` or `grpc.aio.Server`.
        services: Full names of the services that it tells of, besides reflection.
    """
    names = (*services, SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    is_async = isinstance(server, grpc.aio.Server)
    make = AsyncReflectionServicer if is_async else reflection.ReflectionServicer
    servicer = make(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    newer = grpc.method_handlers_generic_handler(NEWER_SERVICE_NAME, {METHOD: handler})
    server.add_generic_rpc_handlers((newer,))
    server.add_registered_method_handlers(NEWER_SERVICE_NAME, {METHOD: handler})
