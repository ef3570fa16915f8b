"""A gRPC server of one bidirectional method with bytes as messages, for tests of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

NUM_THREADS = 4


class OneMethodServer(grpc.GenericRpcHandler):
    """Serves from the start; `server.stop` ends it."""

    def __init__(
        self,
        method: str,
        execute: Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]],
        *,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._method, self._execute = method, execute
        self.server = grpc.server(ThreadPoolExecutor(NUM_THREADS))
        self.server.add_generic_rpc_handlers((self,))
        here = "127.0.0.1:0"
        port = (
            self.server.add_insecure_port(here)
            if credentials is None
            else self.server.add_secure_port(here, credentials)
        )
        self.address = f"127.0.0.1:{port}"
        self.server.start()

    def service(self, handler_call_details):
        if handler_call_details.method == self._method:
            return grpc.stream_stream_rpc_method_handler(self._execute)
        return None
