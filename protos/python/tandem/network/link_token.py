"""The token that scheduler and executor share: sent by the one, asked for by the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc

from tandem.error_codes import Unauthenticated
from tandem.network.token_file import KEY, TokenFile


class LinkToken(TokenFile):
    """Tokens of the step link: the first is sent, and all are accepted."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            InvalidConfig: The file cannot be read, or has no token or a short one.
        """
        super().__init__(path, "the link's token file")

    def is_in(self, metadata: Any) -> bool:
        """Return True if a call's metadata has one of the tokens, after a time that tells none."""
        return self.accepts(value for key, value in metadata or () if key == KEY)


class TokenGuard(grpc.ServerInterceptor):  # type: ignore[type-arg]  # no generic at run time
    """
    Interceptor that refuses calls of one service without the token; other services, such as health,
    stay open. It raises, so an interceptor around it must turn errors into statuses.
    """

    def __init__(self, service: str, token: LinkToken) -> None:
        """
        Args:
            service: Full name of the service to guard.
            token: The token to ask for.
        """
        self._prefix = f"/{service}/"
        self._token = token

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the method that the continuation finds, or one that refuses the call."""
        handler = continuation(handler_call_details)
        is_guarded = handler_call_details.method.startswith(self._prefix)
        if (
            handler is None
            or not is_guarded
            or self._token.is_in(handler_call_details.invocation_metadata)
        ):
            return handler
        if handler.unary_unary:
            make = grpc.unary_unary_rpc_method_handler
        elif handler.unary_stream:
            make = grpc.unary_stream_rpc_method_handler
        else:
            make = grpc.stream_stream_rpc_method_handler
        return make(_refuse)


def _refuse(_request: Any, _context: grpc.ServicerContext) -> NoReturn:
    raise Unauthenticated(
        "the call has no token that this executor accepts: give scheduler and executor the same "
        "--link-token-file"
    )
