"""Files of tokens, one a line, of which a caller must send one."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from tandem.errors import InvalidConfig
from tandem.network.newest_files import NewestFiles

MIN_TOKEN_CHARS = 16
KEY = "authorization"
_TOKEN = re.compile(rf"[\x21-\x7e]{{{MIN_TOKEN_CHARS},}}")
_SCHEME = "Bearer "


class TokenFile:
    """
    Tokens of a file, one a line: the first is sent and all are accepted, so that a token can be
    replaced while services run. The file is read again once it has changed.
    """

    def __init__(self, path: Path, what: str) -> None:
        """
        Args:
            path: The file.
            what: What the file is, for errors.

        Raises:
            InvalidConfig: The file cannot be read, or has no token or a short one.
        """
        self._tokens = NewestFiles([path], lambda: _read(path, what))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata to send with a call."""
        return ((KEY, f"{_SCHEME}{self._tokens.newest()[0]}"),)

    def accepts(self, authorizations: Iterable[object]) -> bool:
        """
        Return True for one value of `authorization` with one of the tokens, after a time that does
        not tell which.
        """
        given = list(authorizations)
        text = given[0] if len(given) == 1 and isinstance(given[0], str) else ""
        matches = [
            hmac.compare_digest(text.encode(), f"{_SCHEME}{token}".encode())
            for token in self._tokens.newest()
        ]
        return any(matches)


def _read(path: Path, what: str) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise InvalidConfig(f"cannot read {what} {path}: {why}") from error
    tokens = tuple(line.strip() for line in lines if line.strip())
    if not tokens or not all(_TOKEN.fullmatch(token) for token in tokens):
        raise InvalidConfig(
            f"{path} must have one token a line, each of {MIN_TOKEN_CHARS} or more characters "
            "without spaces: write one with `openssl rand -hex 32`"
        )
    return tokens
