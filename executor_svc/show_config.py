"""
`python -m executor_svc.show_config [flags]`: print the settings that the service would run with, as
JSON, without starting it. Takes the service's flags, files and environment.
"""

from __future__ import annotations

import json
import os
import sys

from executor_svc.config import ENV_PREFIX, load_settings
from tandem.errors import InvalidConfig


def main() -> int:
    """Print the settings, or what is wrong with them; the exit code is the service's own."""
    try:
        loaded = load_settings(sys.argv[1:], os.environ)
    except InvalidConfig as error:
        sys.stderr.write(f"{error.reason}: {error.message}\n")
        return 2
    entries = [
        {"name": name, "value": value, "source": _kind_of(loaded.sources.get(name))}
        for name, value in loaded.settings.model_dump(mode="json").items()
    ]
    report = {"settings": entries, "warnings": loaded.limits.warnings()}
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


def _kind_of(written: str | None) -> str:
    if written is None:
        return "default"
    if written.startswith("--"):
        return "flag"
    return "environment" if written.startswith(ENV_PREFIX) else "file"


if __name__ == "__main__":
    sys.exit(main())
