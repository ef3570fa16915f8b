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
    ) -> None:
        self._method, self._execute = method, execute
        self.server = grpc.server(ThreadPoolExecutor(NUM_THREADS))
        self.server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def service(self, handler_call_details):
        if handler_call_details.method == self._method:
            return grpc.stream_stream_rpc_method_handler(self._execute)
        return None
