"""`python -m kernels.cpu_extension`: build the library now, not at an engine's first start."""

from __future__ import annotations

import sys

import structlog

from kernels.cpu_extension.build import ExtensionUnavailable, built_library


def main() -> int:
    """Print the library's path and return 0, or print the reason it is missing and return 1."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        print(built_library())  # noqa: T201  # what the command is for
    except ExtensionUnavailable as error:
        print(f"no library of C++ kernels: {error}", file=sys.stderr)  # noqa: T201  # likewise
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
