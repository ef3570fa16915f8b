"""
Threads of the server's calls, divided so that health watchers cannot shut a scheduler out.

    step link: Describe, GetTokenizer, OpenSession, Execute     NUM_LINK_THREADS, of their own
    all others: health, reflection, Profile                     NUM_OTHER_THREADS, of which calls
                                                                that last hold MAX_LASTING at most
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health

from executor_svc.server.service import SERVICE_NAME
from tandem.errors import QueueFull
from tandem.network import reflection

NUM_LINK_THREADS = 16
NUM_OTHER_THREADS = 16
MAX_LASTING = 8
"""Most health watchers and reflection streams at a time; a probe answers without either."""
MAX_CALLS = 1024
"""Most calls at a time, with those that wait for a thread; gRPC itself refuses more."""

_LASTING = (
    f"/{health.SERVICE_NAME}/Watch",
    f"/{reflection.SERVICE_NAME}/{reflection.METHOD}",
    f"/{reflection.NEWER_SERVICE_NAME}/{reflection.METHOD}",
)
_PROFILE = f"/{SERVICE_NAME}/Profile"


def is_of_link(method: str) -> bool:
    """Return True if a method's calls run on the threads of the step link."""
    return method.startswith(f"/{SERVICE_NAME}/") and method != _PROFILE


class CallPlaces(grpc.ServerInterceptor):  # type: ignore[type-arg]  # no generic at run time
    """Interceptor that refuses health watchers and reflection streams over `MAX_LASTING`."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(MAX_LASTING)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Bound the method that the continuation finds, if its calls last."""
        handler = continuation(handler_call_details)
        if handler is None or handler_call_details.method not in _LASTING:
            return handler
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                self._bounded(handler.stream_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        assert handler.unary_stream, "both methods that last answer with a stream"
        return grpc.unary_stream_rpc_method_handler(
            self._bounded(handler.unary_stream),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _bounded(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        def run(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            if not self._free.acquire(blocking=False):
                raise QueueFull(
                    f"{MAX_LASTING} health watchers and reflection streams are open already: close "
                    "one, or ask by Check",
                    metadata={"limit": "lasting_calls"},
                )
            try:
                yield from behavior(request, context)
            finally:
                self._free.release()

        return run
