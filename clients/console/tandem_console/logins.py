"""Logins as requests: their form, and the causes for which the console itself refuses one."""

from __future__ import annotations

import json
from typing import ClassVar

from starlette.requests import Request

MAX_LOGIN_BYTES = 8192


class LoginRefused(Exception):
    """
    The console refuses a login, whatever the scheduler says.

    Attributes:
        status: Status of the HTTP answer.
        reason: Name of the cause, for programs.
        message: What was wrong, and what to do.
    """

    status: ClassVar[int]
    reason: ClassVar[str]
    message: ClassVar[str]


class TooManySessions(LoginRefused):
    """Every session has an open page, so that none can give way to another."""

    status, reason = 503, "TOO_MANY_SESSIONS"
    message = "too many sessions are open: log out of one"


class TooManyLogins(LoginRefused):
    """So many logins wait already that a further one would wait too long."""

    status, reason = 429, "TOO_MANY_LOGINS"
    message = "too many logins wait: try again in a few seconds"


class NoTokensAsked(LoginRefused):
    """The scheduler serves the certificate of this console, and so takes any token."""

    status, reason = 403, "NO_TOKENS_ASKED"
    message = (
        "the scheduler takes any token from this console, which shows it a certificate, so that a "
        "login proves nothing: give the scheduler a tokens file"
    )


class OtherSite(LoginRefused):
    """A page of another site sent the request."""

    status, reason = 403, "OTHER_SITE"
    message = "a page of another site can neither log in nor log out here"


class WrongType(LoginRefused):
    """The body is not said to be JSON."""

    status, reason = 415, "INVALID_LOGIN"
    message = "a login has the content-type application/json"


class TooLarge(LoginRefused):
    """The body is longer than any login."""

    status, reason = 413, "TOO_LARGE"
    message = f"a login has at most {MAX_LOGIN_BYTES} bytes"


class NoToken(LoginRefused):
    """The body holds no token."""

    status, reason = 400, "INVALID_LOGIN"
    message = 'a login is JSON: {"token": "..."}'


class UnusableToken(LoginRefused):
    """The token cannot be sent."""

    status, reason = 400, "INVALID_LOGIN"
    message = "a token is printable ASCII without spaces"


def check_site(request: Request) -> None:
    """Raise OtherSite if a browser says that another site's page sent this; old ones do not say."""
    if request.headers.get("sec-fetch-site", "none") not in {"same-origin", "none"}:
        raise OtherSite


async def token_of(request: Request) -> str:
    """
    Return the token of a login.

    Raises:
        LoginRefused: The request is no login, or comes from another site.
    """
    check_site(request)
    # A form of another site can send other types without asking this console for leave.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise WrongType
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_LOGIN_BYTES:
            raise TooLarge
    try:
        content = json.loads(body)
    except ValueError:
        raise NoToken from None
    token = content.get("token") if isinstance(content, dict) else None
    if not isinstance(token, str) or not token:
        raise NoToken
    return token
