"""The token that scheduler and executor share: sent by the one, asked for by the other."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import grpc

from tandem.error_codes import Unauthenticated
from tandem.errors import InvalidConfig
from tandem.network.newest_files import NewestFiles

MIN_TOKEN_CHARS = 16
_TOKEN = re.compile(rf"[\x21-\x7e]{{{MIN_TOKEN_CHARS},}}")
_KEY = "authorization"
_SCHEME = "Bearer "


class LinkToken:
    """
    Tokens of a file, one a line: the first is sent and all are accepted, so that a token can be
    replaced while services run. The file is read again once it has changed.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            InvalidConfig: The file cannot be read, or has no token or a short one.
        """
        self._tokens = NewestFiles([path], lambda: _read(path))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata to send with a call."""
        return ((_KEY, f"{_SCHEME}{self._tokens.newest()[0]}"),)

    def is_in(self, metadata: Any) -> bool:
        """Return True if a call's metadata has one of the tokens, after a time that tells none."""
        given = [value for key, value in metadata or () if key == _KEY]
        text = given[0] if len(given) == 1 and isinstance(given[0], str) else ""
        tokens = self._tokens.newest()
        matches = [
            hmac.compare_digest(text.encode(), f"{_SCHEME}{token}".encode()) for token in tokens
        ]
        return any(matches)


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


def _read(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise InvalidConfig(f"cannot read the link's token file {path}: {why}") from error
    tokens = tuple(line.strip() for line in lines if line.strip())
    if not tokens or not all(_TOKEN.fullmatch(token) for token in tokens):
        raise InvalidConfig(
            f"{path} must have one token a line, each of {MIN_TOKEN_CHARS} or more characters "
            "without spaces: write one with `openssl rand -hex 32`"
        )
    return tokens
